"""Every mistake gets one clear line on standard error and status 2, before anything heavy starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.terminal import engine

UNET = "unet:batch=1,size=16,width=4,depth=2"


@pytest.fixture
def nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a model or searching fails the test."""

    def heavy(*_: object, **__: object) -> None:
        pytest.fail("the mistake was found too late")

    for name in ("load_workload", "optimize", "measure"):
        monkeypatch.setattr(engine, name, heavy)


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["optimise"], ["No such command 'optimise'", "optimize", "see `lowtide --help`"]),
        (["optimize"], ["Missing argument 'WORKLOAD'", "see `lowtide optimize --help`"]),
        (["optimize", UNET], ["no limit given", "--memory 50%"]),
        (["optimize", UNET, "--memory", "50%", "--latency", "1.1x"], ["two limits given"]),
        (["optimize", UNET, "--memory", "5z"], ["memory '5z'", "unknown unit 'z'"]),
        (["optimize", UNET, "--memory", "2G"], ["ambiguous unit", "GiB"]),
        (["optimize", UNET, "--memory", "-1%"], ["not more than zero"]),
        (["optimize", UNET, "--latency", "1.1"], ["latency '1.1' has no unit"]),
        (["optimize", UNET, "--memory", "50%", "--seconds", "-1"], ["--seconds -1 is too small"]),
        (["optimize", UNET, "--memory", "50%", "--seconds", "soon"], ["Invalid value for '--seconds'"]),
        (["optimize", UNET, "--memory", "50%", "--seconds", "nan"], ["--seconds nan"]),
        (["optimize", UNET, "--memory", "50%", "--threads", "0"], ["--threads 0 is too small"]),
        (["optimize", UNET, "--memory", "50%", "--rng", "dice"], ["--rng", "dice", "philox"]),
        (["optimize", UNET, "--memry", "50%"], ["--memry", "--memory"]),
        (["optimize", UNET, "--memory"], ["--memory", "requires an argument"]),
        (["optimize", UNET, "more", "--memory", "50%"], ["more"]),
        (["measure", UNET, "--json", "nowhere/figures.json"], ["nowhere/figures.json", "no such file"]),
        (["optimize", UNET, "--memory", "50%", "--report", "."], ["--report .", "is a directory"]),
        (["optimize", UNET, "--memory", "50%", "--save", "nowhere/f.lt"], ["--save nowhere/f.lt"]),
        (
            ["optimize", UNET, "--memory", "50%", "--save", "f", "--json", "./f"],
            ["--save and --json both name f"],
        ),
        (["run", "nowhere.lt", UNET], ["there is no plan file nowhere.lt"]),
        (["explain", "nowhere.lt"], ["there is no plan file nowhere.lt"]),
    ],
)
@pytest.mark.usefixtures("nothing_heavy")
def test_found_before_anything_heavy(
    typed, arguments: list[str], fragments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = typed(*arguments)
    assert finished.status == 2
    assert [fragment for fragment in fragments if fragment not in finished.complaint] == []
    assert finished.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("workload", "fragments"),
    [
        ("unett", ["did you mean unet"]),
        ("unet:sze=16", ["unet has no option 'sze'", "size=128"]),
        ("unet:size=big", ["size=big is not a whole number"]),
        ("nowhere.py:make", ["there is no file nowhere.py"]),
    ],
)
@pytest.mark.parametrize("command", ["optimize", "measure"])
def test_wrong_workload(typed, command: str, workload: str, fragments: list[str]) -> None:
    limit = ["--memory", "50%"] if command == "optimize" else []
    finished = typed(command, workload, *limit)
    assert finished.status == 2
    assert [fragment for fragment in fragments if fragment not in finished.complaint] == []


@pytest.mark.parametrize("command", ["run", "explain"])
def test_a_file_that_is_no_plan(typed, command: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.lt"
    plan.write_text("not a plan")
    finished = typed(command, str(plan), *([UNET] if command == "run" else []))
    assert (finished.status, finished.out) == (2, "")
    assert "plan.lt" in finished.complaint


def test_a_mistake_leaves_existing_files_as_they_are(typed, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("old")
    assert typed("measure", "unett", "--json", str(figures)).status == 2
    assert figures.read_text() == "old"


def test_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "optimize", "unett", "--memory", "50%"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lowtide: no bundled workload is called 'unett': did you mean unet or unetpp?\n"
