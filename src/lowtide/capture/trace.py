"""What one run of the user's step did: a flat list of operator calls on windows of storages.

Problem.  Aliases and in-place effects are facts about storages, not about tensor objects, and the
recording must not keep tensor objects alive: autograd looks at their reference counts when it decides
whether a gradient is copied.

Method.  A `Window` is (storage, shape, strides, offset): two tensors with equal windows are the same
memory read in the same way, so a Call needs nothing else.  Storages are numbered in order of appearance,
which makes the traces of two runs comparable with ``==``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide.capture.internals import FakeTensor, outside_modes
from lowtide.capture.result import Returned
from lowtide.ir.graph import Origin, Role, TensorMeta
from lowtide.ir.ops import Aten

__all__ = ["Call", "Resident", "Trace", "Window", "first_difference"]


@dataclass(frozen=True, slots=True)
class Window:
    """A strided window on a traced storage; `offset` in elements of ``meta.dtype``."""

    storage: int
    meta: TensorMeta
    offset: int = 0

    @property
    def place(self) -> tuple[TensorMeta, int]:
        """Where on its storage the window lies."""
        return self.meta, self.offset


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call: `op` refers to `inputs` by position, outputs are its tensors in order."""

    op: Aten
    inputs: tuple[Window, ...]
    outputs: tuple[Window, ...]
    origin: Origin = field(default_factory=Origin, compare=False)


@dataclass(frozen=True, eq=False)
class Resident:
    """A tensor that exists before the step: its names, its window, and the user's live tensor.

    A `literal` is written in the program's text (``torch.tensor([1.0])`` inside forward): whatever a step
    does to it, the next one sees the original again.
    """

    names: tuple[str, ...]
    window: Window
    role: Role
    tensor: Tensor
    literal: bool = False


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded step.

    `nbytes[s]` is the size of storage s; `results` are the named windows to read when all calls are done
    (``loss``, ``grad:<name>``, ``out:<i>``), `returned` says what the step makes of them; `rebound` are
    buffers that the model replaced by another tensor.
    """

    calls: tuple[Call, ...]
    nbytes: tuple[int, ...]
    residents: tuple[Resident, ...]
    results: Mapping[str, Window]
    returned: Returned
    rebound: Mapping[str, Window] = field(default_factory=dict)


def first_difference(left: Trace, right: Trace) -> tuple[Call | None, str] | None:
    """The first place where two traces differ, with a description; None if they are the same step."""
    for one, other in zip(left.calls, right.calls, strict=False):
        if one != other:
            return one, f"once {describe(one)}, once {describe(other)}"
    if len(left.calls) != len(right.calls):
        longer = left.calls if len(left.calls) > len(right.calls) else right.calls
        extra = longer[min(len(left.calls), len(right.calls))]
        return extra, f"{describe(extra)} runs only sometimes"
    for resident, again in zip(left.residents, right.residents, strict=False):
        if not _same_contents(resident, again):
            return None, f"a constant of shape {list(resident.window.meta.shape)} has other contents"
    if dict(left.results) != dict(right.results) or left.returned != right.returned:
        return None, "the results differ"
    if dict(left.rebound) != dict(right.rebound):
        return None, "other buffers are replaced"
    return None


def _same_contents(one: Resident, other: Resident) -> bool:
    """Whether two recordings made or found the same tensor; NaNs are equal here."""
    if one.tensor is other.tensor or isinstance(one.tensor, FakeTensor):
        return True
    with outside_modes():
        return one.tensor.shape == other.tensor.shape and bool(
            torch.allclose(one.tensor, other.tensor, rtol=0, atol=0, equal_nan=True)
        )


def describe(call: Call) -> str:
    """``aten.mul.Tensor(float32[2, 3], 0.5)`` for messages."""
    shapes = [f"{str(w.meta.dtype).removeprefix('torch.')}{list(w.meta.shape)}" for w in call.inputs]
    numbers = [repr(arg) for arg in call.op.args if isinstance(arg, int | float)]
    return f"{call.op.overload}({', '.join(shapes + numbers)})"
