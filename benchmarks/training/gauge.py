"""Bytes, seconds and gradients of two steps beside each other, in one process.

Problem.  The machine is shared: seconds measured one after the other compare two moments, not two programs.

Method.  Rounds of eager, other, eager.  The ratio is the median of 2 * other / (eager + eager), the noise the
half-width of the 95 % interval of the median of eager / eager.  The same ratio of processor seconds depends
far less on who else runs, but counts threads that wait in a loop.  The peak is read from the profiler's
allocation events in time order, the step before it included so that releases of its blocks are known.

Not measured.  Memory outside PyTorch's allocator (oneDNN's scratch, a generated kernel's own `new`).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lowtide.run.events import peak_bytes, record_with_profiler

__all__ = [
    "Round",
    "Rounds",
    "Time",
    "gradient_error",
    "half_width",
    "measure_above_bytes",
    "measure_rounds",
    "summarise",
    "time_step",
]

Step = Callable[[], object]
_LEAST_ROUNDS = 3
_GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True)
class Time:
    """One step: seconds by the clock, and processor seconds of all threads of this process."""

    latency_s: float
    processor_s: float


Round = tuple[Time, Time, Time]


@dataclass(frozen=True)
class Rounds:
    """Interleaved runs: the other's median, the ratio to eager, the noise, and who else was running."""

    latency_s: float
    ratio: float
    noise: float
    processor_ratio: float
    rounds: int
    foreign_share: float


def measure_above_bytes(step: Step) -> int:
    """The most allocator bytes above the level at the step's start; runs two steps."""
    _, log = record_with_profiler(step, before=step)
    return peak_bytes(log)


def measure_rounds(eager: Step, other: Step, *, rounds: int, seconds: float) -> Rounds:
    """At least 3 rounds, at most `rounds`, fewer once `seconds` are over."""
    eager()
    other()
    times: list[Round] = []
    busy, own, start = *_processor_s(), time.perf_counter()
    while len(times) < _LEAST_ROUNDS or (len(times) < rounds and time.perf_counter() - start < seconds):
        times.append((time_step(eager), time_step(other), time_step(eager)))
    busy_after, own_after = _processor_s()
    available = (time.perf_counter() - start) * (os.cpu_count() or 1)
    foreign = ((busy_after - busy) - (own_after - own)) / available
    return summarise(times, min(1.0, max(0.0, foreign)))


def summarise(times: Sequence[Round], foreign_share: float = 0.0) -> Rounds:
    """Rounds of (eager, other, eager) as medians."""
    clock = [tuple(step.latency_s for step in steps) for steps in times]
    processor = [tuple(step.processor_s for step in steps) for steps in times]
    return Rounds(
        latency_s=statistics.median(mine for _, mine, _ in clock),
        ratio=statistics.median(2 * mine / (first + second) for first, mine, second in clock),
        noise=half_width([second / first for first, _, second in clock]),
        processor_ratio=statistics.median(2 * mine / (first + second) for first, mine, second in processor),
        rounds=len(times),
        foreign_share=foreign_share,
    )


def time_step(step: Step) -> Time:
    """One step, freeing its result not included."""
    start, used = time.perf_counter(), time.process_time()
    result = step()
    taken = Time(time.perf_counter() - start, time.process_time() - used)
    del result
    return taken


def half_width(ratios: list[float]) -> float:
    """Half of the 95 % confidence interval of the median, by order statistics."""
    ordered = sorted(ratios)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(0, int(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + reach))
    return (ordered[high] - ordered[low]) / 2


def _processor_s() -> tuple[float, float]:
    """Processor seconds used so far by everybody, and by this process; (0, 0) where /proc is missing."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    mine = os.times()
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK"), mine.user + mine.system


def gradient_error(found: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> float:
    """The largest ``max|a - b| / max(max|b|, 1e-3 G)``, G the largest entry of all of eager's gradients.

    Infinite where one side lacks a gradient or has a NaN, and where there is nothing to compare.
    """
    if found.keys() != eager.keys() or not eager:
        return math.inf
    largest = {name: float(gradient.abs().max()) for name, gradient in eager.items()}
    floor = _GRADIENT_FLOOR * max(largest.values(), default=0.0)
    error = 0.0
    for name, gradient in eager.items():
        difference = float((found[name].double() - gradient.double()).abs().max())
        if math.isnan(difference):
            return math.inf
        scale = max(largest[name], floor)
        if difference > 0:
            error = max(error, difference / scale if scale else math.inf)
    return error
