"""A command line as a user types it: arguments in, exit status and both streams out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lowtide.cli import run_command


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line on standard error; fails if there are more or it is a traceback."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


Typing = Callable[..., Finished]


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Run one command line in this process, on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> Finished:
        status = run_command(arguments)
        streams = capsys.readouterr()
        return Finished(status, streams.out, streams.err)

    return run
