"""One module used twice, tied weights: one gradient, summed, however the step is cut (pytorch#24005)."""

from __future__ import annotations

import pytest
import torch
from tests.issues.ladder import climb, parts_of
from torch import Tensor, nn

from lowtide.run.plan import update_nodes
from lowtide.workload import Workload


class Tied(nn.Module):
    """Tied head; a block used twice under two names; a weight used transposed, and as a whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.again = self.block
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.again(self.block(self.tokens(ids)))
        x = x @ self.block[0].weight + x[..., :2] @ self.block[0].weight[:2]
        return self.head(x)


class Twice(nn.Module):
    """One convolution and one norm, used at two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        small = self.norm(self.convolution(nn.functional.avg_pool2d(x, 2))).relu()
        large = self.norm(self.convolution(x)).relu()
        return (large.mean((2, 3)) + small.mean((2, 3))).sum(1)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_tied(clip: float | None) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    ids = torch.randint(0, 9, (6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(y.flatten(0, 1), t.flatten())

    step = Workload(model, (ids,), targets=(ids,), loss=loss, optimizer=optimizer, clip_grad_norm=clip)
    for plan in climb(step, (2,)).values():
        assert set(update_nodes(plan.program, plan.graph)) == {
            "tokens.weight",
            "block.0.weight",
            "block.0.bias",
        }


def test_twice() -> None:
    torch.manual_seed(0)
    model = Twice().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 3, 6, 6).double()
    plans = climb(Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer), (2,))
    assert parts_of(plans["2 parts"].graph)
