"""The numbers of an optimizer's step, by formula.

Problem.  Asking the user's optimizer for the coming step's numbers (`optimizer.Exemplar`) runs its Python
under a dispatch mode: most of a millisecond a step, which a small model notices.

Method.  At capture each recorded number is looked for in `FORMULAS`, written as PyTorch's own code computes
it; a formula is taken if it gives the recorded bits for the present settings and for several others, at
several step counts.  If every number has one, later steps are computed, as long as nothing but the values of
the float settings has changed; else the optimizer is asked as before, which also finds out whether its
operators changed.

Invariants.  Only formulas are used that were checked against the optimizer in this process; two that agree
on every trial are the same for this optimizer.  Settings that are zero stay so, flags stay what they were:
they decide which operators run.  What others put beside the optimizer's own settings (schedulers) is not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.capture.optimizer import Exemplar, Recording

__all__ = ["FORMULAS", "Numbers", "find_numbers"]

Settings = Mapping[str, Any]
Formula = Callable[[Settings, float], float]
"""Of the group's settings and the number of the step, from 1.0."""

FORMULAS: Mapping[str, Formula] = {
    "one": lambda g, t: 1.0,
    "rate": lambda g, t: -g["lr"],
    "decay": lambda g, t: g["weight_decay"],
    "kept": lambda g, t: 1 - g["lr"] * g["weight_decay"],
    "momentum": lambda g, t: g["momentum"],
    "undamped": lambda g, t: 1 - g["dampening"],
    "beta1": lambda g, t: g["betas"][0],
    "beta2": lambda g, t: g["betas"][1],
    "new1": lambda g, t: 1 - g["betas"][0],
    "new2": lambda g, t: 1 - g["betas"][1],
    "epsilon": lambda g, t: g["eps"],
    "correction2": lambda g, t: (1 - g["betas"][1] ** t) ** 0.5,
    "step size": lambda g, t: -(g["lr"] / (1 - g["betas"][0] ** t)),
}

_TRIALS = ((1.0, 0.0), (0.7, 2.0), (0.31, 17.0))
"""(factor on every float setting, steps before): the settings as they are, and two others."""


@dataclass(frozen=True)
class Numbers:
    """Formulas by name, and the settings for which they hold."""

    formulas: tuple[str, ...]
    zeros: frozenset[str]
    fixed: tuple[tuple[str, Any], ...]

    def compute(self, group: Settings, count: float, first: bool) -> tuple[float, ...] | None:
        """The numbers of the step after `count` others; None if the settings are others than expected."""
        own = {name: group[name] for name, _ in self.fixed if name in group}
        if _fixed_of(own) != self.fixed or _zeros_of(own) != self.zeros:
            return None
        settings = {**group, "dampening": 0.0} if first and "dampening" in group else group
        return tuple(float(FORMULAS[name](settings, count + 1.0)) for name in self.formulas)


def find_numbers(exemplar: Exemplar, text: Recording, group: Settings) -> Numbers | None:
    """The formulas of an update's numbers in `group`; None if one has none."""
    group = {name: setting for name, setting in group.items() if name in exemplar.settings}
    left = [set(FORMULAS) for _ in text.numbers]
    for factor, count in _TRIALS:
        settings = _scaled(group, factor)
        recording = exemplar.record(settings, count, False)
        if not recording.same_text(text):
            return None
        for names, number in zip(left, recording.numbers, strict=True):
            names.intersection_update({name for name in names if _gives(name, settings, count + 1.0, number)})
    if not all(left):
        return None
    return Numbers(tuple(min(names) for names in left), _zeros_of(group), _fixed_of(group))


def _gives(name: str, settings: Settings, step: float, number: float) -> bool:
    try:
        return float(FORMULAS[name](settings, step)) == number
    except (KeyError, TypeError, ZeroDivisionError):
        return False


def _scaled(group: Settings, factor: float) -> dict[str, Any]:
    """The group with other floats; flags, names and the parameters as they are."""

    def scale(setting: Any) -> Any:
        if isinstance(setting, float):
            return setting * factor
        if isinstance(setting, tuple) and all(isinstance(each, float) for each in setting):
            return tuple(each * factor for each in setting)
        return setting

    return {name: scale(setting) for name, setting in group.items()}


def _floats_of(group: Settings) -> list[tuple[str, float]]:
    found = []
    for name, setting in group.items():
        if isinstance(setting, float):
            found.append((name, setting))
        elif isinstance(setting, tuple):
            found += [
                (f"{name} {place}", each) for place, each in enumerate(setting) if isinstance(each, float)
            ]
    return found


def _zeros_of(group: Settings) -> frozenset[str]:
    return frozenset(name for name, setting in _floats_of(group) if setting == 0.0)


def _fixed_of(group: Settings) -> tuple[tuple[str, Any], ...]:
    """What may not change: every setting that is no float, by name, and which ones are floats."""
    return tuple(
        (
            name,
            float if isinstance(setting, float) else type(setting) if isinstance(setting, tuple) else setting,
        )
        for name, setting in sorted(group.items())
    )
