"""The array mirror tells the same peak as the timeline of the graph that the edit builds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from tests.unit.transforms.test_remat import CHAIN

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph, Node
from lowtide.ir.text import parse_graph
from lowtide.search.mirror import build_mirror
from lowtide.search.recompute import Recomputation
from lowtide.transforms.remat import RematCandidate, apply, late_nodes, recomputable

WITH_VIEWS = """
input %0: f32[8,16]
input %1: f32[16,16] param
%2: f32[8,16] = aten.mm.default(%0, %1)                  # a m.py:1 forward
%3: f32[16,8](1,16) @s2 = aten.t.default(%2)             # a m.py:1 forward
%4: f32[16,8](1,16) = aten.relu.default(%3)              # a m.py:2 forward
%5: f32[16,8](1,16) = aten.sin.default(%4)               # b m.py:3 forward
%6: f32[8,16], %7: f32[8,1], %8: f32[8,1] = aten.native_layer_norm.default(%2, [16], None, None, 0.1)  # b
%9: f32[] output = aten.sum.default(%5)                         # - m.py:5 loss
%10: f32[16,8](1,16) = aten.cos.default(%5)              # b m.py:3 backward
%11: f32[16,8](1,16) = aten.mul.Tensor(%10, %4)          # b m.py:3 backward
%12: f32[8,16] @s11 = aten.t.default(%11)                # a m.py:2 backward
%13: f32[8,16] = aten.mul.Tensor(%12, %6)                # a m.py:2 backward
%14: f32[8,16] = aten.mul.Tensor(%13, %7)                # a m.py:2 backward
%15: f32[16,8](1,16) @s14 = aten.t.default(%14)          # a m.py:1 backward
%16: f32[16,16](1,16) = aten.mm.default(%15, %2)         # a m.py:1 backward
n30: aten.add_.Tensor(%1!, %16)                          # - - update
return %9
"""


def call_of(graph: Graph, node: Node) -> object:
    return node.op, tuple(graph.values[value].meta for value in node.inputs)


@pytest.mark.parametrize("text", [CHAIN, WITH_VIEWS])
def test_every_set_is_judged_as_the_built_graph_is(text: str) -> None:
    graph = parse_graph(text)
    late = late_nodes(graph)
    allowed = sorted(recomputable(graph, late))
    assert len(allowed) >= 3
    facts = dict(assumed_facts(graph))
    busiest = graph.nodes[2].id  # one node with workspace, so that it counts for its clones too
    plain = facts[busiest]
    facts[busiest] = OperatorFacts(plain.output_bytes, plain.transient_bytes + 100)
    known = {call_of(graph, node): facts[node.id] for node in graph.nodes}
    costs = {node.id: 1.0 + 0.01 * k for k, node in enumerate(graph.nodes) if not graph.is_view(node)}
    mirror = build_mirror(graph, [node.id for node in graph.nodes], facts, costs, late)
    for size in range(len(allowed) + 1):
        for chosen in combinations(allowed, size):
            mask = np.array([storage in chosen for storage in mirror.storage_ids])
            found = mirror.evaluate(mask)
            edited = apply(graph, RematCandidate(frozenset(chosen), late)).graph
            all_facts = {node.id: known[call_of(edited, node)] for node in edited.nodes}
            order = [node.id for node in edited.nodes]
            expected = timeline(edited, order, all_facts, inplace=True)
            assert found.peak_bytes == expected.peak_above_bytes, chosen


def big_chain(length: int) -> Graph:
    lines = ["input %0: f32[64,64]"]
    lines += [
        f"%{k}: f32[64,64] = aten.sin.default(%{k - 1})  # b{k // 4} m.py:{k} forward"
        for k in range(1, length)
    ]
    lines.append(f"%{length}: f32[] output = aten.sum.default(%{length - 1})  # - m.py:0 loss")
    lines.append(f"%{length + 1}: f32[64,64] = aten.neg.default(%{length - 1})  # - m.py:0 backward")
    lines += [
        f"%{2 * length - k + 1}: f32[64,64] = aten.mul.Tensor(%{2 * length - k}, %{k})  # b m.py:{k} backward"
        for k in range(length - 1, 0, -1)
    ]
    lines.append(f"return %{length}, %{2 * length}")
    return parse_graph("\n".join(lines))


def test_a_chain_reaches_square_root_memory() -> None:
    """A chain of n equal layers fits in O(sqrt(n)) of its activations at one extra forward (Chen 2016)."""
    graph = big_chain(40)
    late = late_nodes(graph)
    facts = assumed_facts(graph)
    costs = {node.id: 1.0 for node in graph.nodes}
    mirror = build_mirror(graph, [node.id for node in graph.nodes], facts, costs, late)
    allowed = recomputable(graph, late)
    mask = np.array([storage in allowed for storage in mirror.storage_ids])
    search = Recomputation(mirror, mask)
    full = search.points[0]
    unit = 64 * 64 * 4
    assert full.peak_bytes >= 39 * unit
    search.sweep(8 * unit, lambda: False)
    best = search.smallest()
    assert best.peak_bytes <= 16 * unit
    assert best.latency_s <= full.latency_s + 40
    peaks = [point.peak_bytes for point in sorted(search.points, key=lambda p: p.latency_s)]
    assert peaks == sorted(peaks, reverse=True)


def test_the_search_repeats_itself() -> None:
    graph = big_chain(20)
    late = late_nodes(graph)
    mirror = build_mirror(graph, [n.id for n in graph.nodes], assumed_facts(graph), {}, late)
    mask = np.array([s in recomputable(graph, late) for s in mirror.storage_ids])
    runs = []
    for _ in range(2):
        search = Recomputation(mirror, mask, seed=3)
        search.sweep(6 * 64 * 64 * 4, lambda: False)
        search.improve(8 * 64 * 64 * 4, 1e9, lambda: False, max_rounds=20)
        runs.append((search.states, search.points))
    assert runs[0] == runs[1]
