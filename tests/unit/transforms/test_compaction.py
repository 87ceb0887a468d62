"""Slices that outlive the rest of their storage are copied, and nothing else is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.analysis.facts import assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.capture import capture
from lowtide.ir import Graph
from lowtide.ir.verify import verify
from lowtide.run.eager import run_graph
from lowtide.transforms.compaction import compacted
from lowtide.workload import Workload


class Halves(nn.Module):
    """One half of a value is worked on at once, the other is read `later` operators on."""

    def __init__(self, later: int) -> None:
        super().__init__()
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        early, late = y[:, :4], y[:, 4:]
        for _ in range(self.later):
            early = early.sin()
        return early + late


X = torch.rand(2, 8, 128, 128)


def graph_of(later: int) -> Graph:
    return capture(Workload(Halves(later), (X,))).graph


def live_bytes(graph: Graph) -> int:
    """In the middle of the graph."""
    order = [node.id for node in graph]
    return timeline(graph, order, assumed_facts(graph), inplace=True).above_bytes[len(order) // 2]


def test_a_slice_that_outlives_the_rest_is_copied() -> None:
    graph = graph_of(14)
    found = compacted(graph)
    verify(found)
    clones = [node for node in found if "clone" in str(node.op)]
    assert len(clones) == 1 and len(found) == len(graph) + 1
    assert live_bytes(graph) - live_bytes(found) == X.nbytes // 2
    inputs = dict(zip(graph.inputs, (X,), strict=True))
    for ours, theirs in zip(
        run_graph(found, inputs).values(), run_graph(graph, inputs).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_a_slice_that_is_read_soon_is_not() -> None:
    graph = graph_of(4)
    assert compacted(graph) is graph
