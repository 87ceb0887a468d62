"""Data-dependent operators that keep their shape: never split across, recomputed only as they were.

Those that do not are refused, in training and in inference (torchtitan#1117).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.issues.ladder import climb
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.workload import Workload


class Experts(nn.Module):
    """The two best of three experts per token, gathered and scattered with fixed shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 6)), nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        inside = torch.einsum("td,tkdf->tkf", x, self.up[chosen]).relu()
        mixed = torch.einsum("tkf,tkfd->tkd", inside, self.down[chosen])
        return (mixed * weights.unsqueeze(-1)).sum(1)


class Capacity(nn.Module):
    """Tokens sorted by expert, a fixed number each, across the batch; results scattered back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        order = scores[:, 0].argsort(descending=True)
        half = x.shape[0] // 2
        result = torch.zeros_like(x)
        for expert, rows, score in zip(self.experts, order.split(half), scores.t(), strict=True):
            result = result.index_add(0, rows, expert(x[rows]) * score[rows, None])
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(x.shape[0]))
        return result + (ranks.to(x.dtype) / x.shape[0])[:, None] * x


class Masked(nn.Module):
    """Boolean masks that are written through or chosen by, and a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y.masked_fill(x > 1, -1.0).masked_scatter(x < -1, torch.zeros_like(y))
        z = y.clone()
        z[x > 0.5] = 0.25
        values, places = z.cummax(0)
        best, where = y.max(0)
        return torch.where(y > 0, values, z) + best + places + where + y.sort(0)[0] + y.median(0)[0]


@pytest.mark.parametrize("make", [Experts, Capacity, Masked])
def test_fixed_shapes(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, 4).double()
    climb(Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer), (2,))


DATA_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "nonzero": lambda x: x.nonzero().double(),
    "boolean index": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "where": lambda x: x[torch.where(x > 0)],
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.int().abs().flatten().bincount().double(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].abs().int(), 0),
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x * 2 if x.sum() > 0 else x,
    "slice": lambda x: x[: int(x.abs().sum())],
    "tolist": lambda x: x * x[0].tolist()[0],
    "argwhere": lambda x: x.argwhere().double(),
    "combinations": lambda x: x.narrow(0, x[0, 0].abs().int(), 1),
}


class Asks(nn.Module):
    def __init__(self, ask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self.layer(x)).sum() + self.layer(x).sum()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_shapes_and_branches_that_depend_on_data_are_refused(name: str, training: bool) -> None:
    model = Asks(DATA_DEPENDENT[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    loss = (lambda y: y) if training else None
    with pytest.raises(CaptureError, match=r"test_routing_in_parts\.py:\d+") as caught:
        capture(Workload(model, (torch.randn(5, 4),), loss=loss, optimizer=optimizer))
    assert len(str(caught.value)) < 400
