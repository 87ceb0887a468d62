"""The search itself: open bases, trace each, then spend what is left where it pays.

Problem.  One run has to yield the whole frontier, find the best point for one limit, stop at any time,
and say why it stopped.

Method.  The whole graph first, so that there is an answer at once.  Then regions, those that hold most of
the peak first: the head with its loss, the batch as a whole, the late layers, operators whose workspace is
in the way.  Each base is traced by falling targets, and no further than the goal asks: to a little below a
target, or to a little above a time.  With a limit, the bases that are nearest to the best known point take
turns at large-neighbourhood search.

Invariants.  `points` only ever gets better.  Deterministic for a seed as long as no time limit cuts in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lowtide.ir import Graph
from lowtide.search.bases import Base, open_base
from lowtide.search.dimensions import dimension_splits
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Split
from lowtide.search.outcome import SearchRecord
from lowtide.search.recompute import Halted, Point
from lowtide.search.splits import inner_splits, large_split, row_splits, single_split
from lowtide.transforms.compaction import compacted
from lowtide.transforms.fission import prepare

__all__ = ["Explorer", "Goal", "Improvement", "Spot"]

BEYOND = 1.3
"""How far above the time of the goal a base is traced: predictions are corrected after measuring."""

NOTE_STATES = 500
"""States between two looks at the best point for the record."""

MOST_USELESS = 3
"""Bases in turn that may fail to better the best point before no further one of the kind is opened."""

NEXT_TO_NOTHING = 1.01
"""A target that is met within this factor of the whole's time leaves nothing to gain from further bases."""

SHARES = (0.97, 0.99, 0.995)
"""Targets of neighbourhood search under a limit on time, as shares of the least peak so far."""


@dataclass(frozen=True)
class Goal:
    """What to look for, in bytes above resident or in seconds; one of the two is set, or none."""

    target_bytes: int | None = None
    bound_s: float | None = None


@dataclass(frozen=True)
class Spot:
    """A point with the base that it belongs to."""

    base: Base
    point: Point


@dataclass(frozen=True)
class Improvement:
    """One step of the record: seconds since the start, states judged, the best point then."""

    elapsed_s: float
    states: int
    peak_bytes: int
    latency_s: float


@dataclass
class Explorer:
    """A running search; `observe` is called now and then with the best spot so far."""

    graph: Graph
    estimator: Estimator
    goal: Goal
    floor_bytes: int
    seed: int
    halted: Callable[[], bool]
    observe: Callable[[int, Spot | None], None]
    bases: list[Base] = field(default_factory=list)
    record: list[Improvement] = field(default_factory=list)
    rounds: int = 4
    stop_reason: str = "frontier traced"

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._noted = 0

    @property
    def states(self) -> int:
        """Judged states so far, over all bases."""
        return sum(base.states for base in self.bases)

    def prepare(self) -> None:
        """Open the first base: order, mirror, and whatever has to be compiled or measured for it."""
        if not self.bases:
            whole = open_base("whole", self.graph, (), self.estimator, self.seed)
            assert whole is not None
            self.bases.append(whole)

    def run(self) -> None:
        """Search until the goal cannot be bettered in the time given."""
        self.prepare()
        self.started = time.monotonic()
        self._trace(self.bases[0])
        self._open_inner()
        self._open_others()
        self._open_compacted()
        self._make_room()
        if self.goal.target_bytes is not None and not self._stopped():
            self._refine(self.goal.target_bytes)
        elif self.goal.bound_s is not None:
            self._squeeze(self._bound_s(), self._stopped)
        self._note()
        if self.halted():
            self.stop_reason = "time"

    def _open_inner(self) -> None:
        """Split the region that holds most of what is alive at the best point's peak, then the next.

        With each split and with recomputation the peak moves elsewhere, so heat is looked at again.
        """
        splits: tuple[Split, ...] = ()
        while len(splits) < self.rounds and not self._stopped():
            best = self.best()
            if best is None or best.base.splits != splits:
                return  # the last one did not help
            search = best.base.level.search
            taken = [node for each in splits for node in each.candidates[0].axes]
            crests = search.crests(search.mask(best.point))
            found = inner_splits(self.graph, self.estimator, crests, taken)
            if not found:
                return
            count = len(splits) + 1
            opened = self._open(f"{count} inner region{'s' * (count > 1)}", (*splits, found[0]))
            if opened is None:
                return
            splits = opened.splits

    def _open_others(self) -> None:
        """The other regions, of each kind until a few in turn have not helped, or nothing is left to gain."""
        for kind in (self._loops, self._rows):
            useless = 0
            for label, splits in kind():
                if self._stopped() or self._satisfied():
                    return
                if useless >= MOST_USELESS:
                    break
                before = self.best()
                self._open(label, splits)
                useless = 0 if before is None or self.best() != before else useless + 1

    def _satisfied(self) -> bool:
        """Whether the target is met for next to no time."""
        best = self.best()
        if self.goal.target_bytes is None or best is None or best.point.peak_bytes > self.goal.target_bytes:
            return False
        return best.point.latency_s <= NEXT_TO_NOTHING * self.unconstrained_s()

    def _loops(self) -> Iterator[tuple[str, tuple[Split, ...]]]:
        """Regions along the batch, or without one along other loops, one base each."""
        large = large_split(self.graph, self.estimator)
        if large is not None:
            yield "batch", (large,)
        else:
            for number, group in enumerate(dimension_splits(self.graph, self.estimator)):
                yield f"dimension {number + 1}", group

    def _rows(self) -> Iterator[tuple[str, tuple[Split, ...]]]:
        """Regions along rows of images."""
        for number, rows in enumerate(row_splits(self.graph, self.estimator)):
            yield f"rows {number + 1}", rows

    def _open_compacted(self) -> None:
        """Copy the slices that outlive the rest of their storage."""
        best = self.best()
        if best is None or best.base.splits or self._stopped() or self._satisfied():
            return
        graph = compacted(self.graph)
        if graph is not self.graph:
            self._open("slices copied", (), graph)

    def _open(self, label: str, splits: tuple[Split, ...], graph: Graph | None = None) -> Base | None:
        source = graph or self.graph
        base = open_base(label, source, splits, self.estimator, self.seed, self._stopped)
        if base is not None:
            self.bases.append(base)
            self._trace(base)
        return base

    def _make_room(self) -> None:
        """Split the operators that are in the way of a lower peak as well, then the next that are."""
        base, singles = self._roomiest(), dict[int, Split]()
        graph = base.level.source
        for _ in range(self.rounds):
            if self._stopped() or self._satisfied():
                return
            wanted = self._crowded(base)
            if not wanted:
                return
            singles.update(wanted)
            label = f"{len(singles)} operator{'s' * (len(singles) > 1)} split"
            kept = [each for each in base.splits if each not in singles.values()]
            opened = self._open(label, (*kept, *singles.values()), graph)
            if opened is None:
                return
            base = opened

    def _crowded(self, base: Base) -> dict[int, Split]:
        """Splits of the operators in the way of the target, else of one well under it: parts that fit
        a cache can be faster as well.
        """
        graph, least = base.level.source, base.level.search.smallest().peak_bytes
        normal = prepare(graph)
        masks = normal is not prepare(graph, masks=False)
        target = self.goal.target_bytes
        for each in (least * 3 // 4,) if target is None else (target, target * 3 // 4):
            found = {node: single_split(normal, node, masks=masks) for node in base.crowded(each)}
            wanted = {node: split for node, split in found.items() if split is not None}
            if wanted:
                return wanted
        return {}

    def _roomiest(self) -> Base:
        """The base to split operators of: the best one, its slices copied where no region is split."""
        best = self._best_base()
        copied = (base for base in self.bases if base.level.source is not self.graph)
        return best if best.splits else next(copied, best)

    def _best_base(self) -> Base:
        best = self.best()
        return self.bases[0] if best is None else best.base

    def _trace(self, base: Base) -> None:
        target = self.goal.target_bytes
        if target is not None:
            base.sweep(max(self.floor_bytes, target * 9 // 10), self._stopped, steps=10)
            return
        base.sweep(self.floor_bytes, self._stopped, slowest_s=BEYOND * self._bound_s())

    def _stopped(self) -> bool:
        if self.states - self._noted >= NOTE_STATES:
            self._note()
        return self.halted()

    def _note(self) -> None:
        """Put the best point on record if it is new, and tell the observer."""
        self._noted, best = self.states, self.best()
        if best is not None:
            now = (best.point.peak_bytes, best.point.latency_s)
            if not self.record or (self.record[-1].peak_bytes, self.record[-1].latency_s) != now:
                elapsed = time.monotonic() - self.started
                self.record.append(Improvement(elapsed, self.states, *now))
        self.observe(self.states, best)

    def _refine(self, target: int) -> None:
        """Rounds of neighbourhood search on the bases within 10 % of the best time."""
        while not self._stopped():
            spots = [spot for base in self.bases if (spot := _cheapest(base, target)) is not None]
            if not spots:
                return
            best = min(spot.point.latency_s for spot in spots)
            near = [spot for spot in spots if spot.point.latency_s <= 1.1 * best]
            if not any(spot.base.level.search.mask(spot.point).any() for spot in near):
                return  # nothing is decided: nothing to lower
            for spot in near:
                spot.base.improve(target, 1.0, self._stopped)

    def _bound_s(self) -> float:
        """The limit on predicted seconds; below what the whole takes nothing can be asked for."""
        if self.goal.bound_s is None:
            return float("inf")
        return max(
            self.goal.bound_s, 1.005 * min(base.level.search.points[0].latency_s for base in self.bases)
        )

    def squeeze(self, bound_s: float, seconds: float) -> None:
        """Look for smaller points within `bound_s` predicted seconds, for `seconds` more."""
        self.goal = Goal(bound_s=bound_s)
        stop = time.monotonic() + seconds
        self._squeeze(self._bound_s(), lambda: time.monotonic() > stop)

    def _squeeze(self, bound_s: float, halted: Halted) -> None:
        """Neighbourhood search at targets a little under the best point's, as long as there is time."""
        failures, share = 0, SHARES[0]
        while failures < 2 * len(SHARES) and not halted():
            best = self.best()
            assert best is not None
            self._note()
            found = best.base.tighten(best.point, share, bound_s, halted)
            failures = 0 if found else failures + 1
            share = SHARES[failures % len(SHARES)]

    def spots(self) -> list[Spot]:
        """The points of all bases, dominated ones left out, by falling peak."""
        found = [Spot(base, point) for base in self.bases for point in base.points()]
        found.sort(key=_seconds)
        kept: list[Spot] = []
        for spot in found:
            if not kept or spot.point.peak_bytes < kept[-1].point.peak_bytes:
                kept.append(spot)
        return kept

    def totals(self, resident_bytes: int) -> tuple[tuple[int, float], ...]:
        """(Peak bytes with the resident ones, seconds) of `spots`."""
        return tuple((s.point.peak_bytes + resident_bytes, s.point.latency_s) for s in self.spots())

    def summary(self, seconds: float, resident_bytes: int) -> SearchRecord:
        """How the search went; peaks with the resident bytes."""
        record = tuple(
            (i.elapsed_s, i.states, i.peak_bytes + resident_bytes, i.latency_s) for i in self.record
        )
        return SearchRecord(seconds, self.states, self.stop_reason, record)

    def best(self) -> Spot | None:
        """The best spot for the goal: fastest within the target, else smallest within the time."""
        if not self.bases:
            return None
        if self.goal.target_bytes is not None:
            within = [spot for base in self.bases if (spot := _cheapest(base, self.goal.target_bytes))]
            if within:
                return min(within, key=_seconds)
            return min((Spot(base, base.level.search.smallest()) for base in self.bases), key=_size)
        bound_s = self._bound_s()
        fits = [
            Spot(base, p)
            for base in self.bases
            if (p := base.level.search.smallest_within(bound_s)) is not None
        ]
        if fits:
            return min(fits, key=_size)
        return min((Spot(base, base.level.search.points[0]) for base in self.bases), key=_seconds)

    def unconstrained_s(self) -> float:
        """Predicted seconds of the whole graph with nothing recomputed."""
        return self.bases[0].level.search.points[0].latency_s


def _size(spot: Spot) -> tuple[int, float]:
    return spot.point.peak_bytes, spot.point.latency_s


def _seconds(spot: Spot) -> tuple[float, int]:
    return spot.point.latency_s, spot.point.peak_bytes


def _cheapest(base: Base, target: int) -> Spot | None:
    point = base.level.search.cheapest(target)
    return None if point is None else Spot(base, point)
