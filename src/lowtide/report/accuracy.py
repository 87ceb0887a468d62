"""How far the estimator is off, by family of operators: a plan's steps as predicted against as measured.

Problem.  A predicted latency that is off by a third says nothing about whose prediction is wrong.

Method.  Steps are watched in several runs; of each the median is set against the estimator's price of the
same operator, and both are added up by family.  A family's share of the error is its absolute difference
among all of them: families that err in opposite directions do not hide each other.

Not done.  What happens between steps, which belongs to no family.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.report.adaptor import plan_trace
from lowtide.report.chrome import pair_steps
from lowtide.report.trace import Trace
from lowtide.run.plan import Plan
from lowtide.run.watching import StepRun
from lowtide.search.estimator import Estimator

__all__ = ["Accuracy", "FamilyRow", "accuracy_of", "accuracy_rows"]

MERGES = "merges of parts"


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One family: how many steps, their predicted and measured seconds, its share of all errors."""

    family: str
    steps: int
    predicted_s: float
    measured_s: float
    share: float = 0.0

    @property
    def error_s(self) -> float:
        """Measured less predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True)
class Accuracy:
    """All families, largest share first."""

    rows: tuple[FamilyRow, ...]

    @property
    def predicted_s(self) -> float:
        """The whole step as predicted."""
        return sum(row.predicted_s for row in self.rows)

    @property
    def measured_s(self) -> float:
        """The whole step as measured, what lies between steps left out."""
        return sum(row.measured_s for row in self.rows)


def accuracy_of(plan: Plan, runs: Sequence[tuple[StepRun, ...]]) -> Accuracy:
    """The estimator's error over `runs` of a plan (`lowtide.run.measure.watch_plan`)."""
    return accuracy_rows(plan_trace(plan, Estimator(kernels=plan.kernels).costs), _median(runs))


def _median(runs: Sequence[tuple[StepRun, ...]]) -> tuple[StepRun, ...]:
    """Every step with the median of its times."""
    return tuple(
        replace(same[0], seconds=statistics.median(step.seconds for step in same))
        for same in zip(*runs, strict=True)
    )


def accuracy_rows(trace: Trace, steps: Sequence[StepRun]) -> Accuracy:
    """The rows for one (median) run of what `trace` shows."""
    found: dict[str, FamilyRow] = {}
    for timed in pair_steps(trace, steps):
        _add(found, timed.family, 1, timed.step.seconds, timed.measured_s)
    merges = [step.seconds for step in steps if step.merge]
    if merges or trace.merging_s:
        _add(found, MERGES, len(merges), trace.merging_s, sum(merges))
    whole = sum(abs(row.error_s) for row in found.values()) or 1.0
    rows = [replace(row, share=abs(row.error_s) / whole) for row in found.values()]
    return Accuracy(tuple(sorted(rows, key=lambda row: (-row.share, row.family))))


def _add(found: dict[str, FamilyRow], family: str, steps: int, predicted_s: float, measured_s: float) -> None:
    old = found.get(family, FamilyRow(family, 0, 0.0, 0.0))
    found[family] = FamilyRow(
        family, old.steps + steps, old.predicted_s + predicted_s, old.measured_s + measured_s
    )
