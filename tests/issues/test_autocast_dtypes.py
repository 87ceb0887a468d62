"""Autocast regions have exactly eager's element types (pytorch#141896)."""

from __future__ import annotations

import pytest
import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.ir.ops import Aten
from lowtide.workload import Workload


class Mixed(nn.Module):
    """Half inside, float in an inner region that switches it off; a module used twice is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.norm(self.first(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                z = self.head(y.float())
            return self.head(y) + z


@pytest.mark.parametrize("whole", [None, torch.bfloat16])
def test_training(whole: torch.dtype | None) -> None:
    model, x = Mixed(), torch.randn(3, 6)
    program = assert_same_steps(model, (x,), loss=lambda y: y.float().square().mean(), autocast=whole)
    casts = [
        node
        for node in program.graph
        if isinstance(node.op, Aten)
        and node.op.overload == "aten._to_copy.default"
        and node.inputs[0] == program.names["param:first.weight"]
    ]
    assert len(casts) == 1


def test_a_surrounding_region_does_not_leak_in() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = capture(Workload(model, (x,)))
    assert program.graph.values[program.graph.outputs[0]].meta.dtype is torch.float32
