"""What a plan does with memory, for people: one HTML page, one text, two pictures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lowtide.errors import UsageError
from lowtide.report.adaptor import data_of_outcome
from lowtide.report.page import render
from lowtide.report.text import explain
from lowtide.search.outcome import Outcome

__all__ = ["explain", "write_report"]


def write_report(outcome: Outcome, path: str | Path) -> None:
    """Write the page about `outcome`; an existing file is replaced at once or not at all.

    Raises UsageError if the file cannot be written.
    """
    page = render(data_of_outcome(outcome))
    try:
        _replace(Path(path), page)
    except OSError as error:
        raise UsageError(
            f"report {path} cannot be written: {error.strerror or error}", remedy="choose another path"
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
