"""Data-dependent shapes are refused at the user's line, with a remedy (torchtitan#1117)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.workload import Workload


class Experts(nn.Module):
    """Routes each token to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(1)  # the line at fault
            result = result.index_add(0, rows, expert(x[rows]))
        return result


class DenseExperts(Experts):
    """The same with every expert on every token."""

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        return sum(
            torch.where((choice == index)[:, None], expert(x), 0.0)
            for index, expert in enumerate(self.experts)
        )


@pytest.mark.parametrize("training", [True, False])
def test_routing_is_refused_and_its_dense_form_is_not(training: bool) -> None:
    def workload(model: nn.Module) -> Workload:
        optimizer = torch.optim.SGD(model.experts.parameters(), lr=0.1)
        model.gate.requires_grad_(False)
        x = torch.randn(5, 4)
        if training:
            return Workload(model, (x,), loss=lambda y: y.mean(), optimizer=optimizer)
        return Workload(model, (x,))

    with open(__file__, encoding="utf-8") as file:
        line = next(n for n, text in enumerate(file, 1) if "# the line at fault" in text)
    with pytest.raises(CaptureError, match=r"nonzero.*depends on the data.*torch\.where") as caught:
        capture(workload(Experts()))
    assert caught.value.source == f"test_data_dependent_shapes.py:{line}"
    capture(workload(DenseExperts()))
