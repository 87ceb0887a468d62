"""The whole way as a user types it: optimize, save, report; then explain, run and explore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.terminal import engine

MLP = "mlp:batch=64,dim=32,layers=3,mode=train"
KEYS = {"workload", "device", "limit", "met", "verified", "eager", "plan", "floor_bytes", "search", "moves"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan made by the command line, with its report and figures beside it."""
    from lowtide.cli import run_command

    folder = tmp_path_factory.mktemp("plan")
    files = [f"--save={folder / 'p.lt'}", f"--report={folder / 'p.html'}", f"--json={folder / 'p.json'}"]
    assert run_command(("optimize", MLP, "--memory", "90%", "--seconds", "1", *files)) == 0
    return folder


def test_the_figures_keep_the_limit(saved: Path) -> None:
    record = json.loads((saved / "p.json").read_text())
    assert set(record) == KEYS
    assert record["met"] is True
    assert record["verified"] == "eager"
    assert record["plan"]["peak_bytes"] <= record["limit"]["memory_bytes"]
    assert record["plan"]["peak_bytes"] == record["plan"]["predicted_peak_bytes"]
    assert record["plan"]["peak_bytes"] <= record["eager"]["peak_bytes"]
    assert all(record[who]["rss_peak_bytes"] is not None for who in ("eager", "plan"))


def test_the_report_is_one_file(saved: Path) -> None:
    page = (saved / "p.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_explain_and_run_a_saved_plan_with_a_trace(
    typed, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three more processes, whose figures were compared when the plan was made.
    monkeypatch.setattr(engine, "measure_fresh", lambda outcome, spec: outcome)
    told = typed("explain", str(saved / "p.lt"))
    assert told.status == 0
    assert "Alive at the plan's peak" in told.out
    figures, trace = saved / "run.json", saved / "trace.json"
    files = ["--json", str(figures), "--trace", str(trace)]
    ran = typed("run", str(saved / "p.lt"), MLP, "--steps", "2", *files)
    assert ran.status == 0, ran.err
    again, first = json.loads(figures.read_text()), json.loads((saved / "p.json").read_text())
    assert again["plan"]["peak_bytes"] == first["plan"]["peak_bytes"]
    assert again["moves"] == first["moves"] and any(again["moves"].values())
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["phase"] for event in slices} >= {"forward", "backward", "update"}
    assert any("mlp.py" in event["args"]["source"] for event in slices)


def test_explain_judges_the_estimator(typed, saved: Path) -> None:
    told = typed("explain", str(saved / "p.lt"), "--estimator")
    assert told.status == 0, told.err
    assert "share of error" in told.out and "update" in told.out
    assert "all steps:" in told.out.splitlines()[-1]
    refused = typed("explain", str(saved / "p.lt"), MLP)
    assert refused.status == 2 and "--estimator" in refused.complaint


def test_a_plan_refuses_another_workload(typed, saved: Path) -> None:
    finished = typed("run", str(saved / "p.lt"), "mlp:batch=32,dim=32,layers=3,mode=train")
    assert finished.status == 2
    assert "made for another workload" in finished.complaint


def test_explore_shows_the_trade_off(typed, tmp_path: Path) -> None:
    figures = tmp_path / "frontier.json"
    finished = typed("explore", MLP, "--seconds", "1", "--json", str(figures))
    assert finished.status == 0, finished.err
    points = [(p["latency_s"], p["peak_bytes"]) for p in json.loads(figures.read_text())["points"]]
    assert len(points) > 1
    assert points == sorted(points)
    assert [peak for _, peak in points] == sorted((peak for _, peak in points), reverse=True)


def test_a_limit_under_the_floor(typed) -> None:
    finished = typed("optimize", MLP, "--memory", "1KiB", "--seconds", "1")
    assert finished.status == 3
    assert "floor" in finished.err
    assert "bytes)" in finished.err or "KiB" in finished.err
