"""The search itself: open bases, trace each, then spend what is left where it pays.

Problem.  One run has to yield the whole frontier, find the best point for one limit, stop at any time,
and say why it stopped.

Method.  The whole graph first, so that there is an answer at once; then the splits, coarse to fine, as
long as time allows.  Each base is traced by falling targets.  With a limit, the bases that are nearest
to the best known point take turns at large-neighbourhood search.

Invariants.  `points` only ever gets better.  Deterministic for a seed as long as no time limit cuts in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lowtide.ir import Fission, Graph, Node
from lowtide.search.bases import Base, BasePoint, large_splits, nested_splits, open_base, single_split
from lowtide.search.estimator import Estimator
from lowtide.transforms.fission import FissionCandidate, prepare

__all__ = ["Explorer", "Goal", "Improvement", "Spot"]


@dataclass(frozen=True)
class Goal:
    """What to look for, in bytes above resident and seconds; one of the two is set, or none."""

    target_bytes: int | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Spot:
    """A point with the base that it belongs to."""

    base: Base
    point: BasePoint


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
    rounds: int = 6
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
        for candidate in large_splits(self.graph):
            if not self._stopped():
                self._open(f"{candidate.label} / {len(candidate.sizes)}", (candidate,))
        self._make_room()
        for number, candidate in enumerate(nested_splits(self.graph)):
            if not self._stopped():
                self._open(f"inner region {number + 1} / {len(candidate.sizes)}", (candidate,))
        if self.goal.target_bytes is not None and not self._stopped():
            self._refine(self.goal.target_bytes)
        if self.halted():
            self.stop_reason = "time"

    def _open(self, label: str, candidates: tuple[FissionCandidate, ...]) -> Base | None:
        base = open_base(label, self.graph, candidates, self.estimator, self.seed)
        if base is not None:
            self.bases.append(base)
            self._trace(base)
        return base

    def _make_room(self) -> None:
        """Split the operators that are in the way of a lower peak, then the next that are, and so on."""
        normal = prepare(self.graph)
        base, splits = self.bases[0], dict[int, FissionCandidate]()
        for _ in range(self.rounds):
            target = self.goal.target_bytes or base.outer.search.smallest().peak_bytes * 3 // 4
            wanted = self._in_the_way(normal, base, target, splits)
            if not wanted or self._stopped():
                return
            splits.update(wanted)
            count = len(splits)
            opened = self._open(f"{count} operator{'s' * (count > 1)} split", tuple(splits.values()))
            if opened is None:
                return
            base = opened

    def _in_the_way(
        self, normal: Graph, base: Base, target: int, splits: dict[int, FissionCandidate]
    ) -> dict[int, FissionCandidate]:
        """Splits of operators that run while the target is exceeded: in 4, then in twice as many."""
        sources = {fission.id: node for node, fission in zip(splits, _new_nodes(base, splits), strict=True)}
        found: dict[int, FissionCandidate] = {}
        for crowded in base.crowded(target):
            node = sources.get(crowded, crowded)
            count = 2 * len(splits[node].sizes) if node in splits else 4
            candidate = single_split(normal, node, count, normal is not prepare(self.graph, masks=False))
            if candidate is not None:
                found[node] = candidate
        return found

    def _trace(self, base: Base) -> None:
        target = self.goal.target_bytes
        floor = self.floor_bytes if target is None else max(self.floor_bytes, target * 9 // 10)
        base.sweep(floor, self._stopped)

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
            if not any(spot.point.inner or spot.point.outer for spot in near):
                return  # nothing is recomputed: nothing to lower
            for spot in near:
                spot.base.improve(target, 1.0, self._stopped)

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
        return min(point.latency_s for point in self.bases[0].points())


def _new_nodes(base: Base, splits: dict[int, FissionCandidate]) -> list[Node]:
    """The Fission nodes of `base` in the order of `splits` (single operators, applied in that order)."""
    if not splits:
        return []
    fissions = [node for node in base.outer.graph.nodes if isinstance(node.op, Fission)]
    by_inside = {next(n.id for n in node.op.bodies[0].nodes if n.id in splits): node for node in fissions}  # type: ignore[union-attr]
    return [by_inside[node] for node in splits]


def _cheapest(base: Base, target: int) -> Spot | None:
    within = [Spot(base, point) for point in base.points() if point.peak_bytes <= target]
    return min(within, key=lambda s: (s.point.latency_s, s.point.peak_bytes), default=None)
