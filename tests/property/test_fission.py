"""Random graphs of real operators: every region that fission proposes keeps every number."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs

from lowtide.ir import Graph
from lowtide.ir.verify import verify
from lowtide.run.eager import run_graph
from lowtide.transforms import fission

CHEAP = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def outcome(graph: Graph) -> list[torch.Tensor]:
    """Results and what was written, from made-up inputs."""
    generator = torch.Generator().manual_seed(5)
    inputs = {v: torch.rand(graph.values[v].meta.shape, generator=generator) + 0.5 for v in graph.inputs}
    outputs = run_graph(graph, inputs)
    return [*(outputs[value] for value in graph.outputs), *inputs.values()]


@CHEAP
@given(graphs(max_nodes=16), st.data())
def test_random_graphs_in_random_parts(graph: Graph, data: st.DataObject) -> None:
    expected = outcome(graph)
    for _ in range(3):  # regions beside regions
        found = list(fission.candidates(graph, (2, 3, 5)))
        if not found:
            return
        edit = fission.apply(graph, data.draw(st.sampled_from(found)))
        verify(edit.graph)
        for one, other in zip(outcome(edit.graph), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
        graph = edit.graph
