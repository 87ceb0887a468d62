"""The help teaches: what WORKLOAD means, an example for every command, the exit statuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lowtide import __version__
from lowtide.workloads import BUNDLED

COMMANDS = ("optimize", "explore", "measure", "run", "explain", "workloads")


def test_top_help_names_the_commands_and_statuses(typed) -> None:
    finished = typed("--help")
    assert finished.status == 0
    listed = {words[1] for words in map(str.split, finished.out.splitlines()) if len(words) > 1}
    assert set(COMMANDS) <= listed
    for status in ("0 limit met", "2 your input is wrong", "3 no plan", "130 interrupted"):
        assert status in " ".join(finished.out.split())


def test_no_arguments_show_the_help(typed) -> None:
    assert typed().out == typed("--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(typed, command: str) -> None:
    finished = typed(command, "-h")
    assert finished.status == 0
    assert f"lowtide {command}" in finished.out
    if command != "workloads":
        assert "Example" in finished.out


def test_version(typed) -> None:
    assert typed("--version").out == f"lowtide {__version__}\n"


def test_workloads_lists_every_name_and_option(typed) -> None:
    finished = typed("workloads")
    assert finished.status == 0
    names = [line.split()[0] for line in finished.out.splitlines() if line and not line.startswith(" ")]
    assert set(BUNDLED) <= set(names)
    assert "attention=sdpa|explicit" in finished.out
    assert "file.py:function" in finished.out


def test_help_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "measure", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "WORKLOAD" in done.stdout
    assert done.stderr == ""
