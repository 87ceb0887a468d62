"""What a report shows, as plain frozen data.

Problem.  A report is read on another machine, months later, by someone who has neither the model nor
this process.  So everything that the page shows is taken out of the compiler's own objects first.

Method.  `ReportData` holds names, numbers and tuples of them; no tensor, graph or plan is reachable from
it.  The page (`lowtide.report.page`) and the text (`lowtide.report.text`) read nothing else, which also
lets a test make one by hand.

Invariants.  Bytes are integers, times are seconds, spans are half-open steps.  A number that was not
taken is None, never 0.  Measured and predicted figures are separate fields.  A `Curve` has one entry per
step of the order, and a `Block`'s span counts steps of the plan's curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

__all__ = [
    "Block",
    "Curve",
    "Figures",
    "Floor",
    "Holder",
    "Iteration",
    "Limit",
    "Move",
    "Point",
    "ReportData",
    "Resident",
    "SearchRecord",
    "Step",
    "Verdict",
]


@dataclass(frozen=True, slots=True)
class Figures:
    """One column of the comparison: what a step takes, measured or predicted."""

    peak_bytes: int | None = None
    resident_bytes: int | None = None
    arena_bytes: int | None = None
    rss_peak_bytes: int | None = None
    latency_s: float | None = None

    @property
    def above_bytes(self) -> int | None:
        """Peak above the step's start."""
        if self.peak_bytes is None or self.resident_bytes is None:
            return None
        return self.peak_bytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """What was asked for; `asked` is the user's spelling ("50%", "1.10x")."""

    memory_bytes: int | None = None
    latency_ratio: float | None = None
    asked: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the limit is met when run, and what the numbers were compared with.

    `against` is eager, reference, scaled or none; empty where no check is told about.
    """

    met: bool
    against: str = ""
    max_rel_error: float | None = None
    bit_equal: bool | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an order: the live bytes above the resident ones while its node runs.

    `part` says which part of a Fission the step belongs to.
    """

    above_bytes: int
    operator: str
    module: str = ""
    source: str = ""
    phase: str = "forward"
    seconds: float = 0.0
    part: str = ""


@dataclass(frozen=True)
class Curve:
    """Live bytes per step of one order."""

    steps: tuple[Step, ...]
    resident_bytes: int

    @property
    def peak_step(self) -> int:
        """The first step with the most live bytes; 0 for an empty curve."""
        return max(range(len(self.steps)), key=lambda i: self.steps[i].above_bytes, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most live bytes, resident ones included."""
        return self.resident_bytes + max((step.above_bytes for step in self.steps), default=0)

    @property
    def timed(self) -> bool:
        """Whether the steps' durations are known."""
        return any(step.seconds > 0 for step in self.steps)

    def lasting(self, seconds: float) -> Curve:
        """The same curve, its steps' durations scaled so that together they take `seconds`."""
        total = sum(step.seconds for step in self.steps)
        if not total:
            return self
        factor = seconds / total
        return replace(self, steps=tuple(replace(s, seconds=s.seconds * factor) for s in self.steps))

    def edges(self, timed: bool) -> tuple[float, ...]:
        """Where each step begins and the last one ends, in seconds or in steps."""
        widths: Sequence[float] = [step.seconds if timed else 1.0 for step in self.steps]
        return tuple(accumulate(widths, initial=0.0))


@dataclass(frozen=True, slots=True)
class Block:
    """A buffer of the plan: bytes ``[offset, offset + nbytes)`` during steps ``[start, stop)``.

    `kind` is one of saved (made in the forward pass, read in the backward), forward, recomputed,
    backward, workspace, output.
    """

    start: int
    stop: int
    offset_bytes: int
    nbytes: int
    label: str
    module: str = ""
    source: str = ""
    kind: str = "forward"


@dataclass(frozen=True, slots=True)
class Holder:
    """A buffer that is alive at a peak; `label` is the operator that made it."""

    nbytes: int
    label: str
    module: str = ""
    source: str = ""
    kind: str = "forward"


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that exist before, during and after the step, by role: the caller's, and what is kept of them."""

    role: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """Applied transformations of one kind in one place: bytes no longer kept, seconds more per step.

    `count` is how many they are.
    """

    kind: str
    where: str
    source: str = ""
    saved_bytes: int | None = None
    cost_s: float | None = None
    detail: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Floor:
    """The bytes under which no plan goes that runs every operator whole, and the node that makes them.

    `parts` are what the node needs at once, resident bytes apart, as (what, bytes); `least` is what the
    smallest plan that was found needs, where splitting an operator takes it under the floor.
    """

    nbytes: int
    operator: str = ""
    module: str = ""
    source: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    least: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the memory / latency trade-off."""

    peak_bytes: int
    latency_s: float
    measured: bool = False
    chosen: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Iteration:
    """A moment at which the search had a new best."""

    seconds: float
    states: int
    peak_bytes: int
    latency_s: float
    move: str = ""


@dataclass(frozen=True)
class SearchRecord:
    """What the search did and why it stopped."""

    states: int
    seconds: float
    stop_reason: str
    iterations: tuple[Iteration, ...] = ()


@dataclass(frozen=True)
class ReportData:
    """Everything that a report shows.

    `latency_ratio` is the median over interleaved pairs, where it was measured; `settings` and `versions`
    are printed as they are, in order; `command` reproduces the run.  `kept_bytes` of the arena hold weights
    that are derived from the caller's.
    """

    workload: str
    device: str
    limit: Limit
    verdict: Verdict
    eager: Figures
    plan: Figures
    eager_curve: Curve
    plan_curve: Curve
    eager_predicted: Figures = field(default_factory=Figures)
    plan_predicted: Figures = field(default_factory=Figures)
    latency_ratio: float | None = None
    blocks: tuple[Block, ...] = ()
    resident: tuple[Resident, ...] = ()
    eager_holders: tuple[Holder, ...] = ()
    plan_holders: tuple[Holder, ...] = ()
    moves: tuple[Move, ...] = ()
    floor: Floor | None = None
    search: SearchRecord | None = None
    points: tuple[Point, ...] = ()
    opaque: tuple[str, ...] = ()
    command: str = ""
    kept_bytes: int = 0
    settings: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def gap_bytes(self) -> int:
        """Bytes of the plan's peak that no buffer holds: gaps in the arena, and what calls take beside it."""
        peak = self.plan.peak_bytes or self.plan_predicted.peak_bytes or 0
        return max(0, peak - self.plan_curve.peak_bytes) if self.plan_curve.steps else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of eager's measured peak above its curve: results that the program still holds, unread."""
        if self.eager.peak_bytes is None or not self.eager_curve.steps:
            return 0
        return max(0, self.eager.peak_bytes - self.eager_curve.peak_bytes)
