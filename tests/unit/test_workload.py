"""A Workload is checked when it is made; each mistake is named with its field."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide as lt


def fields(**changes: Any) -> dict[str, Any]:
    """A correct training step of a linear layer, with changes."""
    model = nn.Linear(2, 3)
    given: dict[str, Any] = {
        "model": model,
        "args": (torch.zeros(4, 2),),
        "targets": (torch.zeros(4, 3),),
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    return {**given, **changes}


def test_training_step() -> None:
    workload = lt.Workload(**fields(clip_grad_norm=1.0, autocast=torch.bfloat16))
    assert workload.training
    assert workload.name == "Linear"
    assert repr(workload) == "Workload('Linear', training)"


def test_inference() -> None:
    workload = lt.Workload(nn.Linear(2, 3), args=[torch.zeros(4, 2)], name="mine")  # type: ignore[arg-type]
    assert not workload.training
    assert isinstance(workload.args, tuple)
    assert workload.name == "mine"


def test_loss_may_come_from_the_output() -> None:
    assert lt.Workload(**fields(loss=None, targets=())).training


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"model": nn.Linear}, "model is a type"),
        ({"args": torch.zeros(1)}, "for one tensor args=(x,)"),
        ({"targets": torch.zeros(1)}, "for one tensor targets=(x,)"),
        ({"kwargs": [1]}, "kwargs is a list"),
        ({"kwargs": {1: 2}}, "argument name"),
        ({"loss": None}, "1 targets but no loss"),
        ({"loss": 3}, "loss is a int"),
        ({"optimizer": None}, "loss but no optimizer"),
        (
            {"optimizer": None, "loss": None, "targets": (), "clip_grad_norm": 1.0},
            "clip_grad_norm but no optimizer",
        ),
        ({"optimizer": "adam"}, "optimizer is a str"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)},
            "holds 2 parameters, none of them",
        ),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0"),
        ({"clip_grad_norm": float("inf")}, "clip_grad_norm is inf"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'"),
        ({"accumulate": 2}, "accumulate is 2"),
        ({"autocast": torch.int8}, "autocast is torch.int8"),
        ({"autocast": True}, "autocast is True"),
        ({"name": 3}, "name is a int"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(lt.UsageError) as caught:
        lt.Workload(**fields(**changes))
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
