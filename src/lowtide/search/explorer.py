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
from lowtide.search.recompute import Point, Recomputation
from lowtide.search.splits import inner_splits, large_split, row_splits, single_split
from lowtide.transforms.fission import prepare

__all__ = ["Explorer", "Goal", "Improvement", "Spot"]

BEYOND = 1.3
"""How far above the time of the goal a base is traced: predictions are corrected after measuring."""

SHARES = (0.97, 0.99, 0.995)
"""Targets of neighbourhood search under a limit on time, as shares of the least peak so far."""


@dataclass(frozen=True)
class Goal:
    """What to look for, in bytes above resident and seconds; one of the two is set, or none."""

    target_bytes: int | None = None
    ratio: float | None = None


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
        for label, splits in self._regions():
            if self._stopped():
                break
            self._open(label, splits)
        self._make_room()
        if self.goal.target_bytes is not None and not self._stopped():
            self._refine(self.goal.target_bytes)
        elif self.goal.ratio is not None:
            self._squeeze(self.goal.ratio)
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
            alive = search.alive(search.mask(best.point))
            found = inner_splits(self.graph, self.estimator, alive, taken)
            if not found:
                return
            count = len(splits) + 1
            opened = self._open(f"{count} inner region{'s' * (count > 1)}", (*splits, found[0]))
            if opened is None:
                return
            splits = opened.splits

    def _regions(self) -> Iterator[tuple[str, tuple[Split, ...]]]:
        """What else to split, one base each, the most promising first."""
        large = large_split(self.graph, self.estimator)
        if large is not None:
            yield "batch", (large,)
        else:
            for number, group in enumerate(dimension_splits(self.graph, self.estimator)):
                yield f"dimension {number + 1}", group
        for number, rows in enumerate(row_splits(self.graph, self.estimator)):
            yield f"rows {number + 1}", rows

    def _open(self, label: str, splits: tuple[Split, ...]) -> Base | None:
        base = open_base(label, self.graph, splits, self.estimator, self.seed, self._stopped)
        if base is not None:
            self.bases.append(base)
            self._trace(base)
        return base

    def _make_room(self) -> None:
        """Split the operators that are in the way of a lower peak as well, then the next that are."""
        normal = prepare(self.graph)
        masks = normal is not prepare(self.graph, masks=False)
        base, singles = self._best_base(), dict[int, Split]()
        for _ in range(self.rounds):
            if self._stopped():
                return
            target = self.goal.target_bytes or base.level.search.smallest().peak_bytes * 3 // 4
            found = {node: single_split(normal, node, masks=masks) for node in base.crowded(target)}
            wanted = {node: split for node, split in found.items() if split is not None}
            if not wanted:
                return
            singles.update(wanted)
            label = f"{len(singles)} operator{'s' * (len(singles) > 1)} split"
            kept = [each for each in base.splits if each not in singles.values()]
            opened = self._open(label, (*kept, *singles.values()))
            if opened is None:
                return
            base = opened

    def _best_base(self) -> Base:
        best = self.best()
        return self.bases[0] if best is None else best.base

    def _trace(self, base: Base) -> None:
        target = self.goal.target_bytes
        if target is not None:
            base.sweep(max(self.floor_bytes, target * 9 // 10), self._stopped, steps=10)
            return
        slowest_s = self.unconstrained_s() * BEYOND * (self.goal.ratio or float("inf"))
        base.sweep(self.floor_bytes, self._stopped, slowest_s=slowest_s)

    def _stopped(self) -> bool:
        best = self.best()
        if best is not None:
            now = (best.point.peak_bytes, best.point.latency_s)
            if not self.record or (self.record[-1].peak_bytes, self.record[-1].latency_s) != now:
                elapsed = time.monotonic() - self.started
                self.record.append(Improvement(elapsed, self.states, *now))
        self.observe(self.states, best)
        return self.halted()

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

    def _squeeze(self, ratio: float) -> None:
        """Neighbourhood search at targets a little under the best point's, as long as there is time."""
        failures, share = 0, SHARES[0]
        while failures < 2 * len(SHARES) and not self._stopped():
            best = self.best()
            assert best is not None
            target, bound = int(best.point.peak_bytes * share), ratio * self.unconstrained_s()
            search = best.base.level.search
            search.reach(target, search.mask(best.point), self._stopped)
            search.improve(target, 1.0, lambda: self._stopped() or _meets(search, target, bound), 30)
            failures = 0 if _meets(search, target, bound) else failures + 1
            share = SHARES[failures % len(SHARES)]

    def spots(self) -> list[Spot]:
        """The points of all bases, dominated ones left out, by falling peak."""
        found = [Spot(base, point) for base in self.bases for point in base.points()]
        found.sort(key=lambda spot: (spot.point.latency_s, spot.point.peak_bytes))
        kept: list[Spot] = []
        for spot in found:
            if not kept or spot.point.peak_bytes < kept[-1].point.peak_bytes:
                kept.append(spot)
        return kept

    def best(self) -> Spot | None:
        """The best spot for the goal: fastest within the target, else smallest within the time."""
        spots = self.spots()
        if not spots:
            return None
        if self.goal.target_bytes is not None:
            within = [spot for spot in spots if spot.point.peak_bytes <= self.goal.target_bytes]
            return min(within, key=lambda s: s.point.latency_s) if within else spots[-1]
        bound = self.unconstrained_s() * (self.goal.ratio or float("inf"))
        within = [spot for spot in spots if spot.point.latency_s <= bound]
        return min(within, key=lambda s: s.point.peak_bytes) if within else spots[0]

    def unconstrained_s(self) -> float:
        """Predicted seconds of the whole graph with nothing recomputed."""
        return self.bases[0].level.search.points[0].latency_s


def _meets(search: Recomputation, target: int, bound_s: float) -> bool:
    point = search.cheapest(target)
    return point is not None and point.latency_s <= bound_s


def _cheapest(base: Base, target: int) -> Spot | None:
    point = base.level.search.cheapest(target)
    return None if point is None else Spot(base, point)
