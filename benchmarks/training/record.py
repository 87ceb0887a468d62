"""What was measured, as values, and their JSON.

Bytes are integers, times seconds.  A row that could not run keeps its place and says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

__all__ = ["Comparison", "Figures", "Panel", "Row", "least", "read_comparison", "write_comparison"]

Series = Literal["eager", "peer", "ours"]
TOLERANCE = 5e-2
"""Of the largest relative difference from eager's gradients, for rows that count as doing the same.

Wide on purpose: float32 itself may be far from float64 (the U-Net's gradients: eager by 4e-3, compiled code,
which sums in another order, by 2e-2), and no peer should look worse for that.  The difference stands in
every row.
"""


@dataclass(frozen=True)
class Figures:
    """One way to run one step.

    `above_bytes`: the peak above the level at the step's start.  `ratio`: its latency to eager's, the median
    of `rounds` interleaved rounds; `noise`: the half-width of eager's 95 % interval against itself in them.
    `processor_ratio`: the same ratio of processor seconds, which other processes disturb less.
    `gradient_error`: the largest relative difference from eager's gradients.  `prepare_s`: the first
    forward and backward, compilation included, or the search.  `foreign_share`: the part of the processors'
    time that other processes used during the rounds.  `detail`: the moves of a plan.
    """

    above_bytes: int
    latency_s: float
    ratio: float
    noise: float
    processor_ratio: float
    rounds: int
    gradient_error: float
    buffers_equal: bool = True
    prepare_s: float = 0.0
    foreign_share: float = 0.0
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether the gradients are eager's, up to what a different order of sums explains."""
        return self.gradient_error <= TOLERANCE


@dataclass(frozen=True)
class Row:
    """`label` names the way; `choice` what was chosen in it (a budget, a cut); `problem` why it did not run.

    `others` are the choices that were tried and not taken, (choice, figures or None).
    """

    label: str
    series: Series
    figures: Figures | None = None
    choice: str = ""
    problem: str = ""
    others: tuple[tuple[str, Figures | None], ...] = ()


@dataclass(frozen=True)
class Panel:
    """All rows of one model."""

    key: str
    title: str
    rows: tuple[Row, ...] = ()

    def with_row(self, row: Row) -> Panel:
        """The panel with `row` in place of the one with its label, or at the end."""
        if row.label not in [old.label for old in self.rows]:
            return replace(self, rows=(*self.rows, row))
        return replace(self, rows=tuple(row if old.label == row.label else old for old in self.rows))

    @property
    def eager(self) -> Figures | None:
        """Eager's figures, if it ran."""
        return next((row.figures for row in self.rows if row.series == "eager"), None)


@dataclass(frozen=True)
class Comparison:
    """A run of the benchmark: `machine` says on what, each note is a line under the tables."""

    panels: tuple[Panel, ...] = ()
    machine: str = ""
    notes: tuple[str, ...] = field(default=())

    def with_panel(self, panel: Panel) -> Comparison:
        """The comparison with `panel` in place of the one with its key, or at the end."""
        keys = [old.key for old in self.panels]
        if panel.key not in keys:
            return replace(self, panels=(*self.panels, panel))
        return replace(self, panels=tuple(panel if old.key == panel.key else old for old in self.panels))


def least(tried: Sequence[tuple[str, Figures | None]]) -> str | None:
    """The choice with the least peak and right gradients, the faster of two alike; None if there is none."""
    ran = [(one.above_bytes, one.ratio, choice) for choice, one in tried if one is not None and one.right]
    return min(ran)[2] if ran else None


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the JSON object."""
    path.write_text(json.dumps(asdict(comparison), indent=2) + "\n", encoding="utf-8")


def read_comparison(path: Path) -> Comparison:
    """Read what `write_comparison` wrote.  Raises OSError, ValueError (not such a file)."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        panels = tuple(_panel(entry) for entry in read["panels"])
        return Comparison(panels, read["machine"], tuple(read["notes"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a comparison that this benchmark wrote") from error


def _panel(entry: Mapping[str, Any]) -> Panel:
    return Panel(entry["key"], entry["title"], tuple(_row(row) for row in entry["rows"]))


def _row(entry: Mapping[str, Any]) -> Row:
    others = tuple((choice, _figures(figures)) for choice, figures in entry["others"])
    return Row(**{**entry, "figures": _figures(entry["figures"]), "others": others})


def _figures(entry: Mapping[str, Any] | None) -> Figures | None:
    return None if entry is None else Figures(**entry)
