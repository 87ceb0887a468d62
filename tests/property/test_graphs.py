"""Random graphs of real operators: the printed form, the invariants, memory, and content keys."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.brute_force import Machine
from tests.strategies import facts_of, graphs, nested_graphs, orders, relabel, shuffled

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.analysis.inplace import INPLACE
from lowtide.analysis.key import canonical_order, graph_key
from lowtide.analysis.lifetime import lifetimes
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph
from lowtide.ir.text import parse_graph, print_graph
from lowtide.ir.verify import verify

SOME = settings(max_examples=100, deadline=None)


@SOME
@given(nested_graphs())
def test_text_round_trip(graph: Graph) -> None:
    text = print_graph(graph)
    assert parse_graph(text) == graph
    assert print_graph(parse_graph(text)) == text


@SOME
@given(st.one_of(graphs(), nested_graphs()))
def test_every_generated_graph_is_valid(graph: Graph) -> None:
    verify(graph)


def simulated(
    graph: Graph, order: tuple[int, ...], facts: dict[int, OperatorFacts], inplace: bool
) -> list[int]:
    sizes = {node: fact.output_bytes for node, fact in facts.items()}
    transient = {node: fact.transient_bytes for node, fact in facts.items()}
    return Machine(graph, sizes, transient, INPLACE if inplace else {}).run(order)


@SOME
@given(st.data(), st.booleans())
def test_timeline_is_what_a_brute_force_simulation_says(data: st.DataObject, inplace: bool) -> None:
    graph = data.draw(graphs())
    facts = data.draw(facts_of(graph))
    program_order = tuple(node.id for node in graph.nodes)
    for order in (program_order, data.draw(orders(graph))):
        found = timeline(graph, order, facts, inplace)
        assert list(found.above_bytes) == simulated(graph, order, facts, inplace)
        assert found.peak_bytes == graph.resident_bytes + max(found.above_bytes)


@SOME
@given(st.data())
def test_reuse_in_place_never_raises_the_curve(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    facts, order = assumed_facts(graph), data.draw(orders(graph))
    fresh, reused = timeline(graph, order, facts), timeline(graph, order, facts, inplace=True)
    assert all(a >= b for a, b in zip(fresh.above_bytes, reused.above_bytes, strict=True))


@SOME
@given(st.data(), st.booleans())
def test_every_storage_has_one_buffer_that_covers_its_uses(data: st.DataObject, inplace: bool) -> None:
    graph = data.draw(graphs())
    order = data.draw(orders(graph))
    step = {node: k for k, node in enumerate(order)}
    buffers = lifetimes(graph, order, assumed_facts(graph), inplace)
    home = {storage: buffer for buffer in buffers for storage in buffer.storages}
    assert sum(len(buffer.storages) for buffer in buffers) == len(home)
    assert home.keys() == {s.id for s in graph.storages.values() if not s.role.resident}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            buffer = home.get(graph.values[value].storage)
            assert buffer is None or buffer.start <= step[node.id] < buffer.stop


@SOME
@given(st.data())
def test_graph_key_sees_neither_ids_nor_the_order_of_independent_nodes(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    moved = relabel(shuffled(graph, data.draw(orders(graph))), data.draw(st.integers(0, 99)))
    verify(moved)
    if _dead_twins(graph):
        return
    assert graph_key(moved) == graph_key(graph)


def _dead_twins(graph: Graph) -> bool:
    """Several results that nobody reads have no canonical place among each other."""
    idle = [n for n in graph.nodes if n.outputs and not any(graph.readers[v] for v in n.outputs)]
    return sum(not set(node.outputs) & set(graph.outputs) for node in idle) > 1


@SOME
@given(graphs())
def test_canonical_order_puts_producers_first(graph: Graph) -> None:
    place = {node: number for number, node in enumerate(canonical_order(graph))}
    assert place.keys() == graph.node.keys()
    for node in graph.nodes:
        assert all(place[graph.producer[v]] < place[node.id] for v in node.inputs if v in graph.producer)
