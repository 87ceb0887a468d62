"""From a graph in an order to curves, blocks and holders, on a training step small enough to do by hand."""

from __future__ import annotations

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.ir.ops import Aten, Fused
from lowtide.ir.parser import parse_graph
from lowtide.report.data import Resident
from lowtide.report.trace import label_of, resident_by_role, trace

STEP = """
input %0: f32[256]
input %1: f32[256] param
%2: f32[256] = aten.mul.Tensor(%0, %1)  # enc model.py:3
%3: f32[256] = aten.exp.default(%2)  # enc.act model.py:4
%4: f32[256] = aten.neg.default(%3)  # dec model.py:5
%5: f32[256] = aten.mul.Tensor(%4, %3)  # dec model.py:5 backward
%6: f32[256] = aten.exp.default(%2)  # enc.act model.py:4
%7: f32[256] = aten.mul.Tensor(%5, %6)  # enc.act model.py:4 backward
return %7
"""
KIB = 1024


def test_each_step_names_its_node_and_its_live_bytes() -> None:
    graph = parse_graph(STEP)
    order = [node.id for node in graph]
    curve = trace(graph, order, {(): assumed_facts(graph)}, price=lambda graph: {order[0]: 0.5}).curve
    assert [step.above_bytes for step in curve.steps] == [n * KIB for n in (1, 2, 3, 4, 3, 3)]
    assert curve.resident_bytes == 2 * KIB and curve.peak_step == 3 and curve.peak_bytes == 6 * KIB
    assert (curve.steps[1].operator, curve.steps[1].module, curve.steps[1].source) == (
        "aten.exp.default",
        "enc.act",
        "model.py:4",
    )
    assert [step.phase for step in curve.steps] == ["forward"] * 3 + ["backward", "forward", "backward"]
    assert curve.steps[0].seconds == 0.5 and curve.timed


def test_blocks_tell_what_they_are_for() -> None:
    graph = parse_graph(STEP)
    order = [node.id for node in graph]
    found = trace(
        graph, order, {(): assumed_facts(graph)}, offsets={0: 0, 1: 1024, 2: 2048, 3: 3072, 4: 1024}
    ).blocks
    assert [(block.label, block.kind, block.start, block.stop) for block in found] == [
        ("aten.mul.Tensor", "saved", 0, 5),
        ("aten.exp.default", "saved", 1, 4),
        ("aten.neg.default", "saved", 2, 4),
        ("aten.mul.Tensor", "backward", 3, 6),
        ("aten.exp.default", "recomputed", 4, 6),
    ]
    assert [block.offset_bytes for block in found] == [0, 1024, 2048, 3072, 1024]


def test_holders_are_who_is_alive_at_the_peak() -> None:
    graph = parse_graph(STEP)
    order = [node.id for node in graph]
    found = trace(graph, order, {(): assumed_facts(graph)})
    assert sum(holder.nbytes for holder in found.holders) + 2 * KIB == found.curve.peak_bytes
    assert {holder.module for holder in found.holders} == {"enc", "enc.act", "dec"}


def test_workspace_is_a_holder_of_its_own() -> None:
    graph = parse_graph(STEP)
    order = [node.id for node in graph]
    facts = dict(assumed_facts(graph)) | {order[1]: OperatorFacts((KIB,), 9 * KIB)}
    found = trace(graph, order, {(): facts})
    assert found.curve.peak_step == 1
    assert sorted((holder.kind, holder.nbytes) for holder in found.holders) == [
        ("saved", KIB),
        ("saved", KIB),
        ("workspace", 8 * KIB),
    ]


def test_resident_bytes_by_role() -> None:
    found = resident_by_role(parse_graph(STEP))
    assert found == (Resident("parameters", KIB), Resident("arguments", KIB))


def test_labels_of_groups_say_what_is_inside() -> None:
    body = parse_graph(
        "input %0: f32[4]\n"
        + "".join(f"%{i + 1}: f32[4] = aten.exp.default(%{i})\n" for i in range(6))
        + "return %6\n"
    )
    assert label_of(Fused(body)) == "fused exp+exp+exp+exp+2 more"
    assert label_of(Fused(body, "update")) == "update of 6 operators"
    assert label_of(Aten("aten.exp.default")) == "aten.exp.default"
