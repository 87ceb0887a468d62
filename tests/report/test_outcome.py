"""From a real plan of a small training step to its report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.errors import UsageError
from lowtide.report import explain, write_report
from lowtide.report.adaptor import by_module, data_of_outcome, data_of_plan
from lowtide.report.data import Move
from lowtide.report.words import floor_sentence
from lowtide.run.measure import Measurement
from lowtide.run.plan import Plan, build_plan
from lowtide.run.saved import inspect_plan, save_plan
from lowtide.search import outcome as search
from lowtide.transforms.remat import RematCandidate, apply, late_nodes, recomputable
from lowtide.workload import Workload


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(128, 32), torch.randn(128, 8)
    return Workload(
        model, (x,), targets=(y,), loss=nn.functional.mse_loss, optimizer=optimizer, name="small:batch=128"
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    program = capture(workload())
    late = late_nodes(program.graph)
    chosen = RematCandidate(recomputable(program.graph, late), late)
    return build_plan(program, apply(program.graph, chosen).graph, moves={"remat": 4})


@pytest.fixture(scope="module")
def outcome(plan: Plan) -> search.Outcome:
    resident = plan.resident_bytes
    peak = plan.predicted_peak_bytes
    return search.Outcome(
        plan=plan,
        limit=search.Limit(memory_bytes=peak + 100),
        met=True,
        verified="eager",
        eager=Measurement(resident, 2 * peak, None, 0.010, 5),
        measured=Measurement(resident, peak, None, 0.013, 5),
        latency_ratio=1.2,
        noise=0.01,
        predicted_peak_bytes=peak,
        predicted_latency_s=0.006,
        max_rel_error=0.0,
        bit_equal=True,
        floor_bytes=resident + 9_000,
        floor_node="0 (aten.addmm.default)",
        search=search.SearchRecord(2.0, 500, "time", ((0.1, 1, 3 * peak, 0.005), (0.5, 90, peak, 0.006))),
        moves=(
            search.Move("remat", "1", "model.py:3", 1024, 0.001),
            search.Move("remat", "1", "model.py:4", 2048, 0.001),
        ),
        points=((peak, 0.006), (3 * peak, 0.005)),
        settings={"seed": 0, "threads": 2},
    )


def test_the_curve_and_the_gaps_are_the_predicted_peak(plan: Plan) -> None:
    data = data_of_plan(plan)
    assert data.plan_curve.peak_bytes == plan.timeline.peak_bytes
    assert data.plan_curve.peak_bytes + data.gap_bytes == plan.predicted_peak_bytes
    assert sum(entry.nbytes for entry in data.resident) == plan.resident_bytes
    held = sum(holder.nbytes for holder in data.plan_holders)
    assert held + plan.resident_bytes == data.plan_curve.peak_bytes


def test_every_buffer_of_the_arena_is_a_block(plan: Plan) -> None:
    data = data_of_plan(plan)
    assert len(data.blocks) == len(plan.placement.offsets)
    assert max(block.offset_bytes + block.nbytes for block in data.blocks) <= plan.arena_bytes
    assert {"forward", "recomputed", "backward"} <= {block.kind for block in data.blocks}


def test_explaining_a_plan_names_modules_and_recomputed_values(plan: Plan) -> None:
    text = explain(plan)
    assert text.startswith("small:batch=128 on cpu\nOne training step in ")
    assert "recomputed" in text and "Alive at the plan's peak" in text and "Floor" in text
    assert "  remat    " in text


def test_a_plan_file_is_explained_without_its_model(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "small.lt")
    assert explain(inspect_plan(tmp_path / "small.lt")) == explain(plan)


def test_measured_figures_are_taken_over(outcome: search.Outcome) -> None:
    data = data_of_outcome(outcome)
    assert data.eager.peak_bytes == outcome.eager.peak_bytes and data.eager.latency_s == 0.010
    assert data.plan.arena_bytes == outcome.plan.arena_bytes
    assert data.eager_curve.edges(True)[-1] == pytest.approx(0.010)
    assert data.plan_curve.edges(True)[-1] == pytest.approx(0.012)
    assert data.limit.memory_bytes == outcome.limit.memory_bytes and "of eager's peak" in data.limit.asked
    assert [(move.where, move.saved_bytes, move.count) for move in data.moves] == [("1", 3072, 2)]
    assert data.floor is not None and data.floor.operator
    assert data.command.startswith("lowtide optimize small:batch=128 --memory ")


def test_the_floor_is_the_sum_of_what_its_node_needs(outcome: search.Outcome) -> None:
    data = data_of_outcome(outcome)
    assert data.floor is not None
    resident = sum(entry.nbytes for entry in data.resident)
    assert resident + sum(nbytes for _, nbytes in data.floor.parts) == data.floor.nbytes
    assert data.floor.least == outcome.floor_bytes < data.floor.nbytes
    assert "The smallest plan found needs" in floor_sentence(data)


def test_the_frontier_stands_on_the_measured_scale(outcome: search.Outcome) -> None:
    points = {point.name: point for point in data_of_outcome(outcome).points}
    assert points["this plan"].latency_s == pytest.approx(0.012) and points["this plan"].measured
    assert points[""].latency_s == pytest.approx(0.010) and not points[""].measured
    assert len(points) == 3


def test_writing_replaces_the_file_and_leaves_nothing_else(outcome: search.Outcome, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(outcome, path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_path_that_cannot_be_written_is_a_users_error(outcome: search.Outcome, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: No such file or directory: choose another"):
        write_report(outcome, tmp_path / "no" / "report.html")


def test_rows_are_joined_until_they_are_few() -> None:
    many = [Move("remat", f"blocks.{i}.mlp.{j}", f"a.py:{j}", 1, 0.5) for i in range(12) for j in range(4)]
    rows = by_module(many)
    assert [row.where for row in rows] == sorted(f"blocks.{i}.mlp" for i in range(12))
    assert all(row.count == 4 and row.saved_bytes == 4 and row.cost_s == 2.0 for row in rows)
    assert rows[0].source == "a.py:0 and 3 more"
