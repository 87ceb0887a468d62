"""Choosing what to recompute: descent on the excess over a target, then repair.

Problem.  Given a mirror and a target in bytes, find a set R of storages with peak at most the target
and little added time; over a falling series of targets this traces the remat frontier.

Method.  *Excess* is the sum over steps of the bytes above the target: unlike the peak it falls with
every useful removal, so plateaus of equal peaks do not stop the descent.  A storage that is alive at
an excess step only for late readers is a candidate, alone (its sources are kept alive) or with the
chain that leads to it (its sources are recomputed too); modules give larger segments.  Candidates are
ranked by an estimate (excess bytes covered per second), the best few are judged exactly.  Once the
target is met, members that are no longer needed are dropped, and a seeded destroy-and-refill loop
(large-neighbourhood search) lowers the added time.

Invariants.  Deterministic for a given seed and number of states; every returned Point was judged by
`Mirror.evaluate`.  Not done here: order, placement, fission.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lowtide.search.mirror import Bools, Evaluation, Mirror

__all__ = ["Point", "Recomputation", "RecomputeOptions"]


@dataclass(frozen=True)
class RecomputeOptions:
    """One field an idea.

    finalists: candidates that are judged exactly at each descent step.
    segments: offer whole modules as candidates.
    destroy: share of R that one neighbourhood step removes.
    """

    finalists: int = 6
    segments: bool = True
    destroy: float = 0.15


@dataclass(frozen=True)
class Point:
    """A recomputation set with its predicted peak (bytes above resident) and time (seconds)."""

    peak_bytes: int
    latency_s: float
    chosen: frozenset[int]


@dataclass
class Recomputation:
    """The running search over one mirror; `points` is its non-dominated archive."""

    mirror: Mirror
    allowed: Bools
    segments: tuple[Bools, ...] = ()
    seed: int = 0
    options: RecomputeOptions = field(default_factory=RecomputeOptions)
    states: int = 0
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.judge(np.zeros(self.allowed.size, np.bool_))

    # -- judging ---------------------------------------------------------------------------------

    def judge(self, chosen: Bools) -> Evaluation:
        """Evaluate a set and remember it if nothing known dominates it."""
        result = self.mirror.evaluate(chosen)
        self.states += 1
        peak, latency = result.peak_bytes, result.latency_s
        if not any(p.peak_bytes <= peak and p.latency_s <= latency for p in self.points):
            survivors = [p for p in self.points if p.peak_bytes < peak or p.latency_s < latency]
            ids = frozenset(self.mirror.storage_ids[i] for i in np.flatnonzero(chosen))
            self.points = [*survivors, Point(peak, latency, ids)]
        return result

    def mask(self, point: Point) -> Bools:
        """The set of a point as an array over the mirror's storages."""
        return np.array([storage in point.chosen for storage in self.mirror.storage_ids], np.bool_)

    # -- candidates ------------------------------------------------------------------------------

    def ranked(self, chosen: Bools, now: Evaluation, target: int) -> list[int]:
        """Storages worth recomputing, best estimate first."""
        over = np.maximum(now.live_bytes - target, 0)
        covered = np.concatenate([[0], np.cumsum(over > 0)])
        open_ = self.allowed & ~chosen & (now.first_late >= 0)
        index = np.flatnonzero(open_)
        until = now.first_late[index]
        since = np.minimum(np.maximum(now.last_early[index] + 1, 0), until)
        gain = (covered[until] - covered[since]) * self.mirror.nbytes[index]
        seconds = self.mirror.cost[self.mirror.owner[index]] + 1e-6
        score = np.where(gain > 0, gain / seconds, 0.0)
        best = np.argsort(-score, kind="stable")
        return [int(index[i]) for i in best if gain[i] > 0]

    def chain(self, storage: int, chosen: Bools, now: Evaluation) -> Bools:
        """`storage` and every source of it that would otherwise have to live longer than it does."""
        result = chosen.copy()
        result[storage] = True
        until = int(now.first_late[storage])
        pending = [storage]
        while pending:
            for source in self.mirror.reads_of(int(self.mirror.owner[pending.pop()])):
                alive = now.first_late[source] >= 0 and self._last_read(int(source), now) >= until
                if self.allowed[source] and not result[source] and not alive:
                    result[source] = True
                    pending.append(int(source))
        return result

    def _last_read(self, storage: int, now: Evaluation) -> int:
        # A conservative stand-in: the first late read is known, a later one can only help.
        return int(max(now.first_late[storage], now.last_early[storage]))

    def proposals(self, chosen: Bools, now: Evaluation, target: int) -> Iterator[list[Bools]]:
        """Sets one edit away from `chosen`, in batches, the most promising first.

        Single storages and the chains that lead to them by rank, in the beginning whole modules too; at last
        everything that could be kept instead, for a chain may be shorter with one more link kept.
        """
        ranked = self.ranked(chosen, now, target)
        segments = [chosen | each for each in self.segments] if self.options.segments else []
        for first in range(0, max(len(ranked), 1), self.options.finalists):
            batch = segments if not first and not chosen.any() else []
            for storage in ranked[first : first + self.options.finalists]:
                alone = chosen.copy()
                alone[storage] = True
                chain = self.chain(storage, chosen, now)
                batch = [*batch, alone, *([chain] if chain.sum() > alone.sum() else [])]
            yield batch
        yield [each for each in segments if chosen.any() and (each != chosen).any()]
        yield [self._without(chosen, int(member)) for member in np.flatnonzero(chosen)]

    @staticmethod
    def _without(chosen: Bools, member: int) -> Bools:
        result = chosen.copy()
        result[member] = False
        return result

    # -- descent ---------------------------------------------------------------------------------

    def descend(self, chosen: Bools, target: int, halted: Callable[[], bool]) -> tuple[Bools, Evaluation]:
        """Add recomputation until the peak is at most `target`, or nothing helps any more."""
        now = self.judge(chosen)
        while now.peak_bytes > target and not halted():
            for batch in self.proposals(chosen, now, target):
                found = self._best_of(batch, now, target)
                if found is not None or halted():
                    break
            if found is None:
                break
            chosen, now = found
        return chosen, now

    def _best_of(self, batch: list[Bools], now: Evaluation, target: int) -> tuple[Bools, Evaluation] | None:
        """The proposal that saves the most excess per second, if any saves some."""
        excess = _excess(now, target)
        best: tuple[float, Bools, Evaluation] | None = None
        for proposal in batch:
            after = self.judge(proposal)
            saved = excess - _excess(after, target)
            if saved <= 0:
                continue
            score = saved / max(after.latency_s - now.latency_s, 1e-7)
            if best is None or score > best[0]:
                best = (score, proposal, after)
        return None if best is None else (best[1], best[2])

    def prune(self, chosen: Bools, target: int, halted: Callable[[], bool]) -> tuple[Bools, Evaluation]:
        """Drop members that the target does not need, the costliest first."""
        now = self.judge(chosen)
        members = np.flatnonzero(chosen)
        for storage in members[np.argsort(-self.mirror.cost[self.mirror.owner[members]], kind="stable")]:
            if halted():
                break
            without = self._without(chosen, int(storage))
            after = self.judge(without)
            if after.peak_bytes <= target and after.latency_s <= now.latency_s:
                chosen, now = without, after
        return chosen, now

    def reach(self, target: int, start: Bools, halted: Callable[[], bool]) -> tuple[Bools, Evaluation]:
        """Descend to `target` and prune."""
        chosen, now = self.descend(start, target, halted)
        if now.peak_bytes <= target:
            chosen, now = self.prune(chosen, target, halted)
        return chosen, now

    def improve(
        self, target: int, seconds: float, halted: Callable[[], bool], max_rounds: int = 10**9
    ) -> None:
        """Destroy-and-refill around the cheapest point within `target` until time is out."""
        best = self.cheapest(target)
        if best is None or not best.chosen:
            return
        chosen, latency = self.mask(best), best.latency_s
        deadline = time.monotonic() + seconds
        for _ in range(max_rounds):
            if halted() or time.monotonic() > deadline:
                return
            trial, now = self.reach(target, self._destroyed(chosen), halted)
            if now.peak_bytes <= target and now.latency_s <= latency:
                chosen, latency = trial, now.latency_s

    def _destroyed(self, chosen: Bools) -> Bools:
        members = np.flatnonzero(chosen)
        count = max(1, int(self.options.destroy * members.size))
        removed = chosen.copy()
        if self.random.random() < 0.5:  # a stretch of neighbours, or scattered members
            first = int(self.random.integers(members.size))
            removed[members[first : first + count]] = False
        else:
            removed[self.random.choice(members, count, replace=False)] = False
        return removed

    def cheapest(self, target: int) -> Point | None:
        """The fastest known point within `target` bytes."""
        within = [point for point in self.points if point.peak_bytes <= target]
        return min(within, key=lambda point: (point.latency_s, point.peak_bytes), default=None)

    def smallest(self) -> Point:
        """The known point with the least peak."""
        return min(self.points, key=lambda point: (point.peak_bytes, point.latency_s))

    def sweep(self, floor_bytes: int, halted: Callable[[], bool], steps: int = 24) -> None:
        """Trace the frontier: descend through geometrically falling targets, each from the last."""
        top = self.judge(np.zeros(self.allowed.size, np.bool_)).peak_bytes
        chosen = np.zeros(self.allowed.size, np.bool_)
        for target in np.geomspace(max(top, 1), max(floor_bytes, 1), steps)[1:]:
            if halted():
                return
            chosen, now = self.reach(int(target), chosen, halted)
            if now.peak_bytes > target:  # once more from nothing: early choices may block
                fresh, after = self.reach(int(target), np.zeros(self.allowed.size, np.bool_), halted)
                if after.peak_bytes < now.peak_bytes:
                    chosen = fresh


def _excess(now: Evaluation, target: int) -> float:
    return float(np.maximum(now.live_bytes - target, 0).sum())
