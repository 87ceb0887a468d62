"""Planning for a device that is not here: predicted, said to be, never run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import lowtide as lt
from lowtide.capture.internals import building_without_data
from lowtide.cli import run_command
from lowtide.search.driver import optimize
from lowtide.workloads import TINY, load_workload

SMALL = "gpt2:layers=2,dim=64,heads=2,seq=32,batch=4,vocab=64"
# 20 layers of 16384 x 16384, with AdamW's state 60 GiB: nothing of it may be allocated.
HUGE = "mlp:layers=20,dim=16384,batch=64"


def test_explore_a_model_larger_than_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "frontier.json"
    assert run_command(["explore", HUGE, "--device", "h200", "--seconds", "1", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["device"] == "h200"
    assert record["eager"]["resident_bytes"] > 55 * 2**30
    assert record["eager"]["rss_peak_bytes"] is None
    assert record["points"]
    assert "predicted" in capsys.readouterr().out


def test_optimize_says_that_it_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ["--memory", "80%", "--seconds", "1", "--json", str(file), "--report", str(page)]
    assert run_command(["optimize", SMALL, "--device", "rtx3090", *options]) == 0
    out = capsys.readouterr().out
    assert "predicted for rtx3090, nothing was run" in out
    assert "nan" not in out
    record = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (record["device"], record["verified"], record["met"]) == ("rtx3090", "none", True)
    assert record["plan"]["predicted_peak_bytes"] <= record["limit"]["memory_bytes"]
    assert record["plan"]["max_rel_error"] is None
    assert "rtx3090" in page.read_text()


def test_a_limit_under_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["optimize", SMALL, "--device", "h200", "--memory", "55%", "--seconds", "1"]) == 3
    assert re.search(r"the floor .* \(resident .* \+ largest step .*", capsys.readouterr().err)


def test_an_unknown_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["explore", SMALL, "--device", "abacus"]) == 2
    assert "no device 'abacus': the known devices are rtx3090, h200, cpu" in capsys.readouterr().err


def test_such_a_plan_neither_runs_nor_is_saved(tmp_path: Path) -> None:
    workload = load_workload(SMALL)  # with data: the device alone decides
    outcome = optimize(workload, memory="80%", seconds=1, device="h200")
    x, y = workload.args[0], workload.targets[0]
    with pytest.raises(lt.LowtideError, match="made for h200"):
        outcome.plan.step(x, y)
    with pytest.raises(lt.LowtideError, match="is a prediction"):
        outcome.plan.save(tmp_path / "plan.lt")


def test_a_workload_without_data_needs_a_device() -> None:
    with building_without_data():
        workload = load_workload(SMALL)
    with pytest.raises(lt.LowtideError, match="built without data"):
        optimize(workload, memory="80%", seconds=1)


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_bundled_workload_builds_and_captures_without_data(name: str) -> None:
    real = lt.capture(load_workload(TINY[name]))
    with building_without_data():
        fake = load_workload(TINY[name])
    graph = lt.capture(fake).graph
    assert graph.resident_bytes == real.graph.resident_bytes
    assert [str(node.op) for node in graph.nodes] == [str(node.op) for node in real.graph.nodes]
