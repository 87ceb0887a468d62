"""How far a search is, while it runs.

On a terminal one line is kept up to date; elsewhere (a pipe, a log) a line is printed when the stage or
the best point changes, at most one every few seconds.  Both go to standard error, so that standard
output holds only results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.search.outcome import OnProgress, Progress

__all__ = ["show_progress"]

QUIET_S = 5.0


def line_for(progress: Progress, elapsed_s: float) -> str:
    """ "12.3 s  searching  1,204 states  best 92.1 MiB, 210 ms"."""
    parts = [f"{elapsed_s:6.1f} s", progress.stage]
    if progress.states:
        parts.append(f"{progress.states:,} states")
    best = []
    if progress.best_peak_bytes is not None:
        best.append(format_bytes(progress.best_peak_bytes))
    if progress.best_latency_s is not None:
        best.append(format_seconds(progress.best_latency_s))
    if best:
        parts.append(f"best {', '.join(best)}")
    return "  ".join(parts)


class LiveLine:
    """The line on a terminal; its clock moves between two reports too."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.last: Progress | None = None

    def update(self, progress: Progress) -> None:
        self.last = progress

    def __rich__(self) -> Text:
        elapsed_s = time.monotonic() - self.started_s
        text = f"{elapsed_s:6.1f} s  starting" if self.last is None else line_for(self.last, elapsed_s)
        return Text(text, no_wrap=True, overflow="ellipsis")


class PrintedLines:
    """Lines in a log: every new stage, and every few seconds what changed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""
        self.printed_s = -QUIET_S
        self.last = ""

    def update(self, progress: Progress) -> None:
        line = line_for(progress, progress.elapsed_s)
        recent = progress.elapsed_s - self.printed_s < QUIET_S
        if line == self.last or (progress.stage == self.stage and recent):
            return
        self.stage, self.printed_s, self.last = progress.stage, progress.elapsed_s, line
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def show_progress(console: Console) -> Iterator[OnProgress]:
    """A callback for the search that shows its progress until the block ends."""
    if not console.is_terminal:
        yield PrintedLines(console).update
        return
    line = LiveLine()
    with Live(line, console=console, refresh_per_second=4, transient=True):
        yield line.update
