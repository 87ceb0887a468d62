"""Compiled kernels and how to call them.

Problem.  Executors bind Fused nodes to planned addresses; they need to know, per body, which pointers a
kernel takes, in which order, and how much scratch memory, without knowing how it was generated.

Method.  `compile_bodies` turns bodies into one library; ``library.kernel(i)`` belongs to ``bodies[i]``.
The C function is

    long kernel(char* const* pointers, const double* scalars, char* scratch, long threads)

with `pointers` = the address of each tensor input's first element (body.inputs order, host scalars left
out), then of each output (body.outputs order); `scalars` = the host scalars in body.inputs order;
`scratch` = `Signature.scratch_bytes(threads)` bytes, 64-byte aligned, contents free.  It returns 0, or
nonzero if an index tensor (embedding, gather) held an index outside its table.

Invariants.  Shapes and strides are those of the body's values; outputs do not overlap inputs except for the
pairs in `Signature.inplace`; storages that the body writes are written through their input pointers.
A kernel never allocates, and runs in the caller's thread plus torch's OpenMP threads.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowtide.fusion.codegen.c import GRAIN, Source, emit_kernel
from lowtide.fusion.codegen.compiler import CompileError, find_compiler
from lowtide.fusion.codegen.lower import lower
from lowtide.fusion.codegen.mathlib import preamble
from lowtide.fusion.codegen.shelf import functions_of
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir.graph import Graph, Role, TensorMeta

__all__ = ["Kernel", "KernelLibrary", "NoCompilerWarning", "Signature", "compile_bodies", "emit_source"]


class NoCompilerWarning(UserWarning):
    """No kernels on this machine: plans run unfused."""


@dataclass(frozen=True)
class Signature:
    """What a kernel's caller provides.

    `tensors` and `scalars` are positions in ``body.inputs``; `outputs` counts ``body.outputs``.  An output
    may take the memory of an input for the (output, input) pairs in `inplace`.  If `prepared_bytes`, one more
    pointer follows the outputs: a buffer of that size, aligned to 64, which `Kernel.prepare` fills from the
    inputs in `constants` (positions in ``body.inputs``) before the first call and whenever they changed; a
    call does not read those in `setup_inputs`.
    """

    tensors: tuple[int, ...]
    scalars: tuple[int, ...]
    outputs: int
    inplace: tuple[tuple[int, int], ...]
    shared_bytes: int
    thread_bytes: int
    points: int
    prepared_bytes: int = 0
    constants: tuple[int, ...] = ()
    setup_inputs: tuple[int, ...] = ()

    def scratch_bytes(self, threads: int) -> int:
        """Scratch memory of one call that may use `threads` threads."""
        used = threads if self.points >= GRAIN else 1
        return self.shared_bytes + max(used, 1) * self.thread_bytes


@dataclass(frozen=True)
class Kernel:
    """One compiled body."""

    name: str
    signature: Signature
    function: Callable[..., int]
    body: Graph
    setup: Callable[..., int] | None = None
    text: str = ""

    def prepare(self, pointers: Sequence[int], scratch: int) -> None:
        """Fill the prepared buffer (the last of `pointers`, which are as for a call)."""
        if self.setup is not None:
            addresses = (ctypes.c_void_p * len(pointers))(*pointers)
            self.setup(addresses, ctypes.c_void_p(scratch))

    def __call__(self, pointers: Sequence[int], scalars: Sequence[float], scratch: int, threads: int) -> None:
        """Run once on addresses; raises IndexError if an index tensor points outside its table."""
        self.bind(pointers, scalars, scratch, threads)()

    def bind(
        self, pointers: Sequence[int], scalars: Sequence[float], scratch: int, threads: int
    ) -> Callable[[], None]:
        """A call with fixed addresses (about a microsecond); `scalars` may be a ctypes array to refill."""
        addresses = (ctypes.c_void_p * max(len(pointers), 1))(*pointers)
        numbers = (
            scalars
            if isinstance(scalars, ctypes.Array)
            else (ctypes.c_double * max(len(scalars), 1))(*scalars)
        )
        room, count, function = ctypes.c_void_p(scratch), ctypes.c_long(threads), self.function

        def run() -> None:
            if function(addresses, numbers, room, count):
                raise IndexError(f"kernel {self.name}: an index is outside its table")

        return run

    def run(self, inputs: Sequence[torch.Tensor | float], threads: int = 1) -> tuple[torch.Tensor, ...]:
        """Run on tensors (laid out as the body's inputs say) and host scalars; allocates outputs."""
        outputs = tuple(_empty(self.body.values[out].meta) for out in self.body.outputs)
        tensors = [inputs[k] for k in self.signature.tensors]
        pointers = [t.data_ptr() for t in (*tensors, *outputs) if isinstance(t, torch.Tensor)]
        kept = self.signature.prepared_bytes
        scratch = torch.empty(self.signature.scratch_bytes(threads) + 128 + kept, dtype=torch.uint8)
        start = (scratch.data_ptr() + 63) // 64 * 64
        if kept:
            pointers.append(start + (self.signature.scratch_bytes(threads) + 63) // 64 * 64)
            self.prepare(pointers, start)
        self(pointers, [float(inputs[k]) for k in self.signature.scalars], start, threads)
        return outputs


def _empty(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)


@dataclass(frozen=True)
class KernelLibrary:
    """The kernels of several bodies, in the bodies' order; equal bodies share code."""

    kernels: tuple[Kernel, ...]
    source: str

    def kernel(self, position: int) -> Kernel:
        """The kernel of ``bodies[position]``."""
        return self.kernels[position]


def _signature(body: Graph, source: Source) -> Signature:
    scalars = tuple(k for k, v in enumerate(body.inputs) if body.storage_of(v).role is Role.HOST)
    tensors = tuple(k for k in range(len(body.inputs)) if k not in scalars)
    return Signature(
        tensors,
        scalars,
        len(body.outputs),
        source.inplace,
        source.shared_bytes,
        source.thread_bytes,
        source.points,
        source.prepared_bytes,
        tuple(k for k, v in enumerate(body.inputs) if body.storage_of(v).role is Role.CONST),
        source.setup_inputs,
    )


def _updates(body: Graph) -> bool:
    return any(node.writes for node in body.nodes)


def emit_source(bodies: Sequence[Graph], keep: bool = False) -> tuple[str, list[Source], list[str]]:
    """(one translation unit, source of each body, name of each body's function)."""
    names: dict[str, str] = {}
    parts, sources, functions = [], [], []
    for body in bodies:
        source = emit_kernel("KERNEL", lower(body, exact_sqrt=_updates(body), keep=keep))
        if source.text not in names:
            names[source.text] = f"lt_k{len(names)}"
            parts.append(source.text.replace("KERNEL", names[source.text]))
        sources.append(source)
        functions.append(names[source.text])
    head = preamble(
        any(s.uses_torch for s in sources),
        any(s.uses_brgemm for s in sources),
        any(s.uses_windows for s in sources),
    )
    return "\n".join([head, *parts, ""]), sources, functions


def compile_bodies(bodies: Sequence[Graph], keep: bool = False) -> KernelLibrary | None:
    """Kernels for `bodies`; None, with a `NoCompilerWarning`, where nothing can be compiled.

    `keep`: the caller keeps what kernels prepare from constants (`Signature.prepared_bytes`); convolutions
    have kernels only then.
    Raises Unfusable if a body holds something that has no kernel (the planner's `can_fuse` avoids these).
    """
    if find_compiler() is None:
        warnings.warn("no C++ compiler (g++ or $CXX): plans run unfused", NoCompilerWarning, stacklevel=2)
        return None
    text, sources, names = emit_source(bodies, keep)
    try:
        functions = functions_of(sources)
    except CompileError as error:
        warnings.warn(f"{error}; plans run unfused", NoCompilerWarning, stacklevel=2)
        return None
    rows = zip(bodies, sources, names, functions, strict=True)
    kernels = [
        Kernel(name, _signature(body, source), made.call, body, made.prepare, source.text)
        for body, source, name, made in rows
    ]
    return KernelLibrary(tuple(kernels), text)


def check(body: Graph, keep: bool = False) -> str | None:
    """Why `body` has no kernel; None if it has one."""
    try:
        emit_kernel("KERNEL", lower(body, exact_sqrt=_updates(body), keep=keep))
    except Unfusable as error:
        return str(error)
    return None
