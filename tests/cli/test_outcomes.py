"""What a finished, refused or interrupted search prints, writes and returns; the search itself is played."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.errors import Infeasible
from lowtide.search.outcome import Limit, Move, Outcome, Progress, SearchRecord
from lowtide.terminal import engine

MLP = "mlp:batch=2,dim=4,layers=1"
MIB = 1 << 20


class PlayedPlan:
    """Stands for a Plan: an arena's size and a file."""

    arena_bytes = 80 * MIB

    def save(self, path: Path) -> None:
        Path(path).write_text("plan")


def played_outcome() -> Outcome:
    """A met memory limit."""
    figures = {"resident_bytes": 20 * MIB, "rss_peak_bytes": None, "latency_s": 0.2}
    return Outcome(
        plan=PlayedPlan(),  # type: ignore[arg-type]
        limit=Limit(memory_bytes=110 * MIB),
        met=True,
        verified="eager",
        eager=SimpleNamespace(peak_bytes=200 * MIB, predicted=False, **figures),  # type: ignore[arg-type]
        measured=SimpleNamespace(peak_bytes=100 * MIB, predicted=False, **figures),  # type: ignore[arg-type]
        latency_ratio=1.12,
        noise=0.01,
        predicted_peak_bytes=100 * MIB,
        predicted_latency_s=0.21,
        max_rel_error=0.0,
        bit_equal=True,
        floor_bytes=70 * MIB,
        floor_node="decoder.up.3.conv",
        search=SearchRecord(seconds=2.0, states=300, stop_reason="nothing left"),
        moves=(Move("remat", "encoder.0"), Move("remat", "encoder.1")),
    )


Play = Callable[[Callable[..., Any]], None]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Replace the search by a function of (workload, request, on_progress)."""
    monkeypatch.setattr(engine, "measure_fresh", lambda outcome, spec: outcome)
    return lambda search: monkeypatch.setattr(engine, "optimize", search)


def test_met(typed, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[engine.Request] = []

    def search(workload: object, request: engine.Request, on_progress: Callable[[Progress], None]) -> Outcome:
        asked.append(request)
        on_progress(Progress("capturing", 0.1))
        on_progress(Progress("searching", 0.5, 1200, 100 * MIB, 0.21))
        return played_outcome()

    play(search)
    monkeypatch.setattr(engine, "write_report", lambda outcome, path: path.write_text("page"))
    files = {option: tmp_path / option for option in ("save", "report", "json")}
    options = [word for option, path in files.items() for word in (f"--{option}", str(path))]
    finished = typed("optimize", MLP, "--memory", "50%", "--threads", "2", "--no-swap", *options)

    assert finished.status == 0
    assert asked == [engine.Request("50%", None, 30.0, 0, 2, "eager", None, True, False)]
    assert files["save"].read_text() == "plan"
    assert files["report"].read_text() == "page"
    assert finished.err.splitlines() == [
        "   0.1 s  capturing",
        "   0.5 s  searching  1,200 states  best 100.0 MiB, 210 ms",
    ]
    shown = " ".join(finished.out.split())
    for fragment in (
        "200.0 MiB │ 100.0 MiB │ 50%",
        "180.0 MiB │ 80.0 MiB │ 44.4%",
        "1.12x ±0.01",
        "0 (bit-equal)",
        "limit met: peak at most 110.0 MiB (115343360 bytes); verified against eager",
        "moves: 2 remat",
        "floor: 70.0 MiB (73400320 bytes) at decoder.up.3.conv",
        "300 states in 2.00 s (150 per second), stopped: nothing left",
    ):
        assert fragment in shown


def test_json_has_the_documented_fields(typed, play: Play, tmp_path: Path) -> None:
    play(lambda *_: played_outcome())
    path = tmp_path / "f.json"
    assert typed("optimize", MLP, "--memory", "50%", "--json", str(path)).status == 0
    assert json.loads(path.read_text()) == {
        "workload": MLP,
        "device": "cpu",
        "limit": {"memory_bytes": 110 * MIB},
        "met": True,
        "verified": "eager",
        "eager": {
            "resident_bytes": 20 * MIB,
            "peak_bytes": 200 * MIB,
            "rss_peak_bytes": None,
            "latency_s": 0.2,
        },
        "plan": {
            "predicted_peak_bytes": 100 * MIB,
            "peak_bytes": 100 * MIB,
            "arena_bytes": 80 * MIB,
            "rss_peak_bytes": None,
            "predicted_latency_s": 0.21,
            "latency_s": 0.2,
            "max_rel_error": 0.0,
            "bit_equal": True,
            "allocations_per_step": None,
        },
        "floor_bytes": 70 * MIB,
        "search": {"seconds": 2.0, "states": 300, "states_per_s": 150.0, "stop_reason": "nothing left"},
        "moves": {"fission": 0, "remat": 2, "swap": 0, "fuse": 0, "rewrite": 0},
    }


def test_latency_limit_in_json(typed, play: Play, tmp_path: Path) -> None:
    play(lambda *_: replace(played_outcome(), limit=Limit(latency_ratio=1.25)))
    path = tmp_path / "f.json"
    finished = typed("optimize", MLP, "--latency", "1.25x", "--json", str(path))
    assert json.loads(path.read_text())["limit"] == {"latency_ratio": 1.25}
    assert "latency at most 1.25x eager's" in finished.out


def test_infeasible_prints_the_floor_and_its_node(typed, play: Play) -> None:
    def search(*_: object) -> Outcome:
        raise Infeasible("memory 1.0 MiB is under the floor 3.4 MiB", floor_bytes=3565158, node="decoder.3")

    play(search)
    finished = typed("optimize", MLP, "--memory", "1MiB")
    assert finished.status == 3
    assert finished.complaint.endswith("is under the floor 3.4 MiB [floor 3565158 bytes at decoder.3]")


def test_infeasible_that_names_its_floor_is_not_repeated(typed, play: Play) -> None:
    def search(*_: object) -> Outcome:
        raise Infeasible("floor 3,565,158 bytes at decoder.3", floor_bytes=3565158, node="decoder.3")

    play(search)
    assert (
        typed("optimize", MLP, "--memory", "1MiB").complaint == "lowtide: floor 3,565,158 bytes at decoder.3"
    )


def test_not_met_is_told_and_written(typed, play: Play, tmp_path: Path) -> None:
    play(lambda *_: replace(played_outcome(), met=False))
    path = tmp_path / "f.json"
    finished = typed("optimize", MLP, "--memory", "40%", "--json", str(path))
    assert finished.status == 3
    assert "73400320 bytes at decoder.up.3.conv" in finished.complaint
    assert "limit NOT met" in finished.out
    assert json.loads(path.read_text())["met"] is False


def test_interrupt_with_a_plan_that_meets_the_limit(typed, play: Play, tmp_path: Path) -> None:
    record = SearchRecord(seconds=1.0, states=10, stop_reason="interrupted")
    play(lambda *_: replace(played_outcome(), search=record))
    path = tmp_path / "f.lt"
    finished = typed("optimize", MLP, "--memory", "50%", "--save", str(path))
    assert (finished.status, path.read_text()) == (0, "plan")
    assert "stopped: interrupted" in finished.out


def test_interrupt_before_a_plan_meets_the_limit(typed, play: Play) -> None:
    record = SearchRecord(seconds=1.0, states=10, stop_reason="interrupted")
    play(lambda *_: replace(played_outcome(), met=False, search=record))
    finished = typed("optimize", MLP, "--memory", "50%")
    assert finished.status == 130
    assert finished.complaint == "lowtide: interrupted before a plan met the limit"


def test_interrupt_before_any_plan(typed, play: Play) -> None:
    def search(*_: object) -> Outcome:
        raise KeyboardInterrupt

    play(search)
    finished = typed("optimize", MLP, "--memory", "50%")
    assert finished.status == 130
    assert finished.complaint == "lowtide: interrupted before a plan met the limit"


def test_error_in_the_users_model_names_the_users_line(typed, play: Play, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nimport lowtide as lt\n\ndef make():\n"
        "    return lt.Workload(torch.nn.Linear(2, 3), args=(torch.zeros(4, 5),))\n"
        "\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x @ torch.zeros(7, 7)\n"
        "\ndef wrong():\n    return lt.Workload(Net(), args=(torch.zeros(4, 5),))\n"
    )
    play(lambda workload, *_: workload.model(*workload.args))
    finished = typed("optimize", f"{file}:wrong", "--memory", "50%")
    assert finished.status == 2
    assert finished.complaint.endswith(f"(at {file}:9)")
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x5 and 7x7)" in finished.complaint


def test_a_fault_of_our_own_is_one_line_and_status_1(
    typed, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(lambda *_: played_outcome())
    monkeypatch.setattr("lowtide.cli.print_outcome", nn.Linear)  # called with the wrong arguments
    finished = typed("optimize", MLP, "--memory", "50%")
    assert finished.status == 1
    assert "please report it" in finished.complaint


def test_out_of_memory_is_not_our_fault(typed, play: Play) -> None:
    def search(*_: object) -> Outcome:
        torch.empty(1 << 60)
        raise AssertionError("unreachable")

    play(search)
    finished = typed("optimize", MLP, "--memory", "50%")
    assert finished.status == 2
    assert "can't allocate memory" in finished.complaint


def test_measure(typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "measure", lambda workload: played_outcome().eager)
    path = tmp_path / "f.json"
    finished = typed("measure", MLP, "--json", str(path))
    assert finished.status == 0
    assert "200.0 MiB" in finished.out
    assert "180.0 MiB" in finished.out
    record = json.loads(path.read_text())
    assert record["workload"] == MLP
    assert record["eager"]["peak_bytes"] == 200 * MIB
