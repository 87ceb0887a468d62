"""From a workload and a limit to a verified, measured plan; and the whole frontier.

Method.  Capture; measure eager; profile; explore; keep the promise.  An interrupt ends the search early,
not the promise: the best point found so far still has to pass.

Not done here: how points are found (`explorer.py`), what a promise takes (`promise.py`), how plans run
(`lowtide.run`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from lowtide.capture import Program, capture
from lowtide.capture.counted import captured
from lowtide.cost.devices import device_named
from lowtide.errors import Infeasible, UsageError
from lowtide.fusion.kernels import Foundry
from lowtide.search.baseline import baseline
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Explorer, Goal, Spot
from lowtide.search.floors import floor_of
from lowtide.search.foreign import foreign_setting, holds_fakes, is_foreign, predict_outcome
from lowtide.search.fusing import Fuser
from lowtide.search.outcome import Limit, OnProgress, Outcome, Progress
from lowtide.search.preparing import Preparer, rewrite_moves, simplified
from lowtide.search.promise import Setting, keep_promise, refuse
from lowtide.transforms.algebra import take_apart
from lowtide.units import MemoryLimit, parse_latency, parse_memory
from lowtide.workload import Workload

__all__ = ["Frontier", "explore", "optimize"]

AnyFrontier = TypeVar("AnyFrontier", bound="Frontier")


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
    (with the floor), CaptureError, UsageError.  `rng` "philox" draws by counter (`capture.counted`): other
    numbers than eager's of the same distribution, which need not be kept.
    """
    _check(memory, latency, rng)
    with _threads(threads):
        clock = _Clock(seconds, on_progress)
        clock.enter("capture")
        frontier = Frontier(_setting(captured(workload, rng), clock, seed, device, fuse), clock)
        return frontier.search(_limit(frontier.setting, memory, latency))


def explore(
    program: Program | Workload,
    seconds: float = 30.0,
    seed: int = 0,
    *,
    threads: int | None = None,
    device: str | None = None,
    on_progress: OnProgress | None = None,
    kind: type[AnyFrontier],
) -> AnyFrontier:
    """The whole memory/latency trade-off of a captured program (or a workload) in one search.

    `kind` is the class of the result: `Frontier`, or one that offers more.
    """
    with _threads(threads):
        clock = _Clock(seconds, on_progress)
        clock.enter("capture")
        known = program if isinstance(program, Program) else capture(program)
        frontier = kind(_setting(known, clock, seed, device), clock)
        frontier.trace()
        return frontier


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(memory: object, latency: object, rng: str) -> None:
    if (memory is None) == (latency is None):
        raise UsageError(
            "exactly one limit is needed", remedy='give memory="50%" (or bytes), or latency="1.1x"'
        )
    if rng not in ("eager", "philox"):
        raise UsageError(f"rng is {rng!r}", remedy='use rng="eager" or rng="philox"')


@dataclass
class _Clock:
    """Time, progress and interruption of one run."""

    seconds: float
    on_progress: OnProgress | None
    started: float = field(default_factory=time.monotonic)
    search_started: float = 0.0
    stage: str = ""

    def enter(self, stage: str) -> None:
        self.stage = stage
        if stage == "search":
            self.search_started = time.monotonic()
        self.report()

    def report(self, states: int = 0, peak: int | None = None, latency: float | None = None) -> None:
        if self.on_progress is not None:
            elapsed = time.monotonic() - self.started
            self.on_progress(Progress(self.stage, elapsed, states, peak, latency))

    def searched_s(self) -> float:
        return time.monotonic() - self.search_started

    def halted(self) -> bool:
        return self.searched_s() > self.seconds


def _setting(
    program: Program, clock: _Clock, seed: int, device: str | None = None, fuse: bool = True
) -> Setting:
    if is_foreign(device):
        return foreign_setting(program, device_named(device or ""), seed)
    if holds_fakes(program):
        raise UsageError(
            "the workload was built without data (fake tensors), so it cannot run here",
            remedy="name the device to plan for, such as device='h200'",
        )
    clock.enter("measure eager")
    eager = baseline(program)
    clock.enter("profile")
    graph = take_apart(program.graph).graph
    foundry = Foundry()
    kernels = dict(foundry.kernels(graph)) if fuse else {}
    estimator = Estimator(kernels=kernels)
    plain = graph
    done = simplified(graph, estimator)
    graph = done.graph
    estimator.costs(graph)  # now, so that the search does not spend its time on measuring
    floor = floor_of(graph, estimator.facts(graph))
    fuser = Fuser(estimator, kernels, foundry) if fuse else None
    if fuser is not None:
        estimator.shares.update(fuser.shares(graph))
    return Setting(
        program,
        graph,
        estimator,
        eager,
        floor,
        seed,
        kernels,
        fuser=fuser,
        preparer=Preparer.beside(estimator) if fuse and program.mode == "infer" else None,
        rewrites=tuple(rewrite_moves(done, plain)),
        unrewritten=plain if done.applied else None,
    )


def _limit(setting: Setting, memory: str | int | None, latency: str | float | None) -> Limit:
    if memory is None:
        assert latency is not None
        return Limit(latency_ratio=parse_latency(latency))
    given: MemoryLimit = parse_memory(memory)
    return Limit(memory_bytes=given.resolve(setting.eager.peak_bytes))


class Frontier:
    """The trade-off of one program: predicted points, and plans for limits on demand."""

    def __init__(self, setting: Setting, clock: _Clock) -> None:
        self.setting = setting
        self._clock = clock
        self._explorer: Explorer | None = None
        self._took_s = 0.0

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Predicted (peak bytes with resident, seconds), by rising time."""
        resident = self.setting.resident_bytes
        return self._explorer.totals(resident) if self._explorer else ()

    def trace(self) -> None:
        """Search without a limit, down to what splitting and recomputing can reach."""
        self._explore(Goal())

    def search(self, limit: Limit) -> Outcome:
        """Search for one limit and keep the promise."""
        bound = limit.memory_bytes
        resident = self.setting.resident_bytes
        if bound is not None and bound <= resident:  # below that nothing helps
            raise refuse(bound, self.setting.floor)
        ratio = limit.latency_ratio
        seconds = None if ratio is None else ratio * self.setting.eager.latency_s
        goal = Goal(None if bound is None else bound - resident, seconds)
        self._explore(goal)
        try:
            return self._keep(limit)
        except Infeasible:
            if self.setting.unrewritten is None:
                raise
        self.setting = replace(self.setting, graph=self.setting.unrewritten, rewrites=(), unrewritten=None)
        self._explore(goal)
        return self._keep(limit)

    def pick_outcome(self, *, memory: str | int | None = None, latency: str | float | None = None) -> Outcome:
        """The verified plan for a limit from the points that are known; raises Infeasible."""
        _check(memory, latency, "eager")
        return self._keep(_limit(self.setting, memory, latency))

    def _keep(self, limit: Limit) -> Outcome:
        assert self._explorer is not None
        keep = predict_outcome if is_foreign(self.setting.device) else keep_promise
        return keep(self.setting, limit, self._explorer, self._clock.enter, self._took_s)

    def _explore(self, goal: Goal) -> None:
        above = self.setting.floor.total_bytes - self.setting.resident_bytes
        self._explorer = Explorer(
            self.setting.graph,
            self.setting.estimator,
            goal,
            above // 4,  # a split goes well below the largest node
            self.setting.seed,
            self._clock.halted,
            self._observe,
        )
        self._explorer.prepare()
        self._clock.enter("search")
        try:
            self._explorer.run()
        except KeyboardInterrupt:
            self._explorer.stop_reason = "interrupted"
        self._took_s = self._clock.searched_s()

    def _observe(self, states: int, best: Spot | None) -> None:
        if best is not None:
            peak = best.point.peak_bytes + self.setting.resident_bytes
            self._clock.report(states, peak, best.point.latency_s)
