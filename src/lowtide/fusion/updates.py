"""Optimizer updates as compiled kernels: one pass over parameter, gradient and state.

Problem.  AdamW is a dozen operators per parameter, each of which streams whole tensors through memory.

Method.  The bodies of a graph's update nodes are compiled together (`codegen.library`); a kernel does in one
pass what the body does call by call, rounding after each operation in the same order, so the result is
bit-equal.  Its scratch memory is a piece of the node's workspace; bodies that cannot be compiled, and
parameters too small for the scratch, run call by call.

Not done here: fusing anything else; memory (the node keeps the workspace of its unfused form).
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowtide.fusion.codegen.library import Kernel, compile_bodies
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir import Fused, Graph
from lowtide.run.lower import Kernels

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
    return {body: _Update(kernel, threads) for body, kernel in zip(bodies, library.kernels, strict=True)}


class _Update:
    """A kernel as the executor calls it."""

    def __init__(self, kernel: Kernel, threads: int) -> None:
        signature = kernel.signature
        self.scratch_bytes = signature.scratch_bytes(threads)
        self._function, self._threads = kernel.function, threads
        self._tensors, self._scalars = signature.tensors, signature.scalars
        self._addresses = ctypes.c_void_p * len(signature.tensors)
        self._numbers = ctypes.c_double * max(len(signature.scalars), 1)

    def __call__(self, *operands: Tensor | float, scratch: Tensor) -> None:
        self._function(
            self._addresses(*[operands[k].data_ptr() for k in self._tensors]),  # type: ignore[union-attr]
            self._numbers(*[float(operands[k]) for k in self._scalars]),
            ctypes.c_void_p(scratch.data_ptr()),
            self._threads,
        )
