"""Plans for a device that is not here: predicted throughout, and said to be.

Problem.  Whether a step fits another machine, and at what cost, is wanted before anybody rents it; the model
may be far larger than this machine's memory.

Method.  The workload is built and captured under fake tensors, so nothing is allocated.  Sizes are what
the graph implies, times come from the device's roofline.  The same search runs; its best point for a limit
becomes a plan that can be explained and drawn, and that refuses to run.

Not done here: operators are the CPU's, their workspace and their libraries' are not known on the device;
outcomes carry ``verified="none"``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lowtide.capture import Program
from lowtide.capture.internals import FakeTensor
from lowtide.capture.recording import named_tensors
from lowtide.cost.devices import Device
from lowtide.cost.estimate import Estimate, estimate_step
from lowtide.errors import Infeasible
from lowtide.run.plan import HERE, Plan, build_plan
from lowtide.search.bases import realise_base
from lowtide.search.estimator import Estimator, assumed_tree
from lowtide.search.explorer import Explorer, Spot
from lowtide.search.floors import floor_of
from lowtide.search.levels import Realised
from lowtide.search.moves import count_moves, moves_of
from lowtide.search.outcome import Limit, Outcome
from lowtide.search.promise import Setting, refuse
from lowtide.search.trials import placed
from lowtide.transforms.algebra import take_apart
from lowtide.units import format_ratio

__all__ = ["foreign_setting", "holds_fakes", "is_foreign", "predict_outcome"]


def is_foreign(device: str | None) -> bool:
    """Whether a plan for `device` is only a prediction on this machine."""
    return device not in (None, HERE)


def holds_fakes(program: Program) -> bool:
    """Whether the workload of `program` was built without data."""
    return any(isinstance(named.tensor, FakeTensor) for named in named_tensors(program.workload))


def foreign_setting(program: Program, device: Device, seed: int) -> Setting:
    """What a search for `device` starts from; eager's figures are Estimates."""
    estimator = Estimator(device)
    captured = program.graph
    order = [node.id for node in captured]
    eager = estimate_step(captured, order, estimator.facts(captured), estimator.costs(captured))
    graph = take_apart(captured).graph
    floor = floor_of(graph, estimator.facts(graph))
    return Setting(program, graph, estimator, eager, floor, seed, {}, device.name)


def predict_outcome(
    setting: Setting, limit: Limit, explorer: Explorer, enter: Callable[[str], None], seconds: float
) -> Outcome:
    """The best point for `limit` as a plan, nothing run; raises Infeasible if none is within it."""
    enter("build")
    for spot in _within(setting, limit, explorer):
        realised = realise_base(spot.base, spot.point, setting.estimator)
        plan = _plan(setting, spot, realised)
        bound = limit.memory_bytes
        if bound is None or plan.predicted_peak_bytes <= bound:
            return _outcome(setting, limit, explorer, seconds, spot, realised, plan)
    raise _refusal(setting, limit, explorer)


def _within(setting: Setting, limit: Limit, explorer: Explorer) -> list[Spot]:
    """The points that should keep the limit, best first."""
    spots = explorer.spots()
    if limit.memory_bytes is not None:
        bound = limit.memory_bytes - setting.resident_bytes
        near = [spot for spot in spots if spot.point.peak_bytes <= bound]
        return sorted(near, key=lambda spot: (spot.point.latency_s, spot.point.peak_bytes))
    slowest = setting.eager.latency_s * (limit.latency_ratio or float("inf"))
    near = [spot for spot in spots if spot.point.latency_s <= slowest]
    return sorted(near, key=lambda spot: (spot.point.peak_bytes, spot.point.latency_s))


def _plan(setting: Setting, spot: Spot, realised: Realised) -> Plan:
    return build_plan(
        setting.program,
        realised.graph,
        realised.order,
        placement=placed(realised, setting.estimator),
        facts=assumed_tree(realised.graph),
        moves=count_moves(spot, {}),
        device=setting.device,
    )


def _outcome(
    setting: Setting,
    limit: Limit,
    explorer: Explorer,
    seconds: float,
    spot: Spot,
    realised: Realised,
    plan: Plan,
) -> Outcome:
    resident = setting.resident_bytes
    predicted = Estimate(resident, plan.predicted_peak_bytes, realised.latency_s)
    return Outcome(
        plan=plan,
        limit=limit,
        met=True,
        verified="none",
        eager=setting.eager,
        measured=predicted,
        latency_ratio=predicted.latency_s / setting.eager.latency_s,
        noise=0.0,
        predicted_peak_bytes=predicted.peak_bytes,
        predicted_latency_s=predicted.latency_s,
        max_rel_error=float("nan"),
        bit_equal=False,
        floor_bytes=min(setting.floor.total_bytes, explorer.spots()[-1].point.peak_bytes + resident),
        floor_node=setting.floor.node,
        search=explorer.summary(seconds, resident),
        moves=moves_of(spot, {}),
        points=explorer.totals(resident),
        device=setting.device,
        settings={"seed": setting.seed, "made": time.strftime("%Y-%m-%d")},
    )


def _refusal(setting: Setting, limit: Limit, explorer: Explorer) -> Infeasible:
    if limit.memory_bytes is not None:
        smallest = explorer.spots()[-1]
        plan = _plan(setting, smallest, realise_base(smallest.base, smallest.point, setting.estimator))
        return refuse(limit.memory_bytes, setting.floor.reached_by(plan))
    fastest = min(spot.point.latency_s for spot in explorer.spots()) / setting.eager.latency_s
    return Infeasible(
        f"latency {format_ratio(limit.latency_ratio or 0.0)} of eager was not reached on {setting.device}: "
        f"the fastest plan is predicted at {format_ratio(fastest)}",
        floor_bytes=setting.floor.total_bytes,
        node=setting.floor.node,
        source=setting.floor.source,
        remedy="raise the latency limit",
    )
