"""Fake stand-ins ("twins") for the tensors that exist before a step, and a model that runs on them.

Problem.  A step has to be run without data and without touching the user's tensors, yet shapes, strides and
shared memory have to be the user's own: tied weights, views into a flat buffer, transposed arguments.

Method.  Each tensor gets a fake tensor of its shape and strides.  Tensors that share a storage get views of
one fake storage; a tensor alone on its storage gets one that just covers it, so that a batch cut out of a
large data set does not count as the whole.  `swapped` puts the twins where a module keeps its parameters and
buffers, and takes them out again whatever happens.

The twin of a tensor that is itself fake (a model built without data) is a new one: the user's stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.capture.internals import FakeTensor, FakeTensorMode, outside_modes, storage_key
from lowtide.errors import CaptureError
from lowtide.ir.graph import Role

__all__ = [
    "Named",
    "Slot",
    "Twins",
    "check_plain",
    "module_slots",
    "module_tensors",
    "swapped",
    "walk_modules",
]

_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


@dataclass(frozen=True, eq=False)
class Named:
    """A tensor that a module owns, under every name it has there."""

    names: tuple[str, ...]
    tensor: Tensor
    role: Role


@dataclass(frozen=True, eq=False)
class Slot:
    """One place where a module keeps a parameter or buffer: an entry of its own dictionary."""

    table: dict[str, Any]
    key: str
    path: str
    role: Role


class Twins:
    """Makes twins under one fake mode; `tensors` are all that exist before the step."""

    def __init__(self, mode: FakeTensorMode, tensors: Iterable[Tensor]) -> None:
        self.mode = mode
        self._made: dict[int, Tensor] = {}
        self._held: list[Tensor] = []
        self._bases: dict[int, Tensor] = {}
        unique = {id(tensor): tensor for tensor in tensors}.values()
        self._sharing = Counter(storage_key(tensor) for tensor in unique)

    def of(self, tensor: Tensor) -> Tensor:
        """The twin of `tensor`, always the same one."""
        if id(tensor) not in self._made:
            self._held.append(tensor)
            self._made[id(tensor)] = self._make(tensor)
        return self._made[id(tensor)]

    def shares_memory(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on the storage of one of the tensors known from the start."""
        return storage_key(tensor) in self._sharing

    def _make(self, tensor: Tensor) -> Tensor:
        with outside_modes(), torch.no_grad(), self.mode:
            twin = self._window(tensor)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(twin, requires_grad=tensor.requires_grad)
            return twin

    def _window(self, tensor: Tensor) -> Tensor:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if self._sharing[storage_key(tensor)] <= 1:
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        base = self._base(tensor)
        return base.view(tensor.dtype).as_strided(shape, stride, tensor.storage_offset()).detach()

    def _base(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._bases:
            nbytes = tensor.untyped_storage().nbytes()
            self._bases[key] = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        return self._bases[key]


def check_plain(name: str, tensor: Tensor) -> None:
    """Raises CaptureError for tensors that are more than strided memory."""
    if type(tensor) not in _PLAIN_TYPES:
        what = f"{name} is a {type(tensor).__name__}, a subclass of Tensor"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        what = f"{name} is a {tensor.layout} tensor of {tensor.dtype}"
    elif tensor.is_conj() or tensor.is_neg():
        what = f"{name} is lazily conjugated or negated"
    else:
        return
    raise CaptureError(what, remedy="only plain dense tensors can be captured; convert it")


def module_slots(prefixed: Mapping[str, nn.Module]) -> list[Slot]:
    """Every place where the given modules (by name prefix) keep a parameter or a buffer."""
    return [
        Slot(table, key, f"{path}.{key}" if path else key, role)
        for path, module in walk_modules(prefixed)
        for role, table in ((Role.PARAM, module._parameters), (Role.BUFFER, module._buffers))
        for key, tensor in table.items()
        if tensor is not None
    ]


def walk_modules(prefixed: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """The given modules and all inside them, once each, with their paths: `named_modules`, but fast."""
    found: dict[int, tuple[str, nn.Module]] = {}
    pending = [*reversed(list(prefixed.items()))]
    while pending:
        path, module = pending.pop()
        if id(module) in found:
            continue
        found[id(module)] = path, module
        start = f"{path}." if path else ""
        children = reversed(list(module._modules.items()))
        pending += [(start + name, child) for name, child in children if child is not None]
    return list(found.values())


def module_tensors(slots: Iterable[Slot]) -> list[Named]:
    """The distinct tensors in `slots`, each with all its paths."""
    paths: dict[int, list[str]] = {}
    first: dict[int, tuple[Tensor, Role]] = {}
    for slot in slots:
        tensor = slot.table[slot.key]
        assert tensor is not None
        check_plain(f"{slot.role.value} {slot.path}", tensor)
        paths.setdefault(id(tensor), []).append(slot.path)
        first.setdefault(id(tensor), (tensor, slot.role))
    return [Named(tuple(paths[key]), tensor, role) for key, (tensor, role) in first.items()]


@contextmanager
def swapped(slots: Iterable[Slot], twins: Twins) -> Iterator[dict[str, Tensor]]:
    """Inside, the modules hold twins.

    Yields a dictionary that is filled on the way out: path -> the tensor that the model put in place of a
    buffer.  Raises CaptureError if it replaced a parameter.
    """
    originals = [(slot, slot.table[slot.key]) for slot in slots]
    rebound: dict[str, Tensor] = {}
    try:
        for slot, tensor in originals:
            assert tensor is not None
            slot.table[slot.key] = twins.of(tensor)
        yield rebound
        for slot, tensor in originals:
            assert tensor is not None
            current = slot.table.get(slot.key)
            if current is not twins.of(tensor):
                _note_rebound(slot, tensor, current, rebound)
    finally:
        for slot, tensor in originals:
            slot.table[slot.key] = tensor


def _note_rebound(slot: Slot, old: Tensor, current: Tensor | None, rebound: dict[str, Tensor]) -> None:
    if slot.role is Role.PARAM or current is None:
        raise CaptureError(
            f"the model replaces its {slot.role.value} {slot.path} during the step",
            remedy="change it in place, under torch.no_grad()",
        )
    if (current.shape, current.dtype, current.device) != (old.shape, old.dtype, old.device):
        raise CaptureError(
            f"the model replaces its buffer {slot.path} ({old.dtype} {list(old.shape)}) by another kind of "
            f"tensor ({current.dtype} {list(current.shape)})",
            remedy="make it of one shape and element type",
        )
    rebound[slot.path] = current
