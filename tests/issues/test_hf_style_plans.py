"""Dictionaries, keyword arguments, None, nested tuples, ModelOutput, through plans (rockmate#6)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.issues.ladder import climb, parts_of
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import CaptureError, ShapeMismatch
from lowtide.run.plan import build_plan
from lowtide.workload import Workload


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(
        self, batch: dict[str, Any], pair: tuple[Tensor, tuple[Tensor, None]], *,
        labels: Tensor | None = None, scale: float = 1.0, hidden: bool = False,
    ) -> OrderedDict[str, Any]:  # fmt: skip
        logits = self.norm(self.layer(batch["ids"]["x"] + pair[0] + pair[1][0])) * scale
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        states = (logits, (logits[:1], None)) if hidden else None
        return OrderedDict(loss=loss, states=states, name="nested")


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, other, row = torch.randn(6, 4).double(), torch.randn(6, 4).double(), torch.randn(4).double()
    return {"ids": {"x": x}, "none": None}, (other, (row, None))


def test_training_with_a_loss_of_its_own() -> None:
    torch.manual_seed(0)
    model = Nested().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kwargs = {"labels": torch.randint(4, (6,)), "scale": 2.0}
    plans = climb(Workload(model, arguments(), kwargs, optimizer=optimizer))
    assert parts_of(plans["2 parts"].graph)


def test_inference_returns_the_users_structure() -> None:
    torch.manual_seed(0)
    climb(Workload(Nested().double(), arguments(), {"hidden": True}))


def test_another_keyword_is_refused_by_name() -> None:
    plan = build_plan(capture(Workload(Nested().double(), arguments(), {"hidden": True})))
    for kwargs, name in (
        ({}, "hidden"),
        ({"hidden": False}, "hidden"),
        ({"hidden": True, "scale": 3.0}, "scale"),
    ):
        with pytest.raises(ShapeMismatch, match=f"arg:{name}"):
            plan(*arguments(), **kwargs)
    ids, pair = arguments()
    with pytest.raises(ShapeMismatch, match=r"arg:0\.none"):
        plan({**ids, "none": 1}, pair, hidden=True)
    with pytest.raises(ShapeMismatch, match=r"arg:1\.0"):
        plan(ids, (pair[0][:3], pair[1]), hidden=True)


@dataclass
class Output:
    """Not a tree that PyTorch knows."""

    logits: Tensor


def test_an_output_class_that_nobody_registered() -> None:
    """Right, or refused with the class's name: never a graph without it."""

    class Wraps(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    model, x = Wraps(4, 4), torch.randn(2, 4)
    try:
        plan = build_plan(capture(Workload(model, (x,))))
    except CaptureError as error:
        assert "Output" in str(error)
    else:
        assert torch.equal(plan(x).logits, model(x).logits)


class MaskedAttention(nn.Module):
    """The mask is looked up by an index over the batch, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        rows, columns = torch.arange(batch) + 0, torch.arange(tokens) + 0
        allowed = mask[rows[:, None, None, None], columns[None, None, None, :]]
        allowed = allowed & (columns[None, None, :, None] >= 0)
        q, k, v = self.qkv(x).view(batch, tokens, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = torch.where(allowed, 0.0, -torch.inf).to(x.dtype)
        return self.out(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_does_not_keep_the_batch_whole() -> None:
    torch.manual_seed(0)
    model = MaskedAttention().double()
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1:, 4:] = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = (torch.randn(4, 6, 8).double(), mask)
    plans = climb(Workload(model, args, loss=lambda y: y.square().mean(), optimizer=optimizer), (2,))
    assert parts_of(plans["2 parts"].graph) == [2]


def test_a_transformers_model_with_a_mask() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).double()
    ids = torch.randint(31, (4, 6))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[:, 4:] = 0
    labels = torch.where(torch.rand(4, 6) < 0.5, ids, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kwargs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    plans = climb(Workload(model, (), kwargs, optimizer=optimizer), (2,), steps=1)
    assert parts_of(plans["2 parts"].graph)
    kwargs["output_hidden_states"] = True
    with torch.no_grad():
        model.eval()(**kwargs)  # installs hooks at its first call, which capture would refuse
    found = climb(Workload(model, (), kwargs), (), steps=1)
    result = found["reordered"](**kwargs)
    assert type(result).__name__ == "MaskedLMOutput" and len(result.hidden_states) == 2
