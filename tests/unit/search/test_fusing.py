"""Groups of a plan's graph: measured, remembered, given up, chosen with more care where numbers differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.analysis.key import graph_key
from lowtide.analysis.timeline import timeline
from lowtide.capture import Program, capture
from lowtide.ir import Fission, Fused, Graph
from lowtide.ir.verify import verify as check_graph
from lowtide.run.plan import build_plan
from lowtide.run.verify import verify
from lowtide.schedule.heuristics import best_schedule
from lowtide.search import fusing
from lowtide.search.estimator import Estimator
from lowtide.search.fusing import Fuser, kernel_moves
from lowtide.search.levels import Realised
from lowtide.transforms import fission, remat
from lowtide.workloads.parse import load_workload

GPT2 = "gpt2:layers=2,dim=64,heads=4,seq=32,batch=4,vocab=128,mode=train"


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(load_workload(GPT2))


def fuser() -> Fuser:
    kernels: dict[str, object] = {}
    return Fuser(Estimator(kernels=kernels), kernels)  # type: ignore[arg-type]


def realised(work: Fuser, graph: Graph) -> Realised:
    facts = work.estimator.facts(graph)
    order = tuple(best_schedule(graph, facts, inplace=True).order)
    return Realised(graph, order, timeline(graph, order, facts, inplace=True), 0.0)


def groups(graph: Graph) -> list[Graph]:
    return [n.op.body for n in graph.nodes if isinstance(n.op, Fused) and n.op.kind == "kernel"]


def check(program: Program, work: Fuser, fused: Realised) -> None:
    check_graph(fused.graph)
    plan = build_plan(program, fused.graph, fused.order, kernels=work.kernels, poison=True)
    verdict = verify(program, plan)
    assert verdict.passed, verdict.explain()


def test_groups_that_pay_are_kernels_and_the_rest_is_not(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "GAIN", 1e9)  # whatever the machine says
    work = fuser()
    fused = work.fuse(realised(work, program.graph))
    assert fused is not None and len(groups(fused.graph)) > 10
    assert len(list(kernel_moves(fused.graph))) == len(groups(fused.graph))
    check(program, work, fused)
    monkeypatch.setattr(fusing, "GAIN", 0.0)
    assert fuser().fuse(realised(work, program.graph)) is None


def test_what_lost_is_not_proposed_again(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "GAIN", 1e9)
    work = fuser()
    plain = realised(work, program.graph)
    fused = work.fuse(plain)
    assert fused is not None
    lost = {graph_key(body) for body in groups(fused.graph)[:3]}
    work.lost_groups.update(lost)
    again = work.fuse(plain)
    assert again is not None and lost.isdisjoint(map(graph_key, groups(again.graph)))


def test_careful_groups_have_no_reductions(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "GAIN", 1e9)
    work = fuser()
    plain = realised(work, program.graph)
    work.be_careful()
    fused = work.fuse(plain)
    inside = (
        "" if fused is None else " ".join(str(node.op) for body in groups(fused.graph) for node in body.nodes)
    )
    assert "mm" not in inside and "norm" not in inside and "softmax" not in inside
    work.be_careful()
    assert work.fuse(plain) is None


def test_inside_a_region(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "GAIN", 1e9)
    candidate = next(c for c in fission.candidates(program.graph, counts=(2,)) if c.label == "batch")
    work = fuser()
    fused = work.fuse(realised(work, fission.apply(program.graph, candidate).graph))
    assert fused is not None
    bodies = [body for n in fused.graph.nodes if isinstance(n.op, Fission) for body in n.op.bodies]
    assert all(len(groups(body)) > 5 for body in bodies)
    check(program, work, fused)


def test_what_is_recomputed_is_not_done_early_again(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "GAIN", 1e9)
    graph = program.graph
    late = remat.late_nodes(graph)
    chosen = remat.recomputable(graph, late)
    work = fuser()
    plain = realised(work, remat.apply(graph, remat.RematCandidate(chosen, late)).graph)
    fused = work.fuse(plain)
    assert fused is not None
    place = {
        number: position for position, number in enumerate(n for n in plain.order if not _view(plain, n))
    }
    for body in groups(fused.graph):
        places = [place[node.id] for node in body.nodes if node.id in place]
        assert max(places) - min(places) <= fusing.REACH
    check(program, work, replace(fused))


def _view(plain: Realised, number: int) -> bool:
    return plain.graph.is_view(plain.graph.node[number])
