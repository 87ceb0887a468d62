"""A region none of whose inputs needs a gradient, only its parameters do (pytorch#7617, #42812).

What is compared is the updated weights, not only the loss: a checkpoint that drops such a region's gradients
leaves the loss of the first step right.
"""

from __future__ import annotations

import torch
from tests.issues.ladder import climb, parts_of, recomputed
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.workload import Workload


class Frozen(nn.Module):
    """A frozen embedding and a detached prefix feed regions whose inputs carry no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.embedding.weight.requires_grad_(False)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.idle = nn.Parameter(torch.ones(4))  # receives no gradient at all

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(ids).cumsum(1)
        y = self.first(x) * self.scale
        return self.second(y.detach()) + self.scale + y


def workload() -> Workload:
    torch.manual_seed(0)
    model = Frozen().double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)
    ids = torch.randint(0, 7, (6, 3))
    return Workload(model, (ids,), loss=lambda y: y.square().mean(), optimizer=optimizer, clip_grad_norm=0.01)


def test_every_rung() -> None:
    plans = climb(workload())
    assert parts_of(plans["2 parts"].graph)


def test_the_region_is_recomputed() -> None:
    graph = capture(workload()).graph
    again = [n for n in recomputed(graph) if n.id not in graph.node and n.origin.module.startswith("first")]
    assert {getattr(node.op, "overload", "") for node in again} >= {"aten.tanh.default"}
