"""In-place activations after a saved product, inside a recomputed region (pytorch#113737).

The recomputation must not change what others read, nor read what was changed.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tests.issues.ladder import build, climb, parts_of, rungs
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture import capture
from lowtide.run.native import run_step
from lowtide.workload import Workload


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x) @ layer.weight
            y += x
            y[:, ::2] *= 2.0
            z = functional.leaky_relu_(y, 0.1)
            x = functional.hardtanh_(z - 0.5) * 1.5
            x.add_(z.detach()).mul_(0.5)
        return x


class Planes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.first(x), inplace=True)
        z = self.second(y)
        z[:, 0] = y[:, 1]
        z[1:, 1].zero_()
        z = functional.elu_(z).permute(0, 2, 3, 1) + y.permute(0, 2, 3, 1)
        return functional.dropout(z, 0.2, inplace=True).square_()


@pytest.mark.parametrize("planes", [False, True])
def test_every_rung(planes: bool) -> None:
    torch.manual_seed(0)
    model = (Planes() if planes else Chain()).double()
    x = (torch.randn(4, 2, 5, 5) if planes else torch.randn(4, 6)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plans = climb(Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer), (2,))
    assert parts_of(plans["2 parts"].graph)


class Changes(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        before = super().forward(x).tanh()
        y.add_(1.0)
        x.data.mul_(0.5)
        return before + super().forward(x).sigmoid() * y


def test_an_argument_that_the_model_changes() -> None:
    """The caller's tensor changes as in eager: once, before whoever reads it afterwards."""
    torch.manual_seed(0)
    model = Changes(4, 4)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Workload(model, (x, y), loss=lambda z: z.square().mean(), optimizer=optimizer)
    start = x.clone(), y.clone(), copy.deepcopy(model.state_dict())
    program = capture(step)
    assert torch.equal(x, start[0]) and torch.equal(y, start[1])
    expected = run_step(step), x.clone(), y.clone()
    for rung in rungs(program, (2,)):
        plan = build(program, rung)
        x.copy_(start[0])
        y.copy_(start[1])
        model.load_state_dict(start[2])
        for ours, theirs in zip((plan.step(x, y), x, y), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0 if rung.exact else 1e-6, atol=0)
