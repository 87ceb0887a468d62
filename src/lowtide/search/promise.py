"""Keeping the promise: the first point that is verified, measured and within the limit.

Problem.  A predicted point is not yet a plan: placement may waste bytes, a kernel may differ, a time may
be off.  A limit is met when run, or refused with the floor.

Method.  Points that should meet the limit are tried, best first, each with its groups as kernels and without,
the better form first.  A form is built (placement included), compared with eager on the user's own model,
measured, and returned if it holds; under a memory limit not if it turns out slower than the other.  Measured
times rescale the predicted ones, so that a latency limit is not tried point by point.

Not done here: finding points (`explorer.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.capture import Program
from lowtide.cost.estimate import Estimate
from lowtide.errors import Infeasible
from lowtide.ir import Graph
from lowtide.run.kernels import Kernels
from lowtide.run.measure import (
    LatencyPairs,
    Measurement,
    count_allocations,
    measure_plan,
    measure_rivals,
)
from lowtide.run.verify import Verdict
from lowtide.search.baseline import compare_latency, compare_numbers, unpaired
from lowtide.search.calibration import Correction
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Explorer, Spot
from lowtide.search.floors import Floor
from lowtide.search.fusing import Fuser
from lowtide.search.outcome import Limit, Outcome
from lowtide.search.trials import Trial, Workshop
from lowtide.units import format_bytes, format_ratio

__all__ = ["Setting", "keep_promise", "refuse"]

MOST_MISSES = 8
"""Points that may fail when run before a latency limit is refused."""

CLEARLY_SLOWER = 1.05
"""Plans that take this many times a latency limit when run alone are not compared with eager in pairs."""

SAME_SIZE = 0.03
"""Forms of a point that differ by less than this share of their bytes are ranked by time."""

MOST_SMALLER = 4
"""Points that are run at most once one has kept a latency limit."""

PATIENCE_SECONDS = 60.0
"""How long plans have been run when no smaller one is tried any more: large models take long to measure."""

WORTH_TRYING = 0.98
"""How much smaller, above resident, a point must be to be run as well."""

SQUEEZE_SECONDS = 6.0
"""How long the search goes on where a measured plan has put the limit."""

FUSED_SECONDS = 10.0
"""How long such points are looked for; building one takes seconds for a large model."""

FUSED_SLACK = 1.5
"""How far above a memory limit a point may be that is still looked at fused."""


@dataclass(frozen=True)
class Setting:
    """What one program, machine and seed have in common for every limit.

    `graph` is the program's with the unconditional rewrites applied.
    """

    program: Program
    graph: Graph
    estimator: Estimator
    eager: Measurement | Estimate
    floor: Floor
    seed: int
    kernels: Kernels
    device: str = "cpu"
    fuser: Fuser | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes that the caller owns."""
        return self.program.graph.resident_bytes


def refuse(limit_bytes: int, floor: Floor) -> Infeasible:
    """The error for a memory limit under `floor`, or not kept although it is above the lower bound."""
    relation = "is under" if limit_bytes < floor.total_bytes else "was not reached; no plan can go under"
    return Infeasible(
        f"memory {format_bytes(limit_bytes)} {relation} the floor {format_bytes(floor.total_bytes)} "
        f"({floor.explanation})",
        floor_bytes=floor.total_bytes,
        node=floor.node,
        source=floor.source,
        remedy="raise the limit, or make the batch smaller",
    )


def keep_promise(
    setting: Setting, limit: Limit, explorer: Explorer, enter: Callable[[str], None], seconds: float
) -> Outcome:
    """The best verified plan for `limit`; raises Infeasible if none of the points keeps it.

    `enter` is told the stage; `seconds` is what the search took.
    """
    workshop = Workshop(setting.program, setting.estimator, setting.kernels, setting.fuser, enter)
    promise = _Promise(setting, limit, explorer, enter, seconds, workshop)
    return promise.within_memory() if limit.memory_bytes is not None else promise.within_latency()


@dataclass
class _Promise:
    """One limit; `above` are forms that do not fit, `best_ratio` is the fastest that ran, `ran` the last."""

    setting: Setting
    limit: Limit
    explorer: Explorer
    enter: Callable[[str], None]
    seconds: float
    workshop: Workshop
    above: list[Trial] = field(default_factory=list)
    ran: Outcome | None = None
    best_ratio: float = float("inf")

    def within_memory(self) -> Outcome:
        """Fastest first among the points that fit, or do when fused."""
        spots = self.explorer.spots()
        near = [spot for spot in spots if spot.point.peak_bytes <= self._bound_bytes * 1.02]
        near.sort(key=lambda spot: (spot.point.latency_s, spot.point.peak_bytes))
        for spot in [*self._fitting_fused(spots), *near]:
            outcome = self.try_spot(spot)
            if outcome is not None:
                return outcome
        if not self.above:
            rest = [spot for spot in spots if spot not in near][-MOST_MISSES:]
            self.above += [trial for spot in rest for trial in self.workshop.trials(spot)]
        assert self.limit.memory_bytes is not None
        raise refuse(self.limit.memory_bytes, self._reached())

    @property
    def _bound_bytes(self) -> int:
        assert self.limit.memory_bytes is not None
        return self.limit.memory_bytes - self.setting.resident_bytes

    def _fitting_fused(self, spots: Sequence[Spot]) -> list[Spot]:
        """Points above the bound whose fused form is predicted to fit, fastest first (found by halving)."""
        if self.setting.fuser is None:
            return []
        low, high = self._bound_bytes * 1.02, self._bound_bytes * FUSED_SLACK
        above = sorted(
            (s for s in spots if low < s.point.peak_bytes <= high), key=lambda s: s.point.peak_bytes
        )
        first, last = 0, len(above)
        started = time.monotonic()
        while first < last and time.monotonic() - started < FUSED_SECONDS:
            middle = (first + last) // 2
            form = next(self.workshop.trials(above[middle]))
            if form.fused and form.above_bytes <= self._bound_bytes:
                first = middle + 1
            else:
                last = middle
        return above[:first][::-1][:MOST_MISSES]

    def within_latency(self) -> Outcome:
        """The smallest plan that keeps the limit when run.

        The first point that should is run; what it took corrects the predictions, the search goes on where
        the corrected limit is, and smaller points are tried as long as they are expected to keep it.
        """
        assert self.limit.latency_ratio is not None
        eager_s = self.setting.eager.latency_s
        bound_s = eager_s * self.limit.latency_ratio
        fastest = min(self.explorer.spots(), key=lambda spot: spot.point.latency_s)
        correction = Correction(self.workshop.speedup(fastest))
        met: Outcome | None = None
        tried: list[Spot] = []
        started = time.monotonic()
        while len(tried) < (MOST_MISSES if met is None else MOST_SMALLER):
            spot = self._next(correction, bound_s, tried, met)
            if spot is None or (met is not None and time.monotonic() - started > PATIENCE_SECONDS):
                break
            tried.append(spot)
            self.ran = None
            outcome = self.try_spot(spot)
            if outcome is not None and (met is None or outcome.measured.peak_bytes < met.measured.peak_bytes):
                met = outcome
            if self.ran is not None:
                correction.learn(spot, self.ran.latency_ratio * eager_s)
                self.explorer.squeeze(bound_s / correction.factor(spot), SQUEEZE_SECONDS)
        if met is not None:
            return met
        raise Infeasible(
            f"latency {format_ratio(self.limit.latency_ratio)} of eager was not reached: the fastest plan "
            f"that ran took {format_ratio(self.best_ratio)}",
            floor_bytes=self.setting.floor.total_bytes,
            node=self.setting.floor.node,
            source=self.setting.floor.source,
            remedy="raise the latency limit",
        )

    def _next(
        self, correction: Correction, bound_s: float, tried: Sequence[Spot], met: Outcome | None
    ) -> Spot | None:
        """The smallest point that is expected to keep the limit; while none has, the fastest otherwise."""
        spots = [spot for spot in self.explorer.spots() if spot not in tried]
        good = [spot for spot in spots if correction.seconds(spot) <= bound_s]
        if met is None:
            smallest = min(good, key=lambda spot: spot.point.peak_bytes, default=None)
            return smallest or min(spots, key=correction.seconds, default=None)
        worth = (met.measured.peak_bytes - self.setting.resident_bytes) * WORTH_TRYING
        better = [spot for spot in good if spot.point.peak_bytes <= worth]
        return min(better, key=lambda spot: spot.point.peak_bytes, default=None)

    def try_spot(self, spot: Spot) -> Outcome | None:
        """The better form of a point that keeps the limit when run; None if none does."""
        forms = list(self.workshop.trials(spot))
        plain = forms[-1]
        forms.sort(key=self._rank)
        while forms:
            trial = forms.pop(0)
            if not self._fits(trial):
                self.above.append(trial)
                continue
            outcome = self._judge(trial)
            if outcome is None and trial.fused:
                forms += self._more_careful(spot, plain)
            elif outcome is not None and outcome.met:
                return self._or_faster(trial, outcome, forms)
            elif outcome is not None:
                self.best_ratio = min(self.best_ratio, outcome.latency_ratio)
        return None

    def _rank(self, trial: Trial) -> tuple[float, float]:
        """What is limited by bytes should be fast, what is limited by time small."""
        size, seconds = float(trial.above_bytes), trial.realised.latency_s
        if self.limit.memory_bytes is not None:
            return seconds, size
        return float(round(math.log(max(size, 1.0)) / SAME_SIZE)), seconds

    def _fits(self, trial: Trial) -> bool:
        if self.limit.memory_bytes is None:
            return True
        likely = trial.above_bytes <= self._bound_bytes
        return likely and trial.plan.predicted_peak_bytes <= self.limit.memory_bytes

    def _more_careful(self, spot: Spot, plain: Trial) -> list[Trial]:
        """A fused form whose numbers were not eager's is fused less."""
        assert self.setting.fuser is not None
        self.setting.fuser.be_careful()
        again = self.workshop.fused(spot, plain.realised)
        return [] if again is None else [again]

    def _or_faster(self, trial: Trial, outcome: Outcome, others: Sequence[Trial]) -> Outcome:
        """A fused plan that turns out slower than the same plan unfused is not returned."""
        rival = next((other for other in others if not other.fused), None)
        if self.limit.memory_bytes is None or not trial.fused or rival is None or not self._fits(rival):
            return outcome
        workload = self.setting.program.workload
        if measure_rivals(trial.plan, rival.plan, workload) <= 1.0:
            return outcome
        other = self._judge(rival)
        better = other is not None and other.met and other.latency_ratio <= outcome.latency_ratio
        return other if better and other is not None else outcome

    def _reached(self) -> Floor:
        """The floor that the smallest of these plans reached which gives eager's numbers."""
        for trial in sorted(self.above, key=lambda each: each.above_bytes):
            if compare_numbers(self.setting.eager, self.setting.program, trial.plan).passed:
                return self.setting.floor.reached_by(trial.plan)
        return self.setting.floor

    def _judge(self, trial: Trial) -> Outcome | None:
        """Verify and measure a trial; None if its numbers are not eager's."""
        self.enter("verify")
        eager, program = self.setting.eager, self.setting.program
        verdict = compare_numbers(eager, program, trial.plan)
        if not verdict.passed:
            trial.plan.release()
            return None
        self.enter("measure")
        measured = measure_plan(trial.plan, program.workload)
        pairs = unpaired(eager, measured)
        if self.limit.latency_ratio is None or pairs.ratio <= CLEARLY_SLOWER * self.limit.latency_ratio:
            pairs = compare_latency(eager, program, trial.plan, measured)
        self.ran = self._outcome(trial, verdict, measured, pairs)
        return self.ran

    def _outcome(self, trial: Trial, verdict: Verdict, measured: Measurement, pairs: LatencyPairs) -> Outcome:
        setting, explorer = self.setting, self.explorer
        resident = setting.resident_bytes
        smallest_bytes = explorer.spots()[-1].point.peak_bytes + resident
        return Outcome(
            plan=trial.plan,
            limit=self.limit,
            met=_holds(self.limit, measured, pairs),
            verified=verdict.against,
            eager=setting.eager,
            measured=measured,
            latency_ratio=pairs.ratio,
            noise=pairs.eager_half_width,
            predicted_peak_bytes=trial.plan.predicted_peak_bytes,
            predicted_latency_s=trial.realised.latency_s,
            max_rel_error=verdict.max_rel_error,
            bit_equal=verdict.bit_equal,
            floor_bytes=min(setting.floor.total_bytes, smallest_bytes),
            floor_node=setting.floor.node,
            search=explorer.summary(self.seconds, resident),
            moves=trial.moves,
            points=explorer.totals(resident),
            device="cpu",
            allocations_per_step=count_allocations(trial.plan, setting.program.workload),
            settings={
                "seed": setting.seed,
                "threads": torch.get_num_threads(),
                "made": time.strftime("%Y-%m-%d"),
            },
        )


def _holds(limit: Limit, measured: Measurement, pairs: LatencyPairs) -> bool:
    if limit.memory_bytes is not None:
        return measured.peak_bytes <= limit.memory_bytes
    assert limit.latency_ratio is not None
    return pairs.meets(limit.latency_ratio)
