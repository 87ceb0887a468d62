"""One measured step of a plan in the Chrome trace format, beside what was predicted for it.

Problem.  A latency that is off, or a step that is slow, has to be found by looking: which operator, in which
module, at how many live bytes.

Method.  Two tracks of one process, each a row of slices by time: the steps as they ran (`Plan.watched`) and
the same steps as the estimator priced them; a counter with the live bytes at every measured step.  Opens in
Perfetto and in chrome://tracing.

    measured    [conv ][relu][conv    ][merge]...      each with operator, module, source line, phase, part,
    predicted   [conv][relu][conv  ]...                live bytes, predicted and measured seconds, copies
    live bytes  __/--\\___/----\\

Invariants.  Slices of a track do not overlap; measured slices keep the gaps between steps.  Live bytes are
those of the plan's layout, to the byte what the report's curve shows.

Not done.  Threads inside an operator; more than one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from lowtide.report.adaptor import plan_trace
from lowtide.report.data import Step
from lowtide.report.trace import Trace
from lowtide.report.words import operator_name
from lowtide.run.plan import Plan
from lowtide.run.steps import Trail
from lowtide.run.watching import StepRun
from lowtide.search.estimator import Estimator

__all__ = ["Timed", "chrome_trace", "pair_steps"]

_MEASURED, _PREDICTED = 1, 2
_MICRO = 1e6


@dataclass(frozen=True)
class Timed:
    """One step of the plan, predicted (`step.seconds`) and as its prepared steps ran."""

    step: Step
    family: str
    runs: tuple[StepRun, ...]

    @property
    def measured_s(self) -> float:
        """Seconds of the step, merges of its results left out."""
        return sum(run.seconds for run in self.runs if not run.merge)


@dataclass(frozen=True)
class _Index:
    """The steps of a trace by trail; what lies inside a step that was not opened belongs to it."""

    trace: Trace

    @cached_property
    def position(self) -> Mapping[Trail, int]:
        return {trail: number for number, trail in enumerate(self.trace.trails)}

    def of(self, trail: Trail) -> int:
        """The step that `trail`, or the shortest way to it that is known, belongs to."""
        return next(self.position[trail[:n]] for n in range(1, len(trail) + 1) if trail[:n] in self.position)


def pair_steps(trace: Trace, runs: Sequence[StepRun]) -> tuple[Timed, ...]:
    """The steps of a plan in the order in which they ran, with their measured times."""
    index = _Index(trace)
    placed = [run for run in runs if run.trail]  # a fill of the arena has no trail
    found = []
    for number, group in groupby(placed, key=lambda run: index.of(run.trail)):
        found.append(Timed(trace.curve.steps[number], trace.families[number], tuple(group)))
    return tuple(found)


def chrome_trace(plan: Plan, runs: Sequence[StepRun]) -> str:
    """The JSON text for one run of `plan`; operators that were never timed here are timed now."""
    trace = plan_trace(plan, Estimator(kernels=plan.kernels).costs)
    steps = pair_steps(trace, runs)
    events = [*_names(plan), *_measured(steps, plan.resident_bytes), *_predicted(steps)]
    about = {
        "workload": plan.program.workload.name,
        "measured_s": sum(run.seconds for run in runs),
        "predicted_s": sum(step.seconds for step in trace.curve.steps) + trace.merging_s,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    name = f"lowtide plan of {plan.program.workload.name}"
    yield {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": name}}
    for track, title in ((_MEASURED, "measured"), (_PREDICTED, "predicted")):
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _measured(steps: Sequence[Timed], resident_bytes: int) -> Iterator[dict[str, Any]]:
    for timed in steps:
        live = {"resident": resident_bytes, "above": timed.step.above_bytes}
        yield {"ph": "C", "pid": 1, "name": "live bytes", "ts": timed.runs[0].start_s * _MICRO, "args": live}
        for run in timed.runs:
            name = f"merge {operator_name(run.merge)}" if run.merge else operator_name(timed.step.operator)
            told = _told(timed) | {"copies": run.copied + bool(run.merge)}
            yield _slice(_MEASURED, name, run.start_s, run.seconds, told)


def _predicted(steps: Sequence[Timed]) -> Iterator[dict[str, Any]]:
    at = 0.0
    for timed in steps:
        yield _slice(_PREDICTED, operator_name(timed.step.operator), at, timed.step.seconds, _told(timed))
        at += timed.step.seconds


def _slice(track: int, name: str, start_s: float, seconds: float, told: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start_s * _MICRO, "dur": seconds * _MICRO}
    return {"ph": "X", "pid": 1, "tid": track, "name": name, "cat": told["phase"], **times, "args": told}


def _told(timed: Timed) -> dict[str, Any]:
    step = timed.step
    return {
        "operator": step.operator,
        "module": step.module,
        "source": step.source,
        "phase": step.phase,
        "part": step.part,
        "live_bytes": step.above_bytes,
        "predicted_s": step.seconds,
        "measured_s": timed.measured_s,
    }
