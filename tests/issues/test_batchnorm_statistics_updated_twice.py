"""BatchNorm statistics are updated exactly once, and are visible right after the step (pytorch#96136)."""

from __future__ import annotations

import torch
from tests.unit.capture.same import assert_same_steps
from torch import nn

from lowtide.ir.graph import Role
from lowtide.ir.ops import Aten


def test_each_statistic_is_written_by_one_node_after_all_readers() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    program = assert_same_steps(model, (torch.randn(2, 2, 6, 6),), loss=lambda y: y.square().mean())
    graph = program.graph
    buffers = {storage.id for storage in graph.storages.values() if storage.role is Role.BUFFER}
    assert len(buffers) == 6
    for buffer in buffers:
        touching = [
            node for node in graph if any(graph.values[value].storage == buffer for value in node.inputs)
        ]
        writing = [node for node in touching if node.writes]
        assert len(writing) == 1
        assert isinstance(writing[0].op, Aten) and writing[0].op.overload == "aten.copy_.default"
        assert touching[-1] is writing[0]


def test_the_statistics_do_not_wait_for_the_backward() -> None:
    """The backward lists the running statistics but does not read them."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    program = assert_same_steps(model, (torch.randn(2, 2, 6, 6),), loss=lambda y: y.square().mean())
    graph = program.graph
    (backward,) = (
        n for n in graph if getattr(n.op, "overload", "") == "aten.native_batch_norm_backward.default"
    )
    assert all(graph.storage_of(value).role is not Role.BUFFER for value in backward.inputs)


def test_statistics_of_a_module_used_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.head(self.norm(x)))

    model = Shared()
    assert_same_steps(model, (torch.randn(5, 4),), loss=lambda y: y.square().mean())
    assert model.norm.num_batches_tracked.item() == 6
