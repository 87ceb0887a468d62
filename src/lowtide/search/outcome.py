"""What a search tells while it runs, and what it returns.

Not done here: searching (`driver.py`) and showing (`lowtide.report`, `lowtide.cli`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowtide.cost.estimate import Estimate
from lowtide.run.measure import Measurement
from lowtide.run.plan import Plan

__all__ = ["Limit", "Move", "OnProgress", "Outcome", "Progress", "SearchRecord"]


@dataclass(frozen=True)
class Limit:
    """The limit as resolved: exactly one of the two is set, or none (as small as costs nothing)."""

    memory_bytes: int | None = None
    latency_ratio: float | None = None


@dataclass(frozen=True)
class Progress:
    """One report of a running search; bytes include the resident ones, times are seconds."""

    stage: str
    elapsed_s: float
    states: int = 0
    best_peak_bytes: int | None = None
    best_latency_s: float | None = None


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Move:
    """One applied move: its kind, where, and what it is predicted to save and cost; `detail` is the name of
    the rule of a rewrite.
    """

    kind: str  # fission, remat, swap, fuse, rewrite
    where: str
    source: str = ""
    saved_bytes: int = 0
    cost_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class SearchRecord:
    """How the search went; `iterations` holds (seconds, states, peak bytes, latency s) per improvement."""

    seconds: float
    states: int
    stop_reason: str
    iterations: tuple[tuple[float, int, int, float], ...] = ()

    @property
    def states_per_s(self) -> float:
        """Judged states per second of search."""
        return self.states / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Outcome:
    """A verified plan with everything that was predicted and measured about it.

    `eager` and `measured` are Measurements, or Estimates for a device that is not here (`verified` is then
    ``none``); `latency_ratio` is the median over interleaved pairs of
    plan / eager, `noise` the half-width of eager against itself.  `points` is the frontier as
    (predicted peak bytes, predicted seconds).  `tuned_latency_s` is eager's with malloc's thresholds raised,
    where it was measured.  `allocations_per_step` are the requests that the arena did not answer.
    """

    plan: Plan
    limit: Limit
    met: bool
    verified: str
    eager: Measurement | Estimate
    measured: Measurement | Estimate
    latency_ratio: float
    noise: float
    predicted_peak_bytes: int
    predicted_latency_s: float
    max_rel_error: float
    bit_equal: bool
    floor_bytes: int
    floor_node: str
    search: SearchRecord
    moves: tuple[Move, ...] = ()
    points: tuple[tuple[int, float], ...] = ()
    device: str = "cpu"
    settings: Mapping[str, object] = field(default_factory=dict)
    tuned_latency_s: float | None = None
    allocations_per_step: int | None = None

    def count(self, kind: str) -> int:
        """How many moves of one kind the plan applies."""
        return sum(move.kind == kind for move in self.moves)
