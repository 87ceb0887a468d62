"""From a graph in an order to curves, blocks and holders, on a training step small enough to do by hand."""

from __future__ import annotations

import pytest

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.analysis.lifetime import lifetimes
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten, Fission, Fused
from lowtide.ir.parser import parse_graph
from lowtide.report.data import Resident
from lowtide.report.trace import Trace, label_of, resident_by_role, trace
from lowtide.run.layout import lay_out
from lowtide.run.probe import probe_tree
from lowtide.transforms.fission import apply, candidates

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


def test_statistics_updated_in_the_forward_do_not_begin_the_backward() -> None:
    text = STEP.replace(
        "%3: f32[256]",
        "input %9: f32[256] buffer\nn90: aten.copy_.default(%9!, %2)  # enc model.py:3\n%3: f32[256]",
    )
    lines = text.strip().splitlines()
    lines.sort(key=lambda line: not line.startswith("input"))
    graph = parse_graph("\n".join(lines) + "\n")
    order = [node.id for node in graph]
    offsets = {buffer.id: 0 for buffer in lifetimes(graph, order, assumed_facts(graph))}
    found = trace(graph, order, {(): assumed_facts(graph)}, offsets=offsets)
    assert [step.phase for step in found.curve.steps][:3] == ["forward", "update", "forward"]
    kinds = [block.kind for block in found.blocks if block.kind != "output"]
    assert kinds == ["saved", "saved", "saved", "backward", "recomputed"]


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


CHAIN = """
input %0: f32[8,256]
%1: f32[8,256] = aten.exp.default(%0)  # a model.py:1
%2: f32[8,256] = aten.neg.default(%1)  # b model.py:2
%3: f32[8,256] = aten.exp.default(%2)  # c model.py:3
%4: f32[8,256] = aten.mul.Tensor(%3, %1)  # c model.py:3
%5: f32[8,256] = aten.mul.Tensor(%4, %4)  # c model.py:3
%6: f32[8,1] = aten.sum.dim_IntList(%5, [1], True)  # c model.py:4
return %6
"""


def split_in(parts: int) -> Graph:
    graph = parse_graph(CHAIN)
    found = [c for c in candidates(graph, (parts,)) if len(c.sizes) == parts]
    return apply(graph, max(found, key=lambda c: len(c.nodes))).graph


def traced(graph: Graph) -> Trace:
    tree = probe_tree(graph)
    order = [node.id for node in graph]
    layout = lay_out(graph, order, tree[()])
    return trace(
        graph,
        order,
        tree,
        inplace=True,
        offsets=layout.offsets,
        price=lambda graph: {n.id: 1.0 for n in graph},
    )


def test_the_parts_of_a_fission_follow_one_another() -> None:
    graph = split_in(4)
    (node,) = [node for node in graph if isinstance(node.op, Fission)]
    found = traced(graph)
    inside = [step for step in found.curve.steps if step.part]
    assert len(inside) == 4 * len(node.op.bodies[0])
    assert [step.part for step in inside][:: len(node.op.bodies[0])] == [
        f"part {i} of 4" for i in (1, 2, 3, 4)
    ]
    assert all(step.seconds == 1.0 and step.module in {"a", "b", "c"} for step in inside)
    whole = traced(parse_graph(CHAIN))
    assert max(step.above_bytes for step in inside) < 0.6 * max(
        step.above_bytes for step in whole.curve.steps
    )


def test_blocks_of_an_opened_fission_never_share_bytes() -> None:
    found = traced(split_in(4))
    assert any(block.label == "aten.exp.default" for block in found.blocks)
    for one in found.blocks:
        for other in found.blocks:
            if one is not other and one.start < other.stop and other.start < one.stop:
                apart = one.offset_bytes + one.nbytes <= other.offset_bytes
                assert apart or other.offset_bytes + other.nbytes <= one.offset_bytes


def test_live_bytes_inside_a_fission_are_those_of_its_buffers() -> None:
    graph = split_in(2)
    found = traced(graph)
    for k, step in enumerate(found.curve.steps):
        held = sum(block.nbytes for block in found.blocks if block.start <= k < block.stop)
        outputs = sum(graph.storage_of(value).nbytes for value in graph.outputs)
        assert step.above_bytes in (held, held + outputs)


def test_a_crowd_of_parts_is_closed_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = split_in(4)
    opened = traced(graph)
    monkeypatch.setattr("lowtide.report.trace.MOST_STEPS", 10)
    closed = traced(graph)
    parts = [step.part for step in closed.curve.steps if step.part]
    assert parts.count("part 1 of 4") > 1 and parts.count("part 2 of 4") == 1
    assert closed.curve.peak_bytes == opened.curve.peak_bytes
    assert closed.curve.edges(True)[-1] == opened.curve.edges(True)[-1]
