"""Update nodes in the graph, and the live optimizer behind them.

A parameter's update belongs to a *class*: same parameter group, same step count, same element type.
All parameters of a class share one list of host scalars, named ``scalar:update[g].scalar[k]``.

`Updates` is fixed at capture; `Clock` alone changes: it knows which parameters' state was made for the coming
step, because SGD treats a first step differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.builder import Builder
from lowtide.capture.numbers import Numbers, find_numbers
from lowtide.capture.optimizer import Exemplar, Recording, Slot
from lowtide.errors import Stale
from lowtide.ir.graph import Graph, Role, TensorMeta

__all__ = ["Clock", "Update", "UpdateClass", "Updates", "body_of", "classify"]

_INITIAL = {"momentum_buffer": -0.0}
"""Contents of fresh state that are not zero (see `lowtide.capture.optimizer`)."""

NUMBER = TensorMeta((), (), torch.float64, "host")


@dataclass(frozen=True, eq=False)
class Update:
    """One parameter that the optimizer updates."""

    name: str
    parameter: Tensor


@dataclass(frozen=True, eq=False)
class UpdateClass:
    """Parameters of optimizer group `group` that take the same step; `text` is what it does.

    `formulas` give its numbers; None: the exemplar is asked before every step.
    """

    group: int
    exemplar: Exemplar
    text: Recording
    updates: tuple[Update, ...]
    formulas: Numbers | None = None


@dataclass
class Clock:
    """Ids of the parameters whose state is fresh: made for a step that has not happened yet."""

    fresh: set[int] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Updates:
    """All updates of a step, by class."""

    optimizer: torch.optim.Optimizer
    classes: tuple[UpdateClass, ...]
    clock: Clock = field(default_factory=Clock)

    def ensure_state(self) -> None:
        """Create the state of parameters that have none, as the first step would."""
        for members in self.classes:
            for update in members.updates if members.text.state else ():
                state = self.optimizer.state[update.parameter]
                missing = [name for name in members.text.state if not isinstance(state.get(name), Tensor)]
                if missing:
                    self.clock.fresh.add(id(update.parameter))
                for name in missing:
                    state[name] = self._fresh(members, name, update.parameter)

    def _fresh(self, members: UpdateClass, name: str, parameter: Tensor) -> Tensor:
        pattern = members.exemplar.state(self.optimizer.param_groups[members.group])[name]
        if pattern.dim() == 0:
            return torch.zeros_like(pattern)
        return torch.full_like(parameter, _INITIAL.get(name, 0.0), dtype=pattern.dtype, requires_grad=False)

    def state(self) -> dict[str, Tensor]:
        """The live state tensors, named ``state:enc.0.weight:exp_avg``."""
        return {
            f"state:{update.name}:{key}": self.optimizer.state[update.parameter][key]
            for members in self.classes
            for update in members.updates
            for key in members.text.state
        }

    def numbers(self) -> list[tuple[float, ...]]:
        """Per class, the host scalars of the coming step.  Raises Stale if the text has changed."""
        return [self._numbers(index, members) for index, members in enumerate(self.classes)]

    def _numbers(self, index: int, members: UpdateClass) -> tuple[float, ...]:
        group = self.optimizer.param_groups[members.group]
        states = {_progress(self.optimizer, u.parameter, self.clock) for u in members.updates}
        if len(states) > 1:
            raise Stale(
                f"parameters of update class {index} have taken different numbers of steps: "
                f"{sorted(count for count, _ in states)}",
                remedy="capture again",
            )
        count, first = states.pop()
        computed = members.formulas.compute(group, count, first) if members.formulas else None
        if computed is not None:
            return computed
        recording = members.exemplar.record(group, count, first)
        if not recording.same_text(members.text):
            raise Stale(
                f"parameter group {members.group} of the optimizer computes other operators than at capture",
                remedy="a weight decay, momentum or flag was switched on or off: capture again",
            )
        return recording.numbers

    def advance(self) -> None:
        """A step has happened: no state is fresh any more, and schedulers may know of it."""
        self.clock.fresh.clear()
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]


def _progress(optimizer: torch.optim.Optimizer, parameter: Tensor, clock: Clock) -> tuple[float, bool]:
    """How many steps a parameter has taken (0 if nobody counts), and whether its state is fresh."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    step = state.get("step")
    count = 0.0 if not isinstance(step, Tensor) or _is_fake(step) else float(step.item())
    fresh = id(parameter) in clock.fresh or not any(isinstance(value, Tensor) for value in state.values())
    return count, fresh


def _is_fake(tensor: Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def classify(optimizer: torch.optim.Optimizer, updates: Iterable[tuple[int, Update]]) -> Updates:
    """Sort (group number, update) pairs into classes."""
    found: dict[tuple[int, float, bool, torch.dtype], list[Update]] = {}
    for group, update in updates:
        count, first = _progress(optimizer, update.parameter, Clock())
        found.setdefault((group, count, first, update.parameter.dtype), []).append(update)
    classes = []
    for (group, count, first, dtype), members in found.items():
        exemplar = Exemplar(type(optimizer), dtype)
        settings = optimizer.param_groups[group]
        text = exemplar.record(settings, count, first)
        formulas = find_numbers(exemplar, text, settings)
        classes.append(UpdateClass(group, exemplar, text, tuple(members), formulas))
    return Updates(optimizer, tuple(classes))


def body_of(
    text: Recording, parameter: TensorMeta, gradient: TensorMeta, state: tuple[TensorMeta, ...]
) -> Graph:
    """The body of an update node; inputs are (parameter, gradient, *state, *scalars)."""
    builder = Builder()
    slots: dict[Slot, int] = {}

    def enter(slot: Slot, meta: TensorMeta, role: Role) -> None:
        nbytes = 0 if role is Role.HOST else meta.span_bytes
        slots[slot] = builder.input(meta, builder.storage(nbytes, role))

    enter(("param", 0), parameter, Role.PARAM)
    enter(("grad", 0), gradient, Role.GRAD)
    for index, meta in enumerate(state):
        enter(("state", index), meta, Role.STATE)
    for index in range(len(text.numbers)):
        enter(("scalar", index), NUMBER, Role.HOST)
    for step in text.steps:
        operands = [slots[slot] for slot in step.operands]
        if step.result is None:
            builder.node(step.op, operands, (), [operands[position] for position in step.writes])
        else:
            (slots[step.result],) = builder.compute(step.op, operands)
    return builder.graph(())
