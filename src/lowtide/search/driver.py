"""From a workload and a limit to a verified, measured plan.

Problem.  A limit is a promise: it is met when run, to the byte, or refused with the floor.

Method.  Capture; measure eager; order and profile the graph; trace the frontier on mirrors; then walk
the points that should meet the limit, fastest first: build the plan (placement included), compare it
with eager, measure it, and return the first one that keeps the promise.  What was measured corrects
the estimator's scale for the next point.  An interrupt ends the search early, not the promise: the
best point found so far still has to pass.

Not done here: how points are found (`recompute.py`, `levels.py`), how plans run (`lowtide.run`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowtide.capture import Program, capture
from lowtide.cost.devices import device_named
from lowtide.errors import Infeasible, UsageError
from lowtide.run.measure import LatencyPairs, Measurement, compare_latency, measure_eager, measure_plan
from lowtide.run.plan import Plan, build_plan
from lowtide.run.verify import Verdict, verify
from lowtide.search.estimator import Estimator
from lowtide.search.floors import Floor, floor_of
from lowtide.search.levels import Level, Realised, open_level, realise
from lowtide.search.outcome import Limit, Move, OnProgress, Outcome, Progress, SearchRecord
from lowtide.search.recompute import Point
from lowtide.units import format_bytes, parse_latency, parse_memory
from lowtide.workload import Workload

__all__ = ["optimize"]


@dataclass
class _Clock:
    """Time, progress and interruption of one run."""

    seconds: float
    on_progress: OnProgress | None
    started: float = field(default_factory=time.monotonic)
    search_started: float = 0.0
    interrupted: bool = False
    stage: str = "capture"

    def enter(self, stage: str) -> None:
        self.stage = stage
        if stage == "search":
            self.search_started = time.monotonic()
        self.report()

    def report(self, states: int = 0, peak: int | None = None, latency: float | None = None) -> None:
        if self.on_progress is not None:
            elapsed = time.monotonic() - self.started
            self.on_progress(Progress(self.stage, elapsed, states, peak, latency))

    def halted(self) -> bool:
        return self.interrupted or time.monotonic() - self.search_started > self.seconds


def optimize(
    workload: Workload,
    *,
    memory: str | int | None = None,
    latency: str | float | None = None,
    seconds: float = 30.0,
    seed: int = 0,
    threads: int | None = None,
    rng: str = "eager",
    device: str | None = None,
    fuse: bool = True,
    swap: bool = False,
    on_progress: OnProgress | None = None,
) -> Outcome:
    """Find, verify and measure a plan within a memory limit (fastest) or a latency limit (smallest).

    `memory` limits the total peak ("50%" of eager's, "2GiB", bytes); `latency` is a multiple of eager's
    ("1.1x").  `seconds` bounds the search, not capture, verification and measuring.  Raises Infeasible
    (with the floor), CaptureError, UsageError.
    """
    _check(memory, latency, rng)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        clock = _Clock(seconds, on_progress)
        return _Run(workload, clock, seed, device, memory, latency).outcome()
    finally:
        torch.set_num_threads(before)


def _check(memory: object, latency: object, rng: str) -> None:
    if (memory is None) == (latency is None):
        raise UsageError(
            "exactly one limit is needed", remedy='give memory="50%" (or bytes), or latency="1.1x"'
        )
    if rng not in ("eager", "philox"):
        raise UsageError(f"rng is {rng!r}", remedy='use "eager" or "philox"')
    if rng == "philox":
        raise UsageError('rng="philox" is not part of this version yet', remedy='use rng="eager"')


class _Run:
    """One optimisation; methods in the order in which they happen."""

    def __init__(
        self,
        workload: Workload,
        clock: _Clock,
        seed: int,
        device: str | None,
        memory: str | int | None,
        latency: str | float | None,
    ) -> None:
        self.workload = workload
        self.clock = clock
        self.seed = seed
        self.estimator = Estimator(device_named(device) if device else None)
        self.memory = None if memory is None else parse_memory(memory)
        self.latency = None if latency is None else parse_latency(latency)

    def outcome(self) -> Outcome:
        self.clock.enter("capture")
        self.program: Program = capture(self.workload)
        self.clock.enter("measure eager")
        self.eager: Measurement = measure_eager(self.workload)
        self.limit = self._resolve_limit()
        self.clock.enter("profile")
        self.level: Level = open_level(self.program.graph, self.estimator, self.seed)
        self.floor: Floor = floor_of(self.level.graph, self.estimator.facts(self.level.graph))
        self._refuse_early()
        self._search()
        return self._first_that_holds()

    def _resolve_limit(self) -> Limit:
        if self.memory is None:
            return Limit(latency_ratio=self.latency)
        return Limit(memory_bytes=self.memory.resolve(self.eager.peak_bytes))

    def _refuse_early(self) -> None:
        bound = self.limit.memory_bytes
        if bound is not None and bound < self.floor.total_bytes:
            raise self._infeasible(self.floor)

    def _infeasible(self, floor: Floor) -> Infeasible:
        assert self.limit.memory_bytes is not None
        return Infeasible(
            f"memory {format_bytes(self.limit.memory_bytes)} is under the floor "
            f"{format_bytes(floor.total_bytes)} ({floor.explanation})",
            floor_bytes=floor.total_bytes,
            node=floor.node,
            source=floor.source,
            remedy="raise the limit, or make the batch smaller",
        )

    # -- search --------------------------------------------------------------------------------------

    def _search(self) -> None:
        self.clock.enter("search")
        search = self.level.search
        self.improvements: list[tuple[float, int, int, float]] = []
        self.stop_reason = "time"
        try:
            search.sweep(self._sweep_floor(), self._halted)
            if self.clock.halted():
                return
            target = self._target_above()
            if target is None:
                self.stop_reason = "frontier traced"
            else:
                search.improve(target, self.clock.seconds, self._halted)
        except KeyboardInterrupt:
            self.clock.interrupted = True
        if self.clock.interrupted:
            self.stop_reason = "interrupted"

    def _halted(self) -> bool:
        search = self.level.search
        target = self._target_above()
        best = search.cheapest(target) if target is not None else search.smallest()
        if best is not None:
            peak = self._total(best.peak_bytes)
            known = self.improvements[-1][2:] if self.improvements else None
            if known != (peak, best.latency_s):
                now = time.monotonic() - self.clock.search_started
                self.improvements.append((now, search.states, peak, best.latency_s))
            self.clock.report(search.states, peak, best.latency_s)
        return self.clock.halted()

    def _total(self, above_bytes: int) -> int:
        return above_bytes + self.level.graph.resident_bytes

    def _target_above(self) -> int | None:
        if self.limit.memory_bytes is None:
            return None
        return self.limit.memory_bytes - self.level.graph.resident_bytes

    def _sweep_floor(self) -> int:
        target = self._target_above()
        floor_above = self.floor.total_bytes - self.level.graph.resident_bytes
        return max(floor_above, target * 9 // 10) if target is not None else floor_above

    # -- promise -------------------------------------------------------------------------------------

    def _candidates(self) -> list[Point]:
        """Points to try, best first: within the limit as predicted, then a margin below it."""
        points = self.level.search.points
        if self.limit.memory_bytes is not None:
            bound = self._target_above()
            assert bound is not None
            near = [p for p in points if p.peak_bytes <= bound * 1.02]
            return sorted(near, key=lambda p: (p.latency_s, p.peak_bytes))
        ratio = self.limit.latency_ratio
        assert ratio is not None
        fastest = min(point.latency_s for point in points)
        near = [p for p in points if p.latency_s <= fastest * max(ratio, 1.0) * 1.02]
        return sorted(near, key=lambda p: p.peak_bytes)

    def _first_that_holds(self) -> Outcome:
        smallest: Plan | None = None
        for point in self._candidates():
            built = self._build(point)
            if smallest is None or built.plan.predicted_peak_bytes < smallest.predicted_peak_bytes:
                smallest = built.plan
            if not self._may_hold(built.plan.predicted_peak_bytes):
                continue
            outcome = self._judge(point, built)
            if outcome is not None:
                return outcome
        raise self._infeasible(self._reached_floor(smallest))

    def _may_hold(self, predicted_peak_bytes: int) -> bool:
        bound = self.limit.memory_bytes
        return bound is None or predicted_peak_bytes <= bound

    def _reached_floor(self, smallest: Plan | None) -> Floor:
        """What the smallest plan needs, where the bound lies lower than any plan that was found."""
        best = self._build(self.level.search.smallest()).plan
        if smallest is not None and smallest.predicted_peak_bytes < best.predicted_peak_bytes:
            best = smallest
        return self.floor.raised_to(best.predicted_peak_bytes, best)

    def _build(self, point: Point) -> _Built:
        realised = realise(self.level, point.chosen, self.estimator)
        return _Built(realised, build_plan(self.program, realised.graph, realised.order))

    def _judge(self, point: Point, built: _Built) -> Outcome | None:
        """Verify and measure; None if the plan does not keep the promise."""
        plan = built.plan
        self.clock.enter("verify")
        verdict: Verdict = verify(self.program, plan)
        if not verdict.accepted:
            return None
        self.clock.enter("measure")
        measured = measure_plan(plan, self.workload)
        pairs: LatencyPairs = compare_latency(self.workload, plan)
        if not self._holds(measured, pairs):
            return None
        return self._describe(point, built, verdict, measured, pairs)

    def _holds(self, measured: Measurement, pairs: LatencyPairs) -> bool:
        if self.limit.memory_bytes is not None:
            return measured.peak_bytes <= self.limit.memory_bytes
        assert self.limit.latency_ratio is not None
        return pairs.ratio <= self.limit.latency_ratio + min(pairs.noise, 0.02)

    def _describe(
        self, point: Point, built: _Built, verdict: Verdict, measured: Measurement, pairs: LatencyPairs
    ) -> Outcome:
        search = self.level.search
        elapsed = time.monotonic() - self.clock.search_started
        return Outcome(
            plan=built.plan,
            limit=self.limit,
            met=True,
            verified=verdict.against,
            eager=self.eager,
            measured=measured,
            latency_ratio=pairs.ratio,
            noise=pairs.noise,
            predicted_peak_bytes=built.plan.predicted_peak_bytes,
            predicted_latency_s=built.realised.latency_s,
            max_rel_error=verdict.max_rel_error,
            bit_equal=verdict.bit_equal,
            floor_bytes=self.floor.total_bytes,
            floor_node=self.floor.node,
            search=SearchRecord(
                min(elapsed, self.clock.seconds), search.states, self.stop_reason, tuple(self.improvements)
            ),
            moves=tuple(_moves(self.level, point)),
            points=tuple((self._total(p.peak_bytes), p.latency_s) for p in search.points),
            device="cpu",
            settings={"seed": self.seed, "threads": torch.get_num_threads()},
        )


@dataclass(frozen=True)
class _Built:
    realised: Realised
    plan: Plan


def _moves(level: Level, point: Point) -> list[Move]:
    """One Remat move per recomputed storage, with its bytes and the time of its producer."""
    mirror = level.search.mirror
    moves = []
    for number, storage in enumerate(mirror.storage_ids):
        if storage not in point.chosen:
            continue
        node = level.graph.node[mirror.node_ids[int(mirror.owner[number])]]
        size, cost = int(mirror.nbytes[number]), float(mirror.cost[int(mirror.owner[number])])
        moves.append(Move("remat", node.origin.module, node.origin.source, size, cost))
    return moves


Halted = Callable[[], bool]
