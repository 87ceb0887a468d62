"""Optimizer updates as compiled kernels: one pass over parameter, gradient and state.

Problem.  AdamW is a dozen operators per parameter, each of which streams whole tensors through memory.

Method.  The bodies of a graph's update nodes are compiled together (`codegen.library`); a kernel does in one
pass what the body does call by call, rounding after each operation in the same order, so the result is
bit-equal.  Bodies that cannot be compiled, or that need scratch memory, run call by call.

Not done here: fusing anything else; memory (the node keeps the workspace of its unfused form).
"""

from __future__ import annotations

import ctypes

import torch

from lowtide.fusion.codegen.library import Kernel, compile_bodies
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir import Fused, Graph
from lowtide.run.lower import KernelCall, Kernels

__all__ = ["update_kernels"]


def update_kernels(graph: Graph) -> Kernels:
    """Compiled forms of the update bodies of `graph`; empty without a compiler."""
    bodies = list(
        dict.fromkeys(n.op.body for n in graph.nodes if isinstance(n.op, Fused) and n.op.kind == "update")
    )
    if not bodies:
        return {}
    try:
        library = compile_bodies(bodies)
    except Unfusable:
        return {}
    if library is None:
        return {}
    threads = torch.get_num_threads()
    return {
        body: _call(kernel)
        for body, kernel in zip(bodies, library.kernels, strict=True)
        if kernel.signature.scratch_bytes(threads) == 0
    }


def _call(kernel: Kernel) -> KernelCall:
    function, tensors, scalars = kernel.function, kernel.signature.tensors, kernel.signature.scalars
    addresses, numbers = ctypes.c_void_p * len(tensors), ctypes.c_double * max(len(scalars), 1)

    def run(*operands: torch.Tensor | float) -> None:
        function(
            addresses(*[operands[k].data_ptr() for k in tensors]),  # type: ignore[union-attr]
            numbers(*[operands[k] for k in scalars]),
            None,
            torch.get_num_threads(),
        )

    return run
