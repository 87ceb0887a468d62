"""Seconds per node: every node that works has some, equal nodes the same, and nothing is disturbed."""

import torch
from tests.unit.run import graphs

from lowtide.ir.text import parse_graph
from lowtide.run.store import ProfileStore
from lowtide.run.timing import alone, time_nodes


def test_nodes_take_time_and_views_do_not() -> None:
    graph = graphs.network()
    before = torch.get_rng_state()
    found = time_nodes(graph, store=ProfileStore(None))
    assert found.keys() == {node.id for node in graph.nodes}
    assert found[9] == 0.0 and all(found[node] > 0.0 for node in found if node != 9)
    assert torch.equal(torch.get_rng_state(), before)


def test_updates_and_draws_are_timed() -> None:
    for graph in (graphs.update(), graphs.random_graph()):
        found = time_nodes(graph, store=ProfileStore(None))
        assert all(found[node.id] > 0.0 for node in graph.nodes if not graph.is_view(node))


def test_bigger_takes_longer_and_is_remembered() -> None:
    graph = parse_graph(
        "input %0: f32[8,8]\ninput %1: f32[512,512]\n"
        "%2: f32[8,8] = aten.mm.default(%0, %0)\n%3: f32[512,512] = aten.mm.default(%1, %1)\nreturn %2, %3\n"
    )
    store = ProfileStore(None)
    found = time_nodes(graph, store=store)
    assert found[3] > 3 * found[2]
    assert time_nodes(graph, seconds=0.0, store=store) == found


def test_node_alone_has_the_callers_inputs() -> None:
    graph = graphs.network()
    single = alone(graph, graph.node[12])
    assert single.inputs == (8,) and single.outputs == () and len(single) == 1
    assert single.storage_of(8).role.resident and not single.storage_of(12).role.resident
