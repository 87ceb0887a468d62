"""Compiled kernels for the fused nodes of graphs, as the executor takes them.

Problem.  A plan's fused nodes sit at any depth, most of them are copies of one another (layers), and the same
ones are asked for again by the next candidate, by a saved plan, by another process.

Method.  Bodies are taken by content key, so that every distinct one is compiled once; a `Foundry` remembers
what it has made, and the disk what any process has (`codegen.shelf`).  Optimizer updates are bodies like any
other: one pass over parameter, gradient and state, rounding after each operation in the optimizer's order, so
bit-equal.

Not done here: choosing groups (`planner`), running (`lowtide.run`).
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.analysis.key import graph_key
from lowtide.fusion.codegen.compiler import find_compiler
from lowtide.fusion.codegen.library import Kernel, NoCompilerWarning, check, compile_bodies
from lowtide.fusion.codegen.lower import lower
from lowtide.fusion.codegen.overlap import overlaps
from lowtide.ir import Fission, Fused, Graph
from lowtide.run.kernels import KernelCall
from lowtide.run.plan import Plan

__all__ = ["Foundry", "bodies_in", "compile_plan", "kernels_for"]


def bodies_in(graph: Graph) -> Iterator[Graph]:
    """The bodies of all fused nodes, those inside regions included."""
    for node in graph.nodes:
        if isinstance(node.op, Fused):
            yield node.op.body
        elif isinstance(node.op, Fission):
            for body in node.op.bodies:
                yield from bodies_in(body)


def kernels_for(graph: Graph, keep: bool = False) -> dict[str, KernelCall]:
    """Compiled forms of the fused bodies of `graph`; with a warning none where nothing can be compiled.

    `keep`: as in `Foundry`.
    """
    return dict(Foundry(keep=keep).kernels(graph))


def compile_plan(plan: Plan) -> None:
    """Have a loaded plan run its fused groups as kernels, which keep packed weights if it does."""
    plan.use_kernels(kernels_for(plan.graph, keep=plan.recipe.derivation is not None))


@dataclass
class Foundry:
    """Makes kernels, each once; `made` has them by body key, None where there is none.

    With `keep`, kernels keep what they make of weights (`Derivation`), and convolutions have kernels.
    """

    threads: int = field(default_factory=torch.get_num_threads)
    made: dict[str, KernelCall | None] = field(default_factory=dict)
    keep: bool = False

    def kernels(self, *graphs: Graph) -> Mapping[str, KernelCall]:
        """The kernels of all fused bodies in `graphs`."""
        bodies = {graph_key(body): body for graph in graphs for body in bodies_in(graph)}
        self.make(bodies.values())
        return {key: made for key in bodies if (made := self.made[key]) is not None}

    def make(self, bodies: Iterable[Graph]) -> None:
        """Compile what is not known yet, all at once."""
        new = {graph_key(body): body for body in bodies if graph_key(body) not in self.made}
        if not new:
            return
        self.made.update(dict.fromkeys(new))
        if find_compiler() is None:
            warnings.warn("no C++ compiler (g++ or $CXX): plans run unfused", NoCompilerWarning, stacklevel=3)
            return
        able = {key: body for key, body in new.items() if check(body, self.keep) is None}
        library = compile_bodies(list(able.values()), self.keep) if able else None
        if library is not None:
            for key, kernel in zip(able, library.kernels, strict=True):
                self.made[key] = _Compiled.of(kernel, self.threads, self.keep)


@dataclass(frozen=True)
class _Compiled:
    """A kernel with its number of threads."""

    kernel: Kernel
    threads: int
    key: str
    scratch_bytes: int
    inplace: tuple[tuple[int, int], ...]
    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    prepared_bytes: int
    constants: tuple[int, ...]
    setup_inputs: tuple[int, ...]

    @staticmethod
    def of(kernel: Kernel, threads: int, keep: bool) -> _Compiled:
        signature = kernel.signature
        return _Compiled(
            kernel,
            threads,
            hashlib.sha256(f"{threads} {kernel.text}".encode()).hexdigest()[:24],
            signature.scratch_bytes(threads),
            overlaps(lower(kernel.body, keep=keep)) if signature.outputs else (),
            signature.tensors,
            signature.scalars,
            signature.prepared_bytes,
            signature.constants,
            signature.setup_inputs,
        )

    def bind(self, addresses: Any, numbers: Any, scratch: int) -> Callable[[], None]:
        """A call on arrays whose contents may change, and an address."""
        function, name = self.kernel.function, self.kernel.name
        room, count = ctypes.c_void_p(scratch), ctypes.c_long(self.threads)

        def run() -> None:
            if function(addresses, numbers, room, count):
                raise IndexError(f"kernel {name}: an index is outside its table")

        return run

    def bind_setup(self, addresses: Any, scratch: int) -> Callable[[], None]:
        """The call that fills what the kernel keeps."""
        setup, room = self.kernel.setup, ctypes.c_void_p(scratch)
        assert setup is not None

        def run() -> None:
            setup(addresses, room)

        return run
