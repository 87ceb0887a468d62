"""Random programs in random orders: the arena executor, with dead memory poisoned, equals the reference."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import graphs, orders
from torch import Tensor

from lowtide.analysis.timeline import timeline
from lowtide.ir.graph import Graph
from lowtide.run.allocator import load_hook
from lowtide.run.arena import ArenaExecutor
from lowtide.run.eager import run_graph
from lowtide.run.events import peak_bytes, record_with_hook
from lowtide.run.layout import lay_out
from lowtide.run.probe import probe, probe_tree
from lowtide.run.store import ProfileStore

STORE = ProfileStore(None)
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def inputs_of(graph: Graph) -> dict[int, Tensor]:
    torch.manual_seed(0)
    return {value: torch.rand(graph.values[value].meta.shape) + 0.5 for value in graph.inputs}


@SLOW
@given(graphs(), st.data(), st.booleans())
def test_arena_equals_reference(graph: Graph, data: st.DataObject, hooked: bool) -> None:
    order = data.draw(orders(graph))
    tree = probe_tree(graph, "arena", store=STORE)
    hook = load_hook() if hooked else None
    runner = ArenaExecutor(graph, order, tree, lay_out(graph, order, tree[()]), hook, poison=True)
    theirs, ours = inputs_of(graph), inputs_of(graph)
    for _ in range(2):
        expected = run_graph(graph, theirs)
        found = runner.run(ours, {})
        assert all(torch.equal(found[value], expected[value]) for value in graph.outputs)
        assert all(found[value].stride() == expected[value].stride() for value in graph.outputs)
        assert all(torch.equal(ours[value], theirs[value]) for value in graph.inputs)


@SLOW
@given(graphs(), st.data())
def test_reference_peak_is_the_timeline(graph: Graph, data: st.DataObject) -> None:
    order = data.draw(orders(graph))
    facts = probe(graph, "reference", store=STORE)
    hook = load_hook()
    assert hook is not None
    inputs = inputs_of(graph)
    run_graph(graph, inputs, order)
    _, log = record_with_hook(hook, lambda: run_graph(graph, inputs, order))
    assert peak_bytes(log) == timeline(graph, order, facts).peak_above_bytes
