"""A region none of whose inputs needs a gradient, only its parameters do (pytorch#7617, #42812)."""

from __future__ import annotations

import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn


class Frozen(nn.Module):
    """A frozen embedding feeds the first trained region; its inputs carry no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.embedding.weight.requires_grad_(False)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(ids).cumsum(1)
        return self.first(x) + self.bias


def test_updated_weights_not_only_the_loss() -> None:
    ids = torch.randint(0, 7, (2, 3))
    program = assert_same_steps(Frozen(), (ids,), loss=lambda y: y.square().mean(), clip=0.01)
    assert set(program.gradients) == {
        "first.0.weight",
        "first.0.bias",
        "first.2.weight",
        "first.2.bias",
        "bias",
    }
