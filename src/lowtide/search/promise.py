"""Keeping the promise: the first point that is verified, measured and within the limit.

Problem.  A predicted point is not yet a plan: placement may waste bytes, a kernel may differ, a time may
be off.  A limit is met when run, or refused with the floor.

Method.  Points that should meet the limit are tried, best first.  Each is built (placement included),
compared with eager on the user's own model, measured, and returned if it holds.  Measured times rescale
the predicted ones, so that a latency limit is not tried point by point.

Not done here: finding points (`explorer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lowtide.analysis.lifetime import lifetimes
from lowtide.capture import Program
from lowtide.cost.estimate import Estimate
from lowtide.errors import Infeasible
from lowtide.ir import Graph
from lowtide.place import Placement, place
from lowtide.run.kernels import Kernels
from lowtide.run.layout import placement_problem
from lowtide.run.measure import LatencyPairs, Measurement, measure_pairs, measure_plan
from lowtide.run.plan import Plan, build_plan
from lowtide.run.verify import Verdict, verify
from lowtide.search.bases import realise_base
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Explorer, Spot
from lowtide.search.floors import Floor
from lowtide.search.levels import Realised
from lowtide.search.moves import count_moves, moves_of
from lowtide.search.outcome import Limit, Outcome, SearchRecord
from lowtide.units import format_bytes, format_ratio

__all__ = ["Setting", "keep_promise", "refuse"]

PLACEMENT_SECONDS = 1.0
"""How long an exact placement may take where the greedy one wastes bytes."""

MOST_MISSES = 8
"""Points that may fail when run before a latency limit is refused."""


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

    @property
    def resident_bytes(self) -> int:
        """Bytes that the caller owns."""
        return self.program.graph.resident_bytes


@dataclass(frozen=True)
class _Trial:
    spot: Spot
    realised: Realised
    plan: Plan


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
    if limit.memory_bytes is not None:
        outcome = _within_memory(setting, limit, explorer, enter, seconds)
    else:
        outcome = _within_latency(setting, limit, explorer, enter, seconds)
    return outcome


def _within_memory(
    setting: Setting, limit: Limit, explorer: Explorer, enter: Callable[[str], None], seconds: float
) -> Outcome:
    assert limit.memory_bytes is not None
    bound = limit.memory_bytes - setting.resident_bytes
    near = [spot for spot in explorer.spots() if spot.point.peak_bytes <= bound * 1.02]
    above: list[_Trial] = []
    for trial in _trials(setting, sorted(near, key=lambda s: (s.point.latency_s, s.point.peak_bytes)), enter):
        if trial.plan.predicted_peak_bytes > limit.memory_bytes:
            above.append(trial)
            continue
        outcome = _judge(setting, limit, explorer, enter, seconds, trial)
        if outcome is not None and outcome.met:
            return outcome
    above += _trials(setting, [s for s in explorer.spots() if s not in near][-MOST_MISSES:], enter)
    raise refuse(limit.memory_bytes, _reached(setting, above))


def _reached(setting: Setting, trials: Sequence[_Trial]) -> Floor:
    """The floor that the smallest of these plans reached which gives eager's numbers."""
    for trial in sorted(trials, key=lambda each: each.plan.predicted_peak_bytes):
        if verify(setting.program, trial.plan).passed:
            return setting.floor.reached_by(trial.plan)
    return setting.floor


def _within_latency(
    setting: Setting, limit: Limit, explorer: Explorer, enter: Callable[[str], None], seconds: float
) -> Outcome:
    """Smallest first among the points whose rescaled time is within the limit."""
    assert limit.latency_ratio is not None
    scale, best_ratio = 1.0, float("inf")
    left = sorted(explorer.spots(), key=lambda spot: spot.point.peak_bytes)
    bound = explorer.unconstrained_s() * limit.latency_ratio
    for _ in range(MOST_MISSES):
        left = [spot for spot in left if spot.point.latency_s * scale <= bound] or left[-1:]
        trial = next(_trials(setting, left[:1], enter))
        outcome = _judge(setting, limit, explorer, enter, seconds, trial)
        if outcome is not None and outcome.met:
            return outcome
        if outcome is not None:
            best_ratio = min(best_ratio, outcome.latency_ratio)
            scale = max(
                scale, outcome.latency_ratio * explorer.unconstrained_s() / trial.spot.point.latency_s
            )
        left = left[1:]
        if not left:
            break
    raise Infeasible(
        f"latency {format_ratio(limit.latency_ratio)} of eager was not reached: the fastest plan that ran "
        f"took {format_ratio(best_ratio)}",
        floor_bytes=setting.floor.total_bytes,
        node=setting.floor.node,
        source=setting.floor.source,
        remedy="raise the latency limit",
    )


def _trials(setting: Setting, spots: Sequence[Spot], enter: Callable[[str], None]) -> Iterator[_Trial]:
    for spot in spots:
        enter("build")
        realised = realise_base(spot.base, spot.point, setting.estimator)
        moves = count_moves(spot, setting.kernels)
        plan = build_plan(
            setting.program, realised.graph, realised.order, placement=_placed(setting, realised), moves=moves
        )
        plan.use_kernels(setting.kernels)
        yield _Trial(spot, realised, plan)


def _placed(setting: Setting, realised: Realised) -> Placement:
    facts = setting.estimator.facts(realised.graph)
    buffers = lifetimes(realised.graph, realised.order, facts, inplace=True)
    return place(placement_problem(buffers), PLACEMENT_SECONDS)


def _judge(
    setting: Setting,
    limit: Limit,
    explorer: Explorer,
    enter: Callable[[str], None],
    seconds: float,
    trial: _Trial,
) -> Outcome | None:
    """Verify and measure a trial; None if its numbers are not eager's."""
    enter("verify")
    verdict: Verdict = verify(setting.program, trial.plan)
    if not verdict.passed:
        return None
    enter("measure")
    measured = measure_plan(trial.plan, setting.program.workload)
    pairs: LatencyPairs = measure_pairs(trial.plan, setting.program.workload)
    smallest_bytes = explorer.spots()[-1].point.peak_bytes + setting.resident_bytes
    record = tuple(
        (i.elapsed_s, i.states, i.peak_bytes + setting.resident_bytes, i.latency_s) for i in explorer.record
    )
    return Outcome(
        plan=trial.plan,
        limit=limit,
        met=_holds(limit, measured, pairs),
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
        search=SearchRecord(seconds, explorer.states, explorer.stop_reason, record),
        moves=moves_of(trial.spot, setting.kernels),
        points=tuple(
            (s.point.peak_bytes + setting.resident_bytes, s.point.latency_s) for s in explorer.spots()
        ),
        device="cpu",
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
