"""Keeping the promise: the first point that is verified, measured and within the limit.

Problem.  A predicted point is not yet a plan: placement may waste bytes, a kernel may differ, a time may
be off.  A limit is met when run, or refused with the floor.

Method.  Points that should meet the limit are tried, best first, each with its groups as kernels and without,
the better form first.  A form is built (placement included), compared with eager on the user's own model,
run, and its time looked at briefly; under a memory limit it is given up if it turns out slower than the other
form.  Measured times rescale the predicted ones, so that a latency limit is not tried point by point.  Only
the plan that is about to be returned is measured at length.

Not done here: finding points (`explorer.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from lowtide.search.outcome import Limit, Move, Outcome
from lowtide.search.preparing import Preparer
from lowtide.search.trials import Trial, Workshop
from lowtide.units import format_bytes, format_ratio

__all__ = ["Setting", "keep_promise", "refuse"]

MOST_MISSES = 8
"""Points that may fail when run before a latency limit is refused."""

SAME_SIZE = 0.03
"""Forms of a point that differ by less than this share of their bytes are ranked by time."""

MOST_SMALLER = 4
"""Points that are run at most once one has kept a latency limit."""

PATIENCE_SECONDS = 60.0
"""How long plans have been run when no smaller one is tried any more: large models take long to measure."""

WORTH_TRYING = 0.98
"""How much smaller, above resident, a point must be to be run as well."""

WORTH_SPENDING = 0.95
"""A plan that leaves more of a latency limit than this share is returned only if the slack buys nothing."""

SQUEEZE_SECONDS = 6.0
"""How long the search goes on where a measured plan has put the limit."""

FUSED_SECONDS = 10.0
"""How long such points are looked for; building one takes seconds for a large model."""

FUSED_SLACK = 1.5
"""How far above a memory limit a point may be that is still looked at fused."""


@dataclass(frozen=True)
class Setting:
    """What one program, machine and seed have in common for every limit.

    `graph` is the program's with the unconditional rewrites applied, and the algebraic `rewrites`;
    `unrewritten` lacks these, if there are some.
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
    preparer: Preparer | None = None
    rewrites: tuple[Move, ...] = ()
    unrewritten: Graph | None = None

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
    workshop = Workshop(
        setting.program,
        setting.estimator,
        setting.kernels,
        setting.fuser,
        enter,
        setting.preparer,
        setting.rewrites,
    )
    promise = _Promise(setting, limit, explorer, enter, seconds, workshop)
    return promise.within_memory() if limit.memory_bytes is not None else promise.within_latency()


@dataclass(frozen=True)
class _Ran:
    """A form that gave eager's numbers when run, with its bytes and a brief look at its time."""

    trial: Trial
    verdict: Verdict
    measured: Measurement
    pairs: LatencyPairs


@dataclass
class _Promise:
    """One limit.

    `above` are forms that do not fit, `best_ratio` is the fastest that ran, `ran` the last; `kept` are those
    that seem to keep a latency limit, `met` one that does with time to spare, `tried` the points run for it;
    `heavy` says that others would but for their bytes, which are above eager's.
    """

    setting: Setting
    limit: Limit
    explorer: Explorer
    enter: Callable[[str], None]
    seconds: float
    workshop: Workshop
    above: list[Trial] = field(default_factory=list)
    kept: list[_Ran] = field(default_factory=list)
    tried: list[Spot] = field(default_factory=list)
    met: Outcome | None = None
    ran: _Ran | None = None
    best_ratio: float = float("inf")
    heavy: bool = False

    def within_memory(self) -> Outcome:
        """Fastest first among the points that fit, or do when fused."""
        spots = self.explorer.spots()
        near = [spot for spot in spots if spot.point.peak_bytes <= self._most_bytes * 1.02]
        near.sort(key=lambda spot: (spot.point.latency_s, spot.point.peak_bytes))
        for spot in [*self._fitting_fused(spots), *near]:
            found = self.try_spot(spot)
            if found is not None:
                return self._finish(found)
        if not self.above:
            rest = [spot for spot in spots if spot not in near][-MOST_MISSES:]
            self.above += [trial for spot in rest for trial in self.workshop.trials(spot)]
        assert self.limit.memory_bytes is not None
        raise refuse(self.limit.memory_bytes, self._reached())

    @property
    def _most_bytes(self) -> int:
        """Bytes above resident that no plan may take: the limit's, or eager's."""
        limit = self.limit.memory_bytes
        return (self.setting.eager.peak_bytes if limit is None else limit) - self.setting.resident_bytes

    def _fitting_fused(self, spots: Sequence[Spot]) -> list[Spot]:
        """Points above the bound whose fused form is predicted to fit, fastest first (found by halving)."""
        if self.setting.fuser is None:
            return []
        low, high = self._most_bytes * 1.02, self._most_bytes * FUSED_SLACK
        above = sorted(
            (s for s in spots if low < s.point.peak_bytes <= high), key=lambda s: s.point.peak_bytes
        )
        first, last = 0, len(above)
        started = time.monotonic()
        while first < last and time.monotonic() - started < FUSED_SECONDS:
            middle = (first + last) // 2
            form = next(self.workshop.trials(above[middle]))
            if form.fused and form.above_bytes <= self._most_bytes:
                first = middle + 1
            else:
                last = middle
        return above[:first][::-1][:MOST_MISSES]

    def within_latency(self) -> Outcome:
        """The smallest plan that keeps the limit when run, of those that seem to after a brief look."""
        assert self.limit.latency_ratio is not None
        correction = Correction()
        while len(self.tried) < MOST_MISSES:
            self._look(correction)
            if not self.kept:
                break
            smallest = min(self.kept, key=lambda ran: ran.measured.peak_bytes)
            self.kept.remove(smallest)
            outcome = self._finish(smallest)
            slack = outcome.latency_ratio <= WORTH_SPENDING * self.limit.latency_ratio
            if outcome.met and (self.met or not slack):
                return outcome
            outcome.plan.release()
            if outcome.met:
                self.met, self.kept = outcome, []
            self._learn(correction, smallest.trial.spot, outcome.latency_ratio)
        if self.met is not None:
            return self.met
        found = self._unsplit()
        if found is not None and (outcome := self._finish(found)).met:
            return outcome
        peak = format_bytes(self.setting.eager.peak_bytes)
        within = f" by a plan that stays within eager's peak of {peak}" if self.heavy else ""
        raise Infeasible(
            f"latency {format_ratio(self.limit.latency_ratio)} of eager was not reached{within}: the fastest "
            f"plan that ran took {format_ratio(self.best_ratio)}",
            floor_bytes=self.setting.floor.total_bytes,
            node=self.setting.floor.node,
            source=self.setting.floor.source,
            remedy="raise the latency limit",
        )

    def _unsplit(self) -> _Ran | None:
        """The whole step, if it keeps the limit in some form: only that is offered with prepared weights."""
        whole = self.explorer.bases[0]
        spot = Spot(whole, min(whole.points(), key=lambda point: point.latency_s))
        return None if spot in self.tried else self.try_spot(spot)

    def _look(self, correction: Correction) -> None:
        """Run points until smaller ones are not expected to keep a latency limit, or patience is over.

        The first that should is run; what it took corrects the predictions, the search goes on where the
        corrected limit is, and smaller points are tried as long as they are expected to keep it.
        """
        started, before = time.monotonic(), len(self.tried)
        while (spot := self._next(correction)) is not None:
            enough = bool(self.kept or self.met)
            late = time.monotonic() - started > PATIENCE_SECONDS
            if len(self.tried) - before >= (MOST_SMALLER if enough else MOST_MISSES) or (enough and late):
                return
            self.tried.append(spot)
            self.ran = None
            found = self.try_spot(spot)
            if found is not None:
                self.kept.append(found)
            if self.ran is not None:
                self._learn(correction, spot, self.ran.pairs.ratio)

    def _learn(self, correction: Correction, spot: Spot, ratio: float) -> None:
        """Correct the predictions by what a point took, and search where the limit is now."""
        assert self.limit.latency_ratio is not None
        self.best_ratio = min(self.best_ratio, ratio)
        eager_s = self.setting.eager.latency_s
        correction.learn(spot, ratio * eager_s)
        self.explorer.squeeze(eager_s * self.limit.latency_ratio / correction.factor(spot), SQUEEZE_SECONDS)

    def _next(self, correction: Correction) -> Spot | None:
        """The smallest point that is expected to keep the limit; while none has, the fastest otherwise."""
        assert self.limit.latency_ratio is not None
        bound_s = self.setting.eager.latency_s * self.limit.latency_ratio
        spots = [spot for spot in self.explorer.spots() if spot not in self.tried]
        good = [spot for spot in spots if correction.seconds(spot) <= bound_s]
        known = [ran.measured.peak_bytes for ran in self.kept]
        known += [self.met.measured.peak_bytes] if self.met else []
        if not known:
            smallest = min(good, key=lambda spot: spot.point.peak_bytes, default=None)
            return smallest or min(spots, key=correction.seconds, default=None)
        worth = (min(known) - self.setting.resident_bytes) * WORTH_TRYING
        better = [spot for spot in good if spot.point.peak_bytes <= worth]
        return min(better, key=lambda spot: spot.point.peak_bytes, default=None)

    def try_spot(self, spot: Spot) -> _Ran | None:
        """The better form of a point that keeps the limit when run; None if none does."""
        forms = list(self.workshop.trials(spot, self._most_bytes))
        plain = forms[-1]
        forms.sort(key=self._rank)
        while forms:
            trial = forms.pop(0)
            if not self._fits(trial):
                self.above.append(trial)
                continue
            ran = self._run(trial)
            if ran is None and trial.fused and trial.prepared is None:
                forms += self._more_careful(spot, plain)
            elif ran is not None and self._keeps(ran):
                return self._or_faster(ran, forms)
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
        likely = trial.above_bytes <= self._most_bytes
        return likely and trial.plan.predicted_peak_bytes <= self.limit.memory_bytes

    def _more_careful(self, spot: Spot, plain: Trial) -> list[Trial]:
        """A fused form whose numbers were not eager's is fused less."""
        assert self.setting.fuser is not None
        self.setting.fuser.be_careful()
        again = self.workshop.fused(spot, plain.realised)
        return [] if again is None else [again]

    def _or_faster(self, ran: _Ran, others: Sequence[Trial]) -> _Ran:
        """A fused plan that turns out slower than the same plan unfused is not returned."""
        trial = ran.trial
        rival = next((other for other in others if not other.fused), None)
        if self.limit.memory_bytes is None or not trial.fused or rival is None or not self._fits(rival):
            return ran
        workload = self.setting.program.workload
        if measure_rivals(trial.plan, rival.plan, workload) <= 1.0:
            return ran
        other = self._run(rival)
        return ran if other is None or not self._keeps(other) else other

    def _reached(self) -> Floor:
        """The floor that the smallest of these plans reached which gives eager's numbers."""
        for trial in sorted(self.above, key=lambda each: each.above_bytes):
            if compare_numbers(self.setting.eager, self.setting.program, trial.plan).passed:
                return self.setting.floor.reached_by(trial.plan)
        return self.setting.floor

    def _run(self, trial: Trial) -> _Ran | None:
        """Verify a trial, measure its bytes, and its time briefly; None if its numbers are not eager's."""
        self.enter("verify")
        eager, program, plan = self.setting.eager, self.setting.program, trial.plan
        verdict = compare_numbers(eager, program, plan)
        if not verdict.passed:
            plan.release()
            return None
        self.enter("measure")
        measured = measure_plan(plan, program.workload, brief=True)
        if self.limit.latency_ratio is None:
            pairs = unpaired(eager, measured)
        else:
            pairs = compare_latency(eager, program, plan, measured, brief=True)
        plan.release()
        self.ran = _Ran(trial, verdict, measured, pairs)
        return self.ran

    def _keeps(self, ran: _Ran) -> bool:
        """Whether a plan seems to keep the limit; one within a latency limit is not above eager's peak."""
        holds = _holds(self.limit, ran.measured, ran.pairs)
        if self.limit.latency_ratio is not None and ran.measured.peak_bytes > self.setting.eager.peak_bytes:
            self.heavy = self.heavy or holds
            return False
        return holds

    def _finish(self, ran: _Ran) -> Outcome:
        """Measure a plan that is about to be returned as well as time allows."""
        self.enter("measure")
        setting, explorer, plan = self.setting, self.explorer, ran.trial.plan
        pairs = compare_latency(setting.eager, setting.program, plan, ran.measured)
        measured = ran.measured
        if pairs.pairs:
            measured = replace(measured, latency_s=pairs.plan_s, runs=pairs.pairs)
        resident = setting.resident_bytes
        smallest_bytes = explorer.spots()[-1].point.peak_bytes + resident
        return Outcome(
            plan=plan,
            limit=self.limit,
            met=_holds(self.limit, measured, pairs),
            verified=ran.verdict.against,
            eager=setting.eager,
            measured=measured,
            latency_ratio=pairs.ratio,
            noise=pairs.eager_half_width,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            predicted_latency_s=ran.trial.realised.latency_s,
            max_rel_error=ran.verdict.max_rel_error,
            bit_equal=ran.verdict.bit_equal,
            floor_bytes=min(setting.floor.total_bytes, smallest_bytes),
            floor_node=setting.floor.node,
            search=explorer.summary(self.seconds, resident),
            moves=ran.trial.moves,
            points=explorer.totals(resident),
            device="cpu",
            allocations_per_step=count_allocations(plan, setting.program.workload),
            settings={
                "seed": setting.seed,
                "threads": torch.get_num_threads(),
                "rng": setting.program.rng,
                "made": time.strftime("%Y-%m-%d"),
            },
        )


def _holds(limit: Limit, measured: Measurement, pairs: LatencyPairs) -> bool:
    if limit.memory_bytes is not None:
        return measured.peak_bytes <= limit.memory_bytes
    assert limit.latency_ratio is not None
    return pairs.meets(limit.latency_ratio)
