"""The user's optimizer, as one update node per parameter and numbers that are re-read before each step.

Problem.  An optimizer is Python: step counts, bias corrections and the current learning rate become Python
numbers that it passes to operators.  The graph has to hold the operators, the numbers have to stay live, and
both have to be eager's to the last bit.

Method.  The user's own class runs one step on a parameter with one element, with the live hyper-parameters
and step count, under a dispatch mode.  What it calls is the update's text, what numbers it passes are the
host scalars.  Capture builds each parameter's body from that text at the parameter's real shape; before every
step the same run gives the numbers again, and a changed text means that the plan is stale.

SGD's first step puts a clone of the gradient into the momentum buffer.  A buffer of -0.0 with dampening 0
gives the same bits (-0.0 * m + 1.0 * g == g, also for g == -0.0 and g == 0.0), so the text is the same.

Not done: optimizers other than SGD, Adam and AdamW, `fused`, `capturable`, `differentiable`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowtide.capture.internals import TorchDispatchMode, outside_modes, storage_key
from lowtide.errors import CaptureError
from lowtide.ir.aten import overload_name, tensors_of
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = ["SUPPORTED", "Exemplar", "Recording", "Slot", "Step", "check_optimizer"]

SUPPORTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_IGNORED = frozenset({"prim", "profiler"})
_VANISHING = frozenset({"aten.detach.default", "aten.alias.default"})
_UNSUPPORTED_FLAGS = ("fused", "capturable", "differentiable")

Slot = tuple[Literal["param", "grad", "state", "temp", "scalar"], int]
"""An operand of an update: the n-th tensor or number of its kind."""


@dataclass(frozen=True)
class Step:
    """One operator of an update; `op` refers to `operands` by position, `writes` are such positions.

    `result` is the slot of its fresh result, None for an operator that only writes.
    """

    op: Aten
    operands: tuple[Slot, ...]
    writes: tuple[int, ...]
    result: Slot | None


@dataclass(frozen=True)
class Recording:
    """The text of an update (`steps`, `state` names in order) and the `numbers` of the coming step."""

    steps: tuple[Step, ...]
    state: tuple[str, ...]
    numbers: tuple[float, ...]

    def same_text(self, other: Recording) -> bool:
        """Whether only the numbers differ."""
        return self.steps == other.steps and self.state == other.state


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises CaptureError, with a remedy, for optimizers that cannot be captured."""
    kind = type(optimizer)
    if kind not in SUPPORTED:
        names = ", ".join(supported.__name__ for supported in SUPPORTED)
        raise CaptureError(f"the optimizer is {kind.__name__}", remedy=f"supported are torch.optim's {names}")
    for number, group in enumerate(optimizer.param_groups):
        for flag in _UNSUPPORTED_FLAGS:
            if group.get(flag):
                raise CaptureError(
                    f"parameter group {number} of the optimizer has {flag}=True",
                    remedy=f"construct it with {flag}=False",
                )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CaptureError("the optimizer has step hooks, which a plan would skip", remedy="remove them")


class Exemplar:
    """A parameter with one element under an optimizer of the user's class."""

    def __init__(self, kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
        with outside_modes(), torch.enable_grad():
            self._parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
            self._parameter.grad = torch.zeros(1, dtype=dtype)
            self._optimizer = kind([self._parameter], lr=0.1)  # type: ignore[call-arg]

    @property
    def settings(self) -> frozenset[str]:
        """The names of the optimizer's own settings of a parameter group."""
        return frozenset(self._optimizer.defaults)

    def state(self, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state after a first step in `group`: names in order, 1-d where shaped like the parameter."""
        with outside_modes():
            self._optimizer.state.clear()
            self._set(group)
            self._optimizer.step()
            found = self._optimizer.state.get(self._parameter, {})
            return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def record(self, group: Mapping[str, Any], count: float, first: bool) -> Recording:
        """The step in `group` that follows `count` others; `first` if the state is fresh."""
        state = self.state(group)
        with outside_modes():
            if "step" in state:
                state["step"].fill_(count)
            if first and "dampening" in group:
                self._optimizer.param_groups[0]["dampening"] = 0.0
            assert self._parameter.grad is not None
            recorder = _StepRecorder(self._parameter, self._parameter.grad, state)
            with recorder:
                self._optimizer.step()
        return Recording(tuple(recorder.steps), tuple(state), tuple(recorder.numbers))

    def _set(self, group: Mapping[str, Any]) -> None:
        mine = self._optimizer.param_groups[0]
        mine.update({name: setting for name, setting in group.items() if name != "params"})
        mine["foreach"] = False
        if "fused" in mine:
            mine["fused"] = False


class _StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns an optimizer's operator calls into Steps, its Python numbers into scalars."""

    def __init__(self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.numbers: list[float] = []
        self._slots: dict[int, Slot] = {id(parameter): ("param", 0), id(gradient): ("grad", 0)}
        self._slots.update({id(tensor): ("state", index) for index, tensor in enumerate(state.values())})
        self._alive: list[Tensor] = []
        self._temps = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = overload_name(func)
        if func.namespace in _IGNORED or not tensors_of(result):
            return result
        if name in _VANISHING:
            self._note(result, self._slot(args[0]))
            return result
        operands: list[Slot] = []
        op, writes = self._encode(func, args, kwargs, operands)
        if not writes and any(_share(result, tensor) for tensor in (*args, *kwargs.values())):
            raise CaptureError(
                f"the optimizer takes a view of a tensor ({name})",
                remedy="make complex parameters real",
            )
        self.steps.append(Step(op, tuple(operands), writes, None if writes else self._fresh(result)))
        return result

    def _fresh(self, result: Tensor) -> Slot:
        slot: Slot = ("temp", self._temps)
        self._temps += 1
        self._note(result, slot)
        return slot

    def _note(self, tensor: Tensor, slot: Slot) -> None:
        self._alive.append(tensor)
        self._slots[id(tensor)] = slot

    def _slot(self, tensor: Tensor) -> Slot:
        if id(tensor) in self._slots:
            return self._slots[id(tensor)]
        raise CaptureError(
            f"the optimizer works with a tensor of shape {list(tensor.shape)} that is not its state",
            remedy="pass learning rate and betas as Python floats",
        )

    def _encode(
        self, func: Any, args: Any, kwargs: Any, operands: list[Slot]
    ) -> tuple[Aten, tuple[int, ...]]:
        """The call with defaults filled in: ``alpha=1`` may be another number in the next step."""
        positional: list[Arg] = []
        named: dict[str, Arg] = {}
        writes: list[int] = []
        for position, argument in enumerate(func._schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            if given is None and str(argument.type) == "number":
                given = argument.default_value
            if given is None:
                continue
            encoded = self._operand(given, operands)
            if argument.alias_info is not None and argument.alias_info.is_write:
                assert isinstance(encoded, Ref)
                writes.append(encoded.index)
            if argument.kwarg_only:
                named[argument.name] = encoded
            else:
                positional.append(encoded)
        return Aten(overload_name(func), tuple(positional), tuple(sorted(named.items()))), tuple(writes)

    def _operand(self, given: Any, operands: list[Slot]) -> Arg:
        if isinstance(given, Tensor):
            slot = self._slot(given)
        elif isinstance(given, int | float) and not isinstance(given, bool):
            slot = ("scalar", len(self.numbers))
            self.numbers.append(float(given))
        else:
            return given  # type: ignore[no-any-return]
        if slot not in operands:
            operands.append(slot)
        return Ref(operands.index(slot))


def _share(result: Any, operand: Any) -> bool:
    tensors = isinstance(result, Tensor) and isinstance(operand, Tensor)
    return tensors and storage_key(result) == storage_key(operand)
