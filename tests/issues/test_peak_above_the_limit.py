"""Limits swept from 100 % to the floor: the measured peak keeps each, and never rises as they fall.

(pytorch#197838: a memory budget that is exceeded, and a smaller one that takes more.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture import Program
from lowtide.errors import Infeasible
from lowtide.run.plan import Plan
from lowtide.run.verify import Verdict
from lowtide.search import baseline
from lowtide.search.driver import Frontier, explore
from lowtide.workload import Workload


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


def training() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    x, target = torch.randn(192, 16), torch.randint(3, (192,))
    return Workload(model, (x,), targets=(target,), loss=functional.cross_entropy, optimizer=optimizer)


def convolutional() -> Workload:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 8, 8):
        layers += [nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, target = torch.randn(8, 3, 16, 16), torch.randint(3, (8,))
    return Workload(model, (x,), targets=(target,), loss=functional.cross_entropy, optimizer=optimizer)


def inference() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(3)]).eval()
    return Workload(model, (torch.randn(192, 16),))


def floor_of(frontier: Frontier) -> int:
    """The floor that a refusal names."""
    with pytest.raises(Infeasible) as caught:
        frontier.pick_outcome(memory=frontier.setting.resident_bytes + 1)
    assert caught.value.node and caught.value.remedy
    return caught.value.floor_bytes


@pytest.mark.parametrize("make", [training, convolutional, inference])
def test_sweep(make: Callable[[], Workload]) -> None:
    """Down to just above the floor that a refusal names (placements have a time limit of their own)."""
    frontier: Frontier = explore(make(), 1.5, seed=0, kind=Frontier)
    top, floor = frontier.setting.eager.peak_bytes, floor_of(frontier)
    assert frontier.setting.resident_bytes < floor < top
    peaks = []
    for share in (100, 50, 5):
        limit = floor + (top - floor) * share // 100
        outcome = frontier.pick_outcome(memory=limit)
        assert outcome.met and outcome.measured.peak_bytes <= limit
        assert outcome.measured.peak_bytes == outcome.predicted_peak_bytes
        peaks.append(outcome.measured.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < top
    # Which kernels pay is measured anew for each plan, so times are compared where they are judged alike.
    sizes, seconds = zip(*frontier.points, strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_the_floor_is_that_of_a_plan_with_eagers_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller plan whose numbers are wrong is no reason to name a floor under the limit."""
    frontier: Frontier = explore(inference(), 0.5, seed=0, kind=Frontier)
    limit = floor_of(frontier) + 1024
    judge = baseline.verify

    def strict(program: Program, plan: Plan, *, eager_fits: bool) -> Verdict:
        verdict = judge(program, plan, eager_fits=eager_fits)
        return verdict if plan.predicted_peak_bytes > limit else replace(verdict, faults=("on purpose",))

    monkeypatch.setattr(baseline, "verify", strict)
    with pytest.raises(Infeasible, match="is under the floor") as caught:
        frontier.pick_outcome(memory=limit)
    assert caught.value.floor_bytes > limit
