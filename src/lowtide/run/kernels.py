"""Compiled bodies, as the executor sees them: a pointer per operand, bound once.

Problem.  A kernel is a C function on addresses; a step has windows that may move with every call, and may not
spend longer on its arguments than the kernel does on its work.

Method.  `Kernels` maps the content key of a body to its compiled form, so that equal bodies (the layers of a
model) share one.  A step owns an array of addresses that `Bindings` fills as it fills argument lists: windows
on the arena once, the caller's tensors when they are others.  Host numbers that several steps take are one
array.

Invariants.  Operands lie as the body says: `fits` compares strides before a step is made.  A step that is
told of an index outside its table raises IndexError.

Not done here: compiling (`lowtide.fusion.kernels`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from lowtide.analysis.key import graph_key
from lowtide.ir.graph import Graph, TensorMeta
from lowtide.ir.ops import Aten, Fused
from lowtide.run.bindings import Bindings, Window
from lowtide.run.calls import Call

__all__ = ["NO_KERNELS", "Addresses", "KernelCall", "Kernels", "Setup", "fits", "kernel_of", "kernel_step"]

Setup = Callable[[], None]
"""Fills what a kernel keeps."""


class Addresses:
    """The pointers of one call: takes tensors like an argument list, keeps where they start."""

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_void_p * max(count, 1))()

    def __setitem__(self, position: int, tensor: Tensor | None) -> None:
        self.array[position] = None if tensor is None else tensor.data_ptr()


class KernelCall(Protocol):
    """A compiled body.

    `key` names its code; `scratch_bytes` is the scratch memory of one call; `inplace` are the (output, input)
    pairs, by position in the body, that may share memory; `tensors` and `scalars` are the inputs that it
    takes as pointers and as numbers.  With `prepared_bytes` it takes one more pointer, to that many bytes
    that its setup fills from the inputs `constants`; a call does not read those in `setup_inputs`.
    """

    @property
    def key(self) -> str: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def inplace(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def tensors(self) -> tuple[int, ...]: ...
    @property
    def scalars(self) -> tuple[int, ...]: ...
    @property
    def prepared_bytes(self) -> int: ...
    @property
    def constants(self) -> tuple[int, ...]: ...
    @property
    def setup_inputs(self) -> tuple[int, ...]: ...

    def bind(self, addresses: Any, numbers: Any, scratch: int) -> Callable[[], None]:
        """A call on ctypes arrays, whose contents may change between two calls, and an address."""

    def bind_setup(self, addresses: Any, scratch: int) -> Callable[[], None]:
        """A call that fills what the kernel keeps, on the same array."""


Kernels = Mapping[str, KernelCall]
"""Compiled forms of bodies, by `graph_key`."""

NO_KERNELS: Kernels = MappingProxyType({})


def kernel_of(op: object, kernels: Kernels) -> KernelCall | None:
    """The compiled form of a fused operation, if there is one."""
    return kernels.get(graph_key(op.body)) if kernels and isinstance(op, Fused) else None


def fits(body: Graph, inputs: Sequence[Window], outputs: Sequence[Window]) -> bool:
    """Whether the operands of a node lie as its body says."""
    pairs = [*zip(body.inputs, inputs, strict=True), *zip(body.outputs, outputs, strict=True)]
    return all(_same_layout(body.values[value].meta, window.meta) for value, window in pairs)


def _same_layout(ours: TensorMeta, theirs: TensorMeta) -> bool:
    steps = zip(ours.shape, ours.stride, theirs.stride, strict=True)
    same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same and all(size <= 1 or one == other for size, one, other in steps)


def kernel_step(
    kernel: KernelCall,
    inputs: Sequence[Window],
    outputs: Sequence[Window],
    scratch: int,
    bindings: Bindings,
    kept: int = 0,
    setup_scratch: int = 0,
) -> tuple[Call, Setup | None]:
    """A call of `kernel` on windows, and its setup; scratch and what is kept are addresses."""
    operands = [*(inputs[position] for position in kernel.tensors), *outputs]
    addresses = Addresses(len(operands) + bool(kernel.prepared_bytes))
    for position, where in enumerate(operands):
        bindings.place(where, addresses, position)
    setup = None
    if kernel.prepared_bytes:
        addresses.array[len(operands)] = kept
        setup = kernel.bind_setup(addresses.array, setup_scratch)
    numbers = bindings.numbers(tuple(inputs[position].location.index for position in kernel.scalars))
    return Call(kernel.bind(addresses.array, numbers, scratch), Aten("lowtide.kernel")), setup
