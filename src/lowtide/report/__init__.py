"""What a plan does with memory and time, for people: one HTML page, one text, two pictures, one trace."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowtide.errors import UsageError
from lowtide.report.adaptor import data_of_outcome
from lowtide.report.chrome import chrome_trace
from lowtide.report.page import render
from lowtide.report.text import explain
from lowtide.run.plan import Plan
from lowtide.run.watching import StepRun
from lowtide.search.outcome import Outcome

__all__ = ["explain", "write_report", "write_trace"]


def write_report(outcome: Outcome, path: str | Path) -> None:
    """Write the page about `outcome`; an existing file is replaced at once or not at all.

    Raises UsageError if the file cannot be written.
    """
    _write("report", path, render(data_of_outcome(outcome)))


def write_trace(plan: Plan, steps: Sequence[StepRun], path: str | Path) -> None:
    """Write one watched run of a plan in the Chrome trace format; UsageError if that is not possible."""
    _write("trace", path, chrome_trace(plan, steps))


def _write(what: str, path: str | Path, text: str) -> None:
    try:
        _replace(Path(path), text)
    except OSError as error:
        raise UsageError(
            f"{what} {path} cannot be written: {error.strerror or error}", remedy="choose another path"
        ) from error


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
