"""Dictionaries, keyword arguments, None, nested tuples, ModelOutput (rockmate#6)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.unit.capture.interpreter import run
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, batch: dict[str, Any], pair: tuple[Tensor, tuple[Tensor, None]], *, labels: Tensor | None = None
    ) -> dict[str, Any]:
        logits = self.layer(batch["ids"]["x"] + pair[0] + pair[1][0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return OrderedDict(loss=loss, states=(logits, (logits[:1], None)), name="nested")


def arguments() -> tuple[Any, ...]:
    return {"ids": {"x": torch.randn(2, 4)}, "none": None}, (torch.randn(2, 4), (torch.randn(4), None))


def test_training_with_a_loss_of_its_own() -> None:
    program = assert_same_steps(Nested(), arguments(), {"labels": torch.tensor([1, 2])})
    expected = {"arg:0.ids.x", "arg:1.0", "arg:1.1.0", "arg:labels"}
    assert expected <= set(program.names)


def test_inference_returns_the_users_structure() -> None:
    model, args = Nested(), arguments()
    ours, _ = run(capture(Workload(model, args)), args)
    with torch.no_grad():
        theirs = model(*args)
    assert type(ours) is OrderedDict and list(ours) == ["loss", "states", "name"]
    assert ours["loss"] is None and ours["states"][1][1] is None and ours["name"] == "nested"
    assert torch.equal(ours["states"][0], theirs["states"][0])
    assert torch.equal(ours["states"][1][0], theirs["states"][1][0])


@pytest.mark.parametrize("name", ["bert-base", "vit-base", "gptneo-1.3b", "resnet50"])
def test_transformers_models(name: str) -> None:
    w = load_workload(f"{TINY[name]},mode=train")
    assert_same_steps(w.model, w.args, w.kwargs, w.targets, w.loss)
