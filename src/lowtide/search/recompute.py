"""Choosing what to recompute and how finely to split: descent on the excess over a target, then repair.

Problem.  Given a mirror and a target in bytes, find decisions with peak at most the target and little
added time; over a falling series of targets this traces the frontier.

Method.  A *decision* is a bit: a storage that is computed again for its late readers, or an option of a
region's menu (so many parts, with so much recomputed inside; the first option has no bit).  All bits are
judged together, by one evaluation.  *Excess* is the sum over steps of the bytes above the target: unlike
the peak it falls with every useful decision, so plateaus of equal peaks do not stop the descent.  A storage
that is alive at an excess step only for late readers is a candidate: alone (its sources are kept alive),
with the chain that leads to it (its sources are recomputed too), and with its copies in the other layers of a
repeated model, which are decided together first and told apart when members that are not needed are
dropped.  Modules give larger segments.  Candidates are ranked by an estimate (excess bytes covered per
second), the best few are judged exactly.  A seeded destroy-and-refill loop (large-neighbourhood search)
lowers the added time.

Invariants.  Deterministic for a given seed and number of states; every returned Point was judged by
`Mirror.evaluate`.  Not done here: order, placement, what is on a menu (`levels.py`).
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from lowtide.search.mirror import Bools, Evaluation, Floats, Ints, Mirror

__all__ = ["Menu", "Option", "Point", "Recomputation", "RecomputeOptions"]

Halted = Callable[[], bool]


@dataclass(frozen=True)
class RecomputeOptions:
    """One field an idea.

    finalists: candidates that are judged exactly at each descent step.
    segments: offer whole modules as candidates.
    copies: offer a storage together with its copies in the other layers.
    destroy: share of the decisions that one neighbourhood step removes.
    """

    finalists: int = 6
    segments: bool = True
    copies: bool = True
    destroy: float = 0.15


class Option(Protocol):
    """One way to run a split region."""

    @property
    def workspace_bytes(self) -> int:
        """What its node needs while it runs, beside inputs and outputs."""

    @property
    def seconds(self) -> float:
        """What its node takes."""


@dataclass(frozen=True)
class Menu:
    """The options of one node (a position in the mirror), the fastest first, then smaller and slower."""

    node: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Point:
    """Decisions with their predicted peak (bytes above resident) and time (seconds).

    `options` has one entry per menu.
    """

    peak_bytes: int
    latency_s: float
    chosen: frozenset[int]
    options: tuple[Any, ...] = ()


TOGETHER = 1.25
"""How much worse a decision for all copies may score than one for a single storage."""


@dataclass
class Recomputation:
    """The running search over one mirror; `points` is its non-dominated archive, by rising time."""

    mirror: Mirror
    allowed: Bools
    segments: tuple[Bools, ...] = ()
    seed: int = 0
    options: RecomputeOptions = field(default_factory=RecomputeOptions)
    menus: tuple[Menu, ...] = ()
    copies: tuple[Bools, ...] = ()
    states: int = 0
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.size = self.allowed.size
        self._workspace, self._cost = self.mirror.workspace.copy(), self.mirror.cost.copy()
        bits: list[tuple[int, int]] = []
        for number, menu in enumerate(self.menus):
            self._workspace[menu.node] = menu.options[0].workspace_bytes
            self._cost[menu.node] = menu.options[0].seconds
            bits += [(number, k) for k in range(1, len(menu.options))]
        self._bits = bits
        self._latencies: list[float] = []
        self._copies_of = np.full(self.size, -1, np.int64)
        for group, members in enumerate(self.copies):
            self._copies_of[members] = group
        self.judge(self.nothing())

    def nothing(self) -> Bools:
        """No decision: nothing is recomputed, every region runs by its first option."""
        return np.zeros(self.size + len(self._bits), np.bool_)

    # -- judging ---------------------------------------------------------------------------------

    def evaluate(self, chosen: Bools) -> Evaluation:
        """What the decisions give, exactly."""
        if not self.menus:
            return self.mirror.evaluate(chosen)
        workspace, cost = self._prices(chosen)
        return self.mirror.evaluate(chosen[: self.size], workspace, cost)

    def crests(self, chosen: Bools, share: float = 0.9) -> list[frozenset[int]]:
        """The storages (graph ids) that are alive, as originals or as copies, where memory is near its peak.

        One set per stretch of steps above `share` of the peak, at its highest step.
        """
        now = self.evaluate(chosen)
        high = np.flatnonzero(now.live_bytes >= share * now.peak_bytes)
        stretches = np.split(high, np.flatnonzero(np.diff(high) > 1) + 1)
        tops = [int(stretch[now.live_bytes[stretch].argmax()]) for stretch in stretches if stretch.size]
        spans = self._spans(chosen, now)
        ids = self.mirror.storage_ids
        return [frozenset(ids[s] for s, start, stop in spans if start <= top <= stop) for top in tops]

    def _spans(self, chosen: Bools, now: Evaluation) -> list[tuple[int, int, int]]:
        """(storage, first step, last step) of every original and every copy."""
        mirror = self.mirror
        spans: dict[tuple[int, bool], tuple[int, int]] = {}
        for k, node in enumerate(now.steps):
            copy = bool(now.is_copy[k])
            for storage in mirror.made[mirror.made_start[node] : mirror.made_start[node + 1]]:
                spans[int(storage), copy] = (k, len(now.steps) if mirror.kept[storage] else k)
            for storage in mirror.reads_of(int(node)):
                key = int(storage), bool(chosen[storage]) and (copy or bool(mirror.late[node]))
                if key in spans:
                    spans[key] = (spans[key][0], max(k, spans[key][1]))
        return [(storage, *span) for (storage, _), span in spans.items()]

    def _prices(self, chosen: Bools) -> tuple[Ints, Floats]:
        picked = np.flatnonzero(chosen[self.size :])
        if not picked.size:
            return self._workspace, self._cost
        workspace, cost = self._workspace.copy(), self._cost.copy()
        for bit in picked:
            number, k = self._bits[bit]
            menu = self.menus[number]
            workspace[menu.node] = menu.options[k].workspace_bytes
            cost[menu.node] = menu.options[k].seconds
        return workspace, cost

    def judge(self, chosen: Bools) -> Evaluation:
        """Evaluate decisions and remember them if nothing known dominates them."""
        result = self.evaluate(chosen)
        self.states += 1
        self._remember(chosen, result.peak_bytes, result.latency_s)
        return result

    def _remember(self, chosen: Bools, peak: int, latency: float) -> None:
        at = bisect_right(self._latencies, latency)
        if at and self.points[at - 1].peak_bytes <= peak:
            return
        start = at - 1 if at and self._latencies[at - 1] == latency else at
        stop = at
        while stop < len(self.points) and self.points[stop].peak_bytes >= peak:
            stop += 1
        ids = frozenset(self.mirror.storage_ids[i] for i in np.flatnonzero(chosen[: self.size]))
        self.points[start:stop] = [Point(peak, latency, ids, self._picked(chosen))]
        self._latencies[start:stop] = [latency]

    def _picked(self, chosen: Bools) -> tuple[Any, ...]:
        picked: list[Any] = [menu.options[0] for menu in self.menus]
        for bit in np.flatnonzero(chosen[self.size :]):
            number, k = self._bits[bit]
            picked[number] = self.menus[number].options[k]
        return tuple(picked)

    def mask(self, point: Point) -> Bools:
        """The decisions of a point as bits."""
        result = self.nothing()
        result[: self.size] = [storage in point.chosen for storage in self.mirror.storage_ids]
        for bit, (number, k) in enumerate(self._bits):
            result[self.size + bit] = point.options[number] is self.menus[number].options[k]
        return result

    # -- candidates ------------------------------------------------------------------------------

    def ranked(self, chosen: Bools, now: Evaluation, target: int) -> list[int]:
        """Storages worth recomputing, best estimate first."""
        over = np.maximum(now.live_bytes - target, 0)
        covered = np.concatenate([[0], np.cumsum(over > 0)])
        open_ = self.allowed & ~chosen[: self.size] & (now.first_late >= 0)
        index = np.flatnonzero(open_)
        until = now.first_late[index]
        since = np.minimum(np.maximum(now.last_early[index] + 1, 0), until)
        gain = (covered[until] - covered[since]) * self.mirror.nbytes[index]
        seconds = self._cost[self.mirror.owner[index]] + 1e-6
        score = np.where(gain > 0, gain / seconds, 0.0)
        best = np.argsort(-score, kind="stable")
        return [int(index[i]) for i in best if gain[i] > 0]

    def chain(self, seeds: Sequence[int], chosen: Bools, now: Evaluation) -> Bools:
        """`seeds` and every source of them that would otherwise have to live longer than it does."""
        result = chosen.copy()
        result[list(seeds)] = True
        pending = [(seed, int(now.first_late[seed])) for seed in seeds]
        while pending:
            storage, until = pending.pop()
            for source in self.mirror.reads_of(int(self.mirror.owner[storage])):
                # The first late read stands for the last: a later one can only help.
                read = max(now.first_late[source], now.last_early[source])
                alive = now.first_late[source] >= 0 and read >= until
                if self.allowed[source] and not result[source] and not alive:
                    result[source] = True
                    pending.append((int(source), until))
        return result

    def proposals(self, chosen: Bools, now: Evaluation, target: int) -> Iterator[list[Bools]]:
        """Decisions one edit away from `chosen`, in batches, the most promising first.

        Smaller options of regions that are in the way, single storages, their copies, and the chains that
        lead to them by rank, in the beginning whole modules too; at last everything that could be kept
        instead, for a chain may be shorter with one more link kept.
        """
        ranked = self._distinct(self.ranked(chosen, now, target), chosen)
        segments = [self._with(chosen, each) for each in self.segments] if self.options.segments else []
        for first in range(0, max(len(ranked), 1), self.options.finalists):
            batch = [] if first else self._tightened(chosen, now, target)
            batch += segments if not first and not chosen.any() else []
            for seeds in ranked[first : first + self.options.finalists]:
                batch += self._seeded(seeds, chosen, now)
            yield batch
        yield [each for each in segments if chosen.any() and (each != chosen).any()]
        yield [self._without(chosen, int(member)) for member in np.flatnonzero(chosen)]

    def _distinct(self, ranked: Sequence[int], chosen: Bools) -> list[list[int]]:
        """The best storage of each group of copies, with the others of its group that are still open."""
        seen: set[int] = set()
        found: list[list[int]] = []
        for storage in ranked:
            group = int(self._copies_of[storage])
            if group < 0 or not self.options.copies:
                found.append([storage])
            elif group not in seen:
                seen.add(group)
                others = np.flatnonzero(self.copies[group] & self.allowed & ~chosen[: self.size])
                found.append([storage, *(int(each) for each in others if each != storage)])
        return found

    def _seeded(self, seeds: list[int], chosen: Bools, now: Evaluation) -> list[Bools]:
        result = []
        late = [seed for seed in seeds if now.first_late[seed] >= 0]
        for some in ([seeds[0]], late) if len(late) > 1 else ([seeds[0]],):
            alone = chosen.copy()
            alone[some] = True
            chain = self.chain(some, chosen, now)
            result += [alone, chain] if chain.sum() > alone.sum() else [alone]
        return result

    def _tightened(self, chosen: Bools, now: Evaluation, target: int) -> list[Bools]:
        """Smaller options of the regions that run above the target: the next, and ever further ones."""
        result = []
        over = {int(now.steps[k]) for k in np.flatnonzero(now.live_bytes > target)} if self.menus else ()
        for number, menu in enumerate(self.menus):
            if menu.node in over:
                at, step = self._option(number, chosen), 1
                while at + step < len(menu.options):
                    result.append(self._with_option(chosen, number, at + step))
                    step *= 2
                if at + 1 < len(menu.options):
                    result.append(self._with_option(chosen, number, len(menu.options) - 1))
        return result

    def _option(self, number: int, chosen: Bools) -> int:
        """The option of menu `number` that is chosen."""
        for bit in np.flatnonzero(chosen[self.size :]):
            if self._bits[bit][0] == number:
                return self._bits[bit][1]
        return 0

    def _with_option(self, chosen: Bools, number: int, option: int) -> Bools:
        result = chosen.copy()
        for bit, (menu, k) in enumerate(self._bits):
            if menu == number:
                result[self.size + bit] = k == option
        return result

    def _with(self, chosen: Bools, storages: Bools) -> Bools:
        result = chosen.copy()
        result[: self.size] |= storages
        return result

    @staticmethod
    def _without(chosen: Bools, member: int) -> Bools:
        result = chosen.copy()
        result[member] = False
        return result

    # -- descent ---------------------------------------------------------------------------------

    def descend(self, chosen: Bools, target: int, halted: Halted) -> tuple[Bools, Evaluation]:
        """Decide more until the peak is at most `target`, or nothing helps any more."""
        now = self.judge(chosen)
        while now.peak_bytes > target and not halted():
            for batch in self.proposals(chosen, now, target):
                found = self._best_of(batch, chosen, now, target)
                if found is not None or halted():
                    break
            if found is None:
                break
            chosen, now = found
        return chosen, now

    def _best_of(
        self, batch: list[Bools], chosen: Bools, now: Evaluation, target: int
    ) -> tuple[Bools, Evaluation] | None:
        """The proposal that saves the most excess per second, if any saves some."""
        excess = _excess(now, target)
        best: tuple[float, Bools, Evaluation] | None = None
        for proposal in batch:
            after = self.judge(proposal)
            saved = excess - _excess(after, target)
            if saved <= 0:
                continue
            score = saved / max(after.latency_s - now.latency_s, 1e-7)
            score *= TOGETHER if saved < excess and proposal.sum() > chosen.sum() + 1 else 1.0
            if best is None or score > best[0]:
                best = (score, proposal, after)
        return None if best is None else (best[1], best[2])

    def prune(self, chosen: Bools, target: int, halted: Halted) -> tuple[Bools, Evaluation]:
        """Drop decisions that the target does not need: regions by faster options, then the costliest."""
        now = self.judge(chosen)
        chosen, now = self._loosen(chosen, now, target)
        members = np.flatnonzero(chosen[: self.size])
        for storage in members[np.argsort(-self._cost[self.mirror.owner[members]], kind="stable")]:
            if halted():
                break
            without = self._without(chosen, int(storage))
            after = self.judge(without)
            if after.peak_bytes <= target and after.latency_s <= now.latency_s:
                chosen, now = without, after
        return chosen, now

    def _loosen(self, chosen: Bools, now: Evaluation, target: int) -> tuple[Bools, Evaluation]:
        for number in range(len(self.menus)):
            for option in range(self._option(number, chosen)):
                faster = self._with_option(chosen, number, option)
                after = self.judge(faster)
                if after.peak_bytes <= target and after.latency_s <= now.latency_s:
                    chosen, now = faster, after
                    break
        return chosen, now

    def reach(self, target: int, start: Bools, halted: Halted) -> tuple[Bools, Evaluation]:
        """Descend to `target` and prune."""
        chosen, now = self.descend(start, target, halted)
        if now.peak_bytes <= target:
            chosen, now = self.prune(chosen, target, halted)
        return chosen, now

    def improve(self, target: int, seconds: float, halted: Halted, max_rounds: int = 10**9) -> None:
        """Destroy-and-refill around the cheapest point within `target` until time is out."""
        best = self.cheapest(target)
        if best is None:
            return
        chosen, latency = self.mask(best), best.latency_s
        if not chosen.any():
            return
        deadline = time.monotonic() + seconds
        for _ in range(max_rounds):
            if halted() or time.monotonic() > deadline:
                return
            trial, now = self.reach(target, self._destroyed(chosen), halted)
            if now.peak_bytes <= target and now.latency_s <= latency:
                chosen, latency = trial, now.latency_s

    def _destroyed(self, chosen: Bools) -> Bools:
        members = np.flatnonzero(chosen)
        if not members.size:
            return chosen
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
        return next((point for point in self.points if point.peak_bytes <= target), None)

    def smallest(self) -> Point:
        """The known point with the least peak."""
        return self.points[-1]

    def smallest_within(self, bound_s: float) -> Point | None:
        """The known point with the least peak of those that take at most `bound_s`."""
        at = bisect_right(self._latencies, bound_s)
        return self.points[at - 1] if at else None

    def sweep(
        self, floor_bytes: int, halted: Halted, steps: int = 24, slowest_s: float = float("inf")
    ) -> None:
        """Trace the frontier: descend through geometrically falling targets, each from the last.

        It ends where a target takes more than `slowest_s`, and at the second that is not reached.
        """
        top = self.judge(self.nothing()).peak_bytes
        chosen, failures = self.nothing(), 0
        for target in np.geomspace(max(top, 1), max(floor_bytes, 1), steps)[1:]:
            if halted() or failures > 1:
                return
            chosen, now = self.reach(int(target), chosen, halted)
            if now.peak_bytes > target:  # once more from nothing: early choices may block
                fresh, after = self.reach(int(target), self.nothing(), halted)
                if after.peak_bytes < now.peak_bytes:
                    chosen, now = fresh, after
            failures += now.peak_bytes > target
            if now.latency_s > slowest_s:
                return


def _excess(now: Evaluation, target: int) -> float:
    return float(np.maximum(now.live_bytes - target, 0).sum())
