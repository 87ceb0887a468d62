"""Bytes and seconds of real steps: eager's and a plan's, measured the same way.

Problem.  A limit is about bytes that a step really takes; a ratio is about seconds on a machine that other
processes use as well.

Method.  *Peak*: resident bytes, plus the most live allocator bytes above the level at the step's start, from
the profiler's memory events in time order, in the third step (two before it warm up).  A plan's arena exists
before that level, and counts as used from start to end.
*Latency*: median of several steps.  *Ratio*: rounds of eager, plan, eager; per round plan / eager and eager /
eager; medians, and for the second the half-width of its 95 % interval, which says how well two equal things
can be told apart here and now.
*Resident size* by the kernel's count needs a fresh process: `lowtide.search.fresh`.

Invariant.  Model, optimizer (state that a step creates included), gradients and random generators are
afterwards what they were, bit by bit.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from lowtide.run.events import peak_bytes, record_with_profiler
from lowtide.run.native import resident_bytes, run_step
from lowtide.run.plan import Plan
from lowtide.run.snapshot import preserved
from lowtide.run.watching import StepRun
from lowtide.workload import Workload

__all__ = [
    "LatencyPairs",
    "Measurement",
    "count_allocations",
    "measure_eager",
    "measure_pairs",
    "measure_plan",
    "measure_rivals",
    "plan_step",
    "repeated",
    "time_of",
    "watch_plan",
]

T = TypeVar("T")

_MOST_RUNS = 15
_LEAST_RUNS = 3
_PAIRS = 31


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kind of step: `latency_s` is the median of `runs`; `rss_peak_bytes` is the kernel's count."""

    resident_bytes: int
    peak_bytes: int
    rss_peak_bytes: int | None
    latency_s: float
    runs: int
    predicted: ClassVar[bool] = False

    @property
    def above_bytes(self) -> int:
        """The peak without what is resident."""
        return self.peak_bytes - self.resident_bytes


@dataclass(frozen=True, slots=True)
class LatencyPairs:
    """Interleaved runs: `ratio` is plan to eager, `eager_half_width` eager's scatter against itself."""

    ratio: float
    eager_half_width: float
    pairs: int
    eager_s: float
    plan_s: float

    def meets(self, limit: float) -> bool:
        """Whether the ratio is at most `limit`, up to the half-width (at most 0.02)."""
        return self.ratio <= limit + min(0.02, self.eager_half_width)


def measure_eager(workload: Workload, *, seconds: float = 10.0) -> Measurement:
    """The user's own step.  `seconds` bounds the timed runs, not the first three."""
    with preserved(workload):
        return _measure(lambda: run_step(workload), workload, 0, seconds)


def measure_plan(
    plan: Plan, workload: Workload, *, seconds: float = 20.0, brief: bool = False
) -> Measurement:
    """The plan's step on the workload's own arguments; `brief` is for the bytes, its time is one run's."""
    with preserved(workload):
        return _measure(plan_step(plan, workload), workload, plan.arena_bytes, seconds, brief)


def watch_plan(plan: Plan, workload: Workload, *, runs: int = 5) -> list[tuple[StepRun, ...]]:
    """Every prepared step's time in `runs` runs, one before them to warm up; by rising total."""
    given = (workload.args, workload.kwargs, workload.targets)
    with preserved(workload):
        found = [plan.watched(*given) for _ in range(runs + 1)][1:]
    return sorted(found, key=lambda steps: sum(step.seconds for step in steps))


def plan_step(plan: Plan, workload: Workload) -> Callable[[], Any]:
    """The plan's step on the workload's own arguments, as a function without any."""
    if workload.training:
        return lambda: plan.step(*workload.args, *workload.targets, **workload.kwargs)
    return lambda: plan(*workload.args, **workload.kwargs)


def _measure(
    step: Callable[[], Any], workload: Workload, arena_bytes: int, seconds: float, brief: bool = False
) -> Measurement:
    first_s = time_of(step)  # the third step is recorded, and a second one runs before it
    result, log = record_with_profiler(step, before=step)
    del result
    held = resident_bytes(workload)
    times = [first_s] if brief else repeated(lambda: time_of(step), seconds, _LEAST_RUNS, _MOST_RUNS)
    return Measurement(
        resident_bytes=held,
        peak_bytes=held + arena_bytes + peak_bytes(log),
        rss_peak_bytes=None,
        latency_s=statistics.median(times),
        runs=len(times),
    )


def measure_pairs(
    plan: Plan, workload: Workload, *, seconds: float = 60.0, pairs: int = _PAIRS, brief: bool = False
) -> LatencyPairs:
    """Plan against eager in interleaved rounds, fewer than `pairs` once `seconds` are over.

    At least 3 after one that does not count; `brief`, for steps that have just run: at least one.
    """
    least = 1 if brief else _LEAST_RUNS
    with preserved(workload) as start:
        eager, ours = functools.partial(run_step, workload), plan_step(plan, workload)
        if not brief:
            eager()
            ours()
            start.restore()
        rounds = repeated(lambda: (time_of(eager), time_of(ours), time_of(eager)), seconds, least, pairs)
    return LatencyPairs(
        ratio=statistics.median(2 * mine / (first + second) for first, mine, second in rounds),
        eager_half_width=half_width([second / first for first, _, second in rounds]),
        pairs=len(rounds),
        eager_s=statistics.median(first for first, _, _ in rounds),
        plan_s=statistics.median(mine for _, mine, _ in rounds),
    )


def count_allocations(plan: Plan, workload: Workload) -> int:
    """Allocator requests of a later step that the arena does not answer, its results left out."""
    with preserved(workload):
        plan_step(plan, workload)()
        return plan.count_allocations(*workload.args, *workload.targets, **workload.kwargs).missed


def measure_rivals(one: Plan, other: Plan, workload: Workload, *, seconds: float = 5.0) -> float:
    """The median of `one`'s time to `other`'s over interleaved rounds: at least 3, at most 15."""
    with preserved(workload) as start:
        first, second = plan_step(one, workload), plan_step(other, workload)
        first()
        second()
        start.restore()
        ratios = repeated(lambda: time_of(first) / time_of(second), seconds, _LEAST_RUNS, _MOST_RUNS)
    return statistics.median(ratios)


def half_width(ratios: list[float]) -> float:
    """Half of the 95 % confidence interval of the median, by order statistics."""
    ordered = sorted(ratios)
    count = len(ordered)
    reach = 0.98 * count**0.5
    low = max(0, int(count / 2 - reach))
    high = min(count - 1, int(count / 2 + reach))
    return (ordered[high] - ordered[low]) / 2


def repeated(run: Callable[[], T], seconds: float, least: int, most: int) -> list[T]:
    """Results of `run`, again and again for `seconds`: at least `least`, at most `most`."""
    found: list[T] = []
    stop = time.perf_counter() + seconds
    while len(found) < least or (len(found) < most and time.perf_counter() < stop):
        found.append(run())
    return found


def time_of(step: Callable[[], Any]) -> float:
    """Seconds of one run, its result still held."""
    start = time.perf_counter()
    result = step()
    elapsed = time.perf_counter() - start
    del result
    return elapsed
