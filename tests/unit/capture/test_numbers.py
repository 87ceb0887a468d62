"""Numbers of optimizer steps by formula: the bits that the optimizer's own code passes, or none."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.capture.numbers import FORMULAS, find_numbers
from lowtide.capture.optimizer import Exemplar

GROUPS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-4}),
    "adamw-plain": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
    "adam-decay": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.02, "betas": (0.8, 0.95)}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-4}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}


def group_of(name: str) -> tuple[Exemplar, dict[str, Any]]:
    kind, settings = GROUPS[name]
    optimizer = kind([nn.Parameter(torch.zeros(3))], **settings)  # type: ignore[call-arg]
    return Exemplar(kind, torch.float32), dict(optimizer.param_groups[0])


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("first", [False, True])
def test_equals_what_the_optimizer_passes(name: str, first: bool) -> None:
    exemplar, group = group_of(name)
    text = exemplar.record(group, 0.0, first)
    numbers = find_numbers(exemplar, text, group)
    assert numbers is not None
    for count, rate in [(0.0, 1.0), (1.0, 0.5), (9.0, 0.123456789), (12345.0, 1e-5)]:
        changed = {**group, "lr": group["lr"] * rate, "initial_lr": 0.5}
        assert numbers.compute(changed, count, first) == exemplar.record(changed, count, first).numbers


@pytest.mark.parametrize(
    "name, change",
    [
        ("adamw", {"weight_decay": 0.0}),
        ("adamw", {"maximize": True}),
        ("adamw-plain", {"weight_decay": 0.1}),
        ("momentum", {"nesterov": True, "dampening": 0.0}),
        ("sgd", {"momentum": 0.9}),
        ("adamw", {"lr": 1}),
    ],
)
def test_settings_that_change_the_operators_are_left_to_the_optimizer(
    name: str, change: dict[str, Any]
) -> None:
    exemplar, group = group_of(name)
    numbers = find_numbers(exemplar, exemplar.record(group, 0.0, False), group)
    assert numbers is not None and numbers.compute({**group, **change}, 3.0, False) is None


def test_a_number_without_a_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    exemplar, group = group_of("adamw")
    fewer = {name: formula for name, formula in FORMULAS.items() if name != "epsilon"}
    monkeypatch.setattr(sys.modules[find_numbers.__module__], "FORMULAS", fewer)
    assert find_numbers(exemplar, exemplar.record(group, 0.0, False), group) is None
