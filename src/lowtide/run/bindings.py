"""Tensors at planned places, and the argument slots that hold them.

Problem.  Most operands are windows on the arena and never change.  The caller's tensors do: arguments
with every call, parameters when somebody assigns `p.data`, results because they are fresh each time.

Method.  A `Window` is a Location and a meta.  Windows on the arena become tensors once.  Every other
window remembers which argument slots refer to it, and `set_resident` / `set_output` refill those slots
when the tensor behind it is another one.  `release` empties the slots of what belongs to one call, so that
a plan keeps none of the caller's tensors alive.

Invariant.  A window that equals the caller's tensor is that very tensor, so that writes are seen by
autograd's version counters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.ir.graph import TensorMeta
from lowtide.run.layout import Location
from lowtide.run.operands import window

__all__ = ["Bindings", "Slot", "Window", "fresh_output"]

Slot = tuple[Any, Any]
"""A container (list or dict) and the key of one entry."""


@dataclass(frozen=True, slots=True)
class Window:
    """A strided window whose first element lies at `location`."""

    location: Location
    meta: TensorMeta


@dataclass
class _Moving:
    """The windows on one moving tensor, with the slots that refer to each."""

    slots: dict[Window, list[Slot]] = field(default_factory=dict)
    tensor: Tensor | None = None
    address: int = -1


class Bindings:
    """Argument slots of one prepared program."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        self._fixed: dict[Window, Tensor] = {}
        self._residents: dict[int, _Moving] = {}
        self._outputs: dict[int, _Moving] = {}
        self._numbers: dict[int, list[Slot]] = {}
        self._arrays: dict[tuple[int, ...], Any] = {}

    def place(self, where: Window, container: Any, key: Any) -> None:
        """Fill the slot now, or whenever the tensor behind it is set."""
        location = where.location
        if location.kind == "arena":
            container[key] = self.fixed(where)
        elif location.kind == "host":
            self._numbers.setdefault(location.index, []).append((container, key))
        else:
            moving = self._outputs if location.kind == "output" else self._residents
            slots = moving.setdefault(location.index, _Moving()).slots
            slots.setdefault(where, []).append((container, key))

    def fixed(self, where: Window) -> Tensor:
        """The tensor of a window on the arena."""
        if where not in self._fixed:
            storage = self.arena.untyped_storage()
            self._fixed[where] = window(storage, where.location.offset_bytes, where.meta)
        return self._fixed[where]

    def tensor(self, where: Window) -> Tensor:
        """A tensor of the window as things stand now (an arena window, or what was set last)."""
        if where.location.kind == "arena":
            return self.fixed(where)
        moving = self._outputs if where.location.kind == "output" else self._residents
        root = moving[where.location.index].tensor
        assert root is not None, "nothing is bound there between two calls"
        return self.derive(where, root)

    def numbers(self, values: tuple[int, ...]) -> Any:
        """A ctypes array that holds the host scalars `values` of each call; one for all who ask for these."""
        if values not in self._arrays:
            array = self._arrays[values] = (ctypes.c_double * max(len(values), 1))()
            for position, value in enumerate(values):
                self._numbers.setdefault(value, []).append((array, position))
        return self._arrays[values]

    def set_numbers(self, numbers: Mapping[int, float]) -> None:
        """The host scalars of this call, by value id."""
        for value, slots in self._numbers.items():
            for container, key in slots:
                container[key] = numbers[value]

    def set_residents(self, tensors: Mapping[int, Tensor]) -> None:
        """The caller's tensors of this call, by value id; only changed ones cost more than a look."""
        for value, moving in self._residents.items():
            tensor = tensors[value]
            if tensor is not moving.tensor or tensor.data_ptr() != moving.address:
                self._set(moving, tensor)

    def set_outputs(self, tensors: Sequence[Tensor]) -> None:
        """This call's fresh results: entry k - 1 is the uint8 or typed tensor of slot k."""
        for slot, moving in self._outputs.items():
            self._set(moving, tensors[slot - 1])

    def release(self, residents: Sequence[int]) -> None:
        """Forget the results, and the caller's values `residents` (its arguments)."""
        for moving in self._outputs.values():
            self._clear(moving)
        for value in residents:
            if value in self._residents:
                self._clear(self._residents[value])

    def _set(self, moving: _Moving, tensor: Tensor) -> None:
        moving.tensor, moving.address = tensor, tensor.data_ptr()
        for where, slots in moving.slots.items():
            derived = self.derive(where, tensor)
            for container, key in slots:
                container[key] = derived

    @staticmethod
    def _clear(moving: _Moving) -> None:
        moving.tensor, moving.address = None, -1
        for slots in moving.slots.values():
            for container, key in slots:
                container[key] = None

    @staticmethod
    def derive(where: Window, root: Tensor) -> Tensor:
        offset_bytes, meta = where.location.offset_bytes, where.meta
        same = root.dtype == meta.dtype and root.shape == meta.shape and root.stride() == meta.stride
        if same and offset_bytes == 0:
            return root
        if meta.dtype == root.dtype:
            first = int(root.storage_offset()) + offset_bytes // meta.dtype.itemsize
            return root.as_strided(meta.shape, meta.stride, first)
        start = int(root.storage_offset()) * root.dtype.itemsize + offset_bytes
        return window(root.untyped_storage(), start, meta)


def fresh_output(nbytes: int, meta: TensorMeta) -> Tensor:
    """Memory for a result: just the tensor where that is all of its bytes, else raw bytes."""
    if meta.span_bytes == nbytes and meta.nbytes == nbytes:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return torch.empty(nbytes, dtype=torch.uint8)
