"""A measured step as a trace, and the estimator's error by family, of plans that really run."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import lowtide as lt
from lowtide.report.accuracy import MERGES, accuracy_of, accuracy_rows
from lowtide.report.adaptor import plan_trace
from lowtide.report.chrome import chrome_trace, pair_steps
from lowtide.report.trace import family_of
from lowtide.run.measure import watch_plan
from lowtide.run.plan import Plan, build_plan
from lowtide.run.watching import StepRun
from lowtide.transforms import fission
from lowtide.workload import Workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
    return Workload(model, (x,), targets=(y,), loss=nn.functional.cross_entropy, optimizer=optimizer)


@pytest.fixture(scope="module")
def split(workload: Workload) -> Plan:
    """The step with its batch in four parts."""
    program = lt.capture(workload)
    candidate = next(c for c in fission.candidates(program.graph, (4,)) if c.label == "batch")
    return build_plan(program, fission.apply(program.graph, candidate).graph)


@pytest.fixture(scope="module")
def runs(split: Plan, workload: Workload) -> list[tuple[StepRun, ...]]:
    return watch_plan(split, workload, runs=3)


def test_every_prepared_step_is_watched_in_order(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    for steps in runs:
        assert len(steps) == split.step_count
        starts = [step.start_s for step in steps]
        assert starts[0] == 0.0 and starts == sorted(starts)
        ends = [step.start_s + step.seconds for step in steps]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def test_measured_steps_find_their_operator(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    """Every operator of the graph that does work, once, or once a part; none with another's trail."""
    timed = pair_steps(plan_trace(split, None), runs[0])
    inside = [step for step in timed if step.step.part]
    assert [step.step.part for step in inside if step.family == "gelu"] == [
        f"part {k} of 4" for k in (1, 2, 3, 4)
    ]
    assert sum(step.family == "update" for step in timed) == 4
    assert sum(len(step.runs) for step in timed) == split.step_count


def test_the_trace_opens_in_a_viewer(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    content = json.loads(chrome_trace(split, runs[0]))
    events = content["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {"measured", "predicted"}
    slices = {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for name, tid in tracks.items()}
    assert len(slices["measured"]) == split.step_count
    for row in slices.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(row))
    told = slices["measured"][0]["args"]
    wanted = {"operator", "module", "source", "phase", "part", "live_bytes", "copies"}
    wanted |= {"predicted_s", "measured_s"}
    assert wanted == set(told)
    live = [e["args"]["above"] for e in events if e["ph"] == "C"]
    assert max(live) == max(step.above_bytes for step in plan_trace(split, None).curve.steps)
    assert content["otherData"]["predicted_s"] > 0 and content["otherData"]["measured_s"] > 0


def test_results_that_are_merged_are_copies(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    merges = [step for step in runs[0] if step.merge]
    content = json.loads(chrome_trace(split, runs[0]))
    named = [e for e in content["traceEvents"] if e["ph"] == "X" and e["name"].startswith("merge ")]
    assert len(named) == len(merges) > 0
    assert all(e["args"]["copies"] >= 1 for e in named)


def test_without_a_hook_results_are_copied(workload: Workload) -> None:
    """What has no out= form is made elsewhere: the trace says so."""
    from lowtide.ir.parser import parse_graph
    from lowtide.run.arena import ArenaExecutor
    from lowtide.run.layout import lay_out
    from lowtide.run.probe import probe_tree

    graph = parse_graph(
        "input %0: f32[8,4,9,9]\ninput %1: f32[4,4,3,3]\n"
        "%2: f32[8,4,7,7] = aten.convolution.default(%0, %1, None, "
        "[1, 1], [0, 0], [1, 1], False, [0, 0], 1)\n"
        "%3: f32[8,4,7,7] output = aten.exp.default(%2)\nreturn %3\n"
    )
    tree, order = probe_tree(graph, "arena", hook=None), [node.id for node in graph]
    executor = ArenaExecutor(graph, order, tree, lay_out(graph, order, tree[()]), None)
    watch: list[tuple[int, int, int]] = []
    executor.run({0: torch.randn(8, 4, 9, 9), 1: torch.randn(4, 4, 3, 3)}, {}, watch=watch)
    assert [copied for _, _, copied in watch] == [1, 0]
    assert [trail for trail, _ in executor.steps] == [(0,), (1,)]


def test_errors_are_added_up_by_family(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    accuracy = accuracy_of(split, runs)
    assert sum(row.share for row in accuracy.rows) == pytest.approx(1.0)
    shares = [row.share for row in accuracy.rows]
    assert shares == sorted(shares, reverse=True)
    families = {row.family: row for row in accuracy.rows}
    assert families["gelu"].steps == 4 and families["update"].steps == 4 and MERGES in families
    assert accuracy.measured_s == pytest.approx(
        sum(sorted(step.seconds for step in same)[1] for same in zip(*runs, strict=True))
    )


def test_opposite_errors_do_not_hide_each_other(split: Plan, runs: list[tuple[StepRun, ...]]) -> None:
    trace = plan_trace(split, lambda graph: {node.id: 1e-3 for node in graph})
    found = {row.family: row for row in accuracy_rows(trace, runs[0]).rows}
    assert found["gelu"].predicted_s == pytest.approx(4e-3)
    assert found["gelu"].error_s == pytest.approx(found["gelu"].measured_s - 4e-3)
    assert found["gelu"].share > 0


def test_families() -> None:
    graph = lt.capture(lt.Workload(nn.Linear(2, 2), (torch.ones(1, 2),))).graph
    families = {family_of(node.op) for node in graph}
    assert "addmm" in families or "linear" in families
