"""Element types of autocast regions that differ once a region is recomputed or in parts (pytorch#141896)."""

from __future__ import annotations

import pytest
import torch
from tests.issues.ladder import climb, parts_of
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.run.plan import build_plan
from lowtide.workload import Workload


class Mixed(nn.Module):
    """Half, float in an inner region that switches it off; a module used twice (its cast is cached)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.convolve, self.batch = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.batch(self.convolve(x.unsqueeze(1))).flatten(1).softmax(-1) @ torch.ones(12, 6)
            y = self.norm(self.first(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                z = self.head(y.float())
            return self.head(nn.functional.dropout(y, 0.2)) + z


@pytest.mark.parametrize("whole", [None, torch.bfloat16])
def test_every_rung(whole: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(y: Tensor) -> Tensor:
        return y.float().square().mean()

    plans = climb(Workload(model, (x,), loss=loss, optimizer=optimizer, autocast=whole), (2,))
    assert parts_of(plans["2 parts"].graph)
    for plan in plans.values():
        dtypes = {plan.graph.values[v].meta.dtype for node in plan.graph for v in node.outputs}
        assert {torch.bfloat16, torch.float32} <= dtypes


@pytest.mark.parametrize("training", [True, False])
def test_a_plan_called_inside_a_region_is_not_cast_again(training: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if training else None
    step = Workload(model, (x,), loss=torch.sum if training else None, optimizer=optimizer)
    plan = build_plan(capture(step), poison=True)
    call = plan.step if training else plan
    outside = call(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call(x)
        assert torch.is_autocast_enabled("cpu")
    assert inside.dtype is torch.float32 and torch.equal(inside, outside)


def test_half_parameters() -> None:
    """A model in bfloat16 throughout; the tolerance for parts is that of its type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = torch.randn(6, 6).bfloat16(), torch.randint(2, (6,))
    loss = nn.functional.cross_entropy
    climb(Workload(model, (x,), targets=(target,), loss=loss, optimizer=optimizer), (), steps=3)
