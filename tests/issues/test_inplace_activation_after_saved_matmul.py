"""In-place activations after a matmul whose result is saved (pytorch#113737)."""

from __future__ import annotations

import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn
from torch.nn import functional

from lowtide.ir.ops import Aten


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x) @ x.t() @ x
            y += x
            x = (functional.relu_(y) * 0.5).sigmoid_()
        return x


def test_in_place_chain() -> None:
    program = assert_same_steps(Chain(), (torch.randn(5, 6),), loss=lambda y: y.square().mean())
    names = {node.op.overload for node in program.graph if isinstance(node.op, Aten)}
    assert not {name for name in names if name.split(".")[1].endswith("_")}
