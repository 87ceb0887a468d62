"""Module paths and source lines, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.ir.ops import Aten
from lowtide.workload import Workload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return helper(y)


def helper(y: Tensor) -> Tensor:
    return y.sigmoid()  # the line that sigmoid is expected at


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).flatten(1)[:, :4]
        for block in self.blocks:
            y = y + block(y)
        return y


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


def line_of(text: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        number = next(n for n, line in enumerate(file, 1) if text in line)
    return f"test_origins.py:{number}"


def make() -> Program:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(
        Workload(model, (torch.randn(2, 1, 8),), loss=loss_of, optimizer=optimizer, clip_grad_norm=1.0)
    )


def origins(program: Program, overload: str) -> list[tuple[str, str, str]]:
    return [
        (node.origin.module, node.origin.source, node.origin.phase)
        for node in program.graph
        if isinstance(node.op, Aten) and node.op.overload == overload
    ]


def test_forward_and_backward_of_the_same_operator() -> None:
    program = make()
    line = line_of("y.sigmoid()  # the line")
    assert origins(program, "aten.sigmoid.default") == [
        ("blocks.0", line, "forward"),
        ("blocks.1", line, "forward"),
    ]
    assert origins(program, "aten.sigmoid_backward.default") == [
        ("blocks.1", line, "backward"),
        ("blocks.0", line, "backward"),
    ]
    (forward,) = origins(program, "aten.convolution.default")
    (backward,) = origins(program, "aten.convolution_backward.default")
    assert (forward[0], forward[2]) == ("stem.0", "forward")
    assert (backward[0], backward[2]) == ("stem.0", "backward")
    assert origins(program, "aten.threshold_backward.default")[0][0] == "stem.1"


def test_library_modules_are_seen_through_to_the_users_line() -> None:
    (linear, _) = origins(make(), "aten.addmm.default")
    assert linear == ("blocks.0.linear", line_of("y = self.linear(x)"), "forward")


def test_loss_clip_and_update() -> None:
    program = make()
    assert origins(program, "aten.pow.Tensor_Scalar")[0] == ("", line_of("y.square().mean()"), "loss")
    assert {node.origin.phase for node in program.graph} == {"forward", "loss", "backward", "clip", "update"}
    updates = {program.graph.node[node].origin.module for node in program.updates.values()}
    assert updates == {"stem.0", "blocks.0.linear", "blocks.1.linear"}
    clipped = [node.origin for node in program.graph if node.origin.phase == "clip"]
    assert len(clipped) > 5
