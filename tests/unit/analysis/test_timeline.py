"""The curve of live bytes and its peak."""

from __future__ import annotations

from lowtide.analysis.facts import assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.ir.text import parse_graph

GRAPH = parse_graph("""
input %0: f32[8]
input %1: f32[4] param
%2: f32[8] = aten.mm.default(%0, %0)
%3: f32[4] @s2 = aten.slice.Tensor(%2, 0)
%4: f32[8] = aten.relu.default(%2)
%5: f32[4] output = aten.mm.default(%4, %1)
return %5
""")
ORDER = (2, 3, 4, 5)


def test_curve_and_peak() -> None:
    found = timeline(GRAPH, ORDER, assumed_facts(GRAPH))
    assert found.above_bytes == (32, 32, 64, 48)
    assert (found.peak_above_bytes, found.peak_step) == (64, 2)
    assert found.peak_bytes == 64 + 32 + 16


def test_reuse_in_place_lowers_the_curve() -> None:
    found = timeline(GRAPH, ORDER, assumed_facts(GRAPH), inplace=True)
    assert found.above_bytes == (32, 32, 32, 48)
    assert (found.peak_above_bytes, found.peak_step) == (48, 3)


def test_a_view_that_is_placed_late_keeps_its_storage() -> None:
    assert timeline(GRAPH, (2, 4, 5, 3), assumed_facts(GRAPH)).above_bytes == (32, 64, 80, 48)


def test_alive_names_the_buffers_of_a_step() -> None:
    found = timeline(GRAPH, ORDER, assumed_facts(GRAPH))
    assert [buffer.storages for buffer in found.alive(2)] == [(2,), (4,)]
    assert [buffer.storages for buffer in found.alive(3)] == [(4,), (5,)]
    for step, above in enumerate(found.above_bytes):
        assert sum(buffer.nbytes for buffer in found.alive(step)) == above


def test_a_graph_without_nodes() -> None:
    graph = parse_graph("input %0: f32[8]\nreturn %0")
    found = timeline(graph, (), {})
    assert (found.above_bytes, found.peak_above_bytes, found.peak_step, found.peak_bytes) == ((), 0, 0, 32)
