"""One module used twice, tied weights: one gradient, summed (pytorch#24005)."""

from __future__ import annotations

import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn

from lowtide.ir.graph import Role


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.again = self.block
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.block(self.tokens(ids))))


def test_one_update_per_shared_weight() -> None:
    ids = torch.randint(0, 9, (2, 3))
    program = assert_same_steps(
        Tied(),
        (ids,),
        targets=(ids.flatten(),),
        loss=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t),
        clip=0.5,
    )
    assert set(program.updates) == {"tokens.weight", "block.0.weight", "block.0.bias"}
    parameters = [s for s in program.graph.storages.values() if s.role is Role.PARAM]
    assert sum(storage.nbytes for storage in parameters) == (9 * 4 + 4 * 4 + 4) * 4
