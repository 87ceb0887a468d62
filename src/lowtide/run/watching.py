"""What every step of a run took: the raw material of traces and of the estimator's error.

Problem.  The latency of a whole step does not say which operator it went to.

Method.  The executor reads the clock around each prepared step (`Plan.watched`), which costs about 0.1
microseconds a step.  A step is known by its trail: positions in the orders of the graph and of the bodies in
it, which `lowtide.report.trace` walks in the same order.

Not done.  What happens between steps (binding arguments, results) belongs to none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.run.steps import Trail, Watch

__all__ = ["StepRun", "step_runs"]


@dataclass(frozen=True, slots=True)
class StepRun:
    """One prepared step as it ran; `start_s` counts from the start of the first.

    `merge` names the operator by which a part's result went into the whole; `copied` counts results that were
    made elsewhere and copied to their places.
    """

    trail: Trail
    merge: str
    start_s: float
    seconds: float
    copied: int


def step_runs(watch: Watch, steps: Sequence[tuple[Trail, str]]) -> tuple[StepRun, ...]:
    """The steps of one run, from the clock's readings."""
    first = watch[0][0] if watch else 0
    return tuple(
        StepRun(trail, merge, (start - first) * 1e-9, (stop - start) * 1e-9, copied)
        for (trail, merge), (start, stop, copied) in zip(steps, watch, strict=True)
    )
