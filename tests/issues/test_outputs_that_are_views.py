"""Outputs that are views of intermediates, of inputs, of each other (pytorch PR#187678)."""

from __future__ import annotations

import torch
from tests.unit.capture.interpreter import run
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.workload import Workload


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        early = y[1]
        y[0] = 7.0
        self.seen.copy_(x[0])
        return early, y, y.t(), y.t()[2:], x.view(-1), x, self.layer.weight.t(), self.seen, self.seen[:2]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_aliases_are_eagers() -> None:
    model, x = Views(), torch.randn(3, 4)
    program = capture(Workload(model, (x,)))
    ours, _ = run(program, (x,))
    with torch.no_grad():
        theirs = model(x)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride() and one.storage_offset() == other.storage_offset()
    groups = [[i for i, b in enumerate(theirs) if storage(a) == storage(b)] for a in theirs]
    assert [[i for i, b in enumerate(ours) if storage(a) == storage(b)] for a in ours] == groups
    assert storage(ours[7]) == storage(model.seen) and storage(ours[6]) == storage(model.layer.weight)
