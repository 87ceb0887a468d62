"""Segments are recomputed for their late readers, in one edit, and never illegally."""

from __future__ import annotations

import pytest

from lowtide.analysis.facts import assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph
from lowtide.ir.text import parse_graph
from lowtide.ir.verify import verify
from lowtide.transforms.remat import RematCandidate, apply, late_nodes, recomputable, segments

CHAIN = """
input %0: f32[8,16]
input %1: f32[16] param
%2: f32[8,16] = aten.exp.default(%0)            # a m.py:1 forward
%3: f32[8,16] = aten.sin.default(%2)            # a m.py:2 forward
%4: f32[8,16] = aten.cos.default(%3)            # b m.py:3 forward
%5: f32[] output = aten.sum.default(%4)                # - m.py:4 loss
%6: f32[8,16] = aten.mul.Tensor(%4, %3)         # b m.py:3 backward
%7: f32[8,16] = aten.mul.Tensor(%6, %2)         # a m.py:2 backward
%8: f32[16] = aten.sum.dim_IntList(%7, [0])     # a m.py:1 backward
n20: aten.add_.Tensor(%1!, %8)                  # - - update
return %5
"""


def chain() -> Graph:
    graph = parse_graph(CHAIN)
    verify(graph)
    return graph


def storages(graph: Graph, *values: int) -> frozenset[int]:
    return frozenset(graph.values[value].storage for value in values)


def test_only_early_results_with_late_use_are_recomputable() -> None:
    graph = chain()
    assert recomputable(graph, late_nodes(graph)) == storages(graph, 2, 3, 4)


def test_a_segment_is_one_edit_and_clones_read_clones() -> None:
    graph = chain()
    edit = apply(graph, RematCandidate(storages(graph, 2, 3), late_nodes(graph)))
    verify(edit.graph)
    names = [getattr(node.op, "overload", "") for node in edit.graph.nodes]
    assert names.count("aten.exp.default") == 2
    assert names.count("aten.sin.default") == 2
    assert names.count("aten.cos.default") == 1
    sines = [n for n in edit.graph.nodes if getattr(n.op, "overload", "") == "aten.sin.default"]
    exps = [n for n in edit.graph.nodes if getattr(n.op, "overload", "") == "aten.exp.default"]
    assert sines[1].inputs == exps[1].outputs
    position = {node.id: k for k, node in enumerate(edit.graph.nodes)}
    assert position[sines[1].id] < position[6] < position[7]


def test_an_original_without_early_readers_moves() -> None:
    """A value that only late nodes read is computed once, late."""
    text = CHAIN.replace("%7: f32[8,16] = aten.mul.Tensor(%6, %2)", "%7: f32[8,16] = aten.mul.Tensor(%6, %9)")
    text = text.replace(
        "%5: f32[] output =", "%9: f32[8,16] = aten.neg.default(%0)  # a m.py:9 forward\n%5: f32[] output ="
    )
    graph = parse_graph(text)
    edit = apply(graph, RematCandidate(storages(graph, 9), late_nodes(graph)))
    verify(edit.graph)
    negs = [k for k, n in enumerate(edit.graph.nodes) if getattr(n.op, "overload", "") == "aten.neg.default"]
    assert len(negs) == 1
    assert edit.graph.nodes[negs[0] + 1].id == 7
    assert edit.resolve(9) is None


def test_the_peak_falls() -> None:
    graph = chain()
    order = [node.id for node in graph.nodes]
    before = timeline(graph, order, assumed_facts(graph)).peak_bytes
    edited = apply(graph, RematCandidate(storages(graph, 2, 3), late_nodes(graph))).graph
    after = timeline(edited, [node.id for node in edited.nodes], assumed_facts(edited)).peak_bytes
    assert after <= before


def test_random_results_are_never_recomputed() -> None:
    graph = parse_graph(CHAIN.replace("aten.exp.default(%0) ", "aten.bernoulli.p(%0, 0.5)"))
    allowed = recomputable(graph, late_nodes(graph))
    assert allowed == storages(graph, 3, 4)
    with pytest.raises(ValueError, match="cannot be recomputed"):
        apply(graph, RematCandidate(storages(graph, 2), late_nodes(graph)))


def test_a_copy_never_reads_an_updated_weight() -> None:
    """Late updates are allowed as long as each copy is made before them."""
    text = CHAIN.replace("aten.sin.default(%2) ", "aten.add.Tensor(%2, %1)")
    graph = parse_graph(text)
    late = late_nodes(graph)
    assert storages(graph, 3) <= recomputable(graph, late)
    verify(apply(graph, RematCandidate(storages(graph, 3), late)).graph)
    first, last = "%6: f32[8,16] =", "n20: aten.add_.Tensor(%1!, %0)  # - - update\n"
    early_update = text.replace(first, last + first).replace(
        "n20: aten.add_.Tensor(%1!, %8)", "n21: aten.add_.Tensor(%1!, %8)"
    )
    graph = parse_graph(early_update)
    with pytest.raises(ValueError, match="after their update"):
        apply(graph, RematCandidate(storages(graph, 3), late_nodes(graph)))


def test_segments_follow_modules_and_keep_what_leaves_them() -> None:
    graph = chain()
    found = segments(graph, recomputable(graph, late_nodes(graph)))
    assert found == {"a": storages(graph, 2)}  # %3 is read in b, %4 by the loss


def test_the_children_of_a_list_are_one_segment_too() -> None:
    text = CHAIN.replace("# a m.py:1 forward", "# layers.0 m.py:1 forward").replace(
        "# b m.py:3 forward", "# layers.0 m.py:3 forward"
    )
    text = text.replace("# a m.py:2 forward", "# layers.0 m.py:2 forward")
    graph = parse_graph(text)
    found = segments(graph, recomputable(graph, late_nodes(graph)))
    inside = storages(graph, 2, 3)
    assert found == {"layers": inside, "layers.*": inside, "layers.0": inside}
