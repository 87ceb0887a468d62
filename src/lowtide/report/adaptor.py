"""From a plan, or from the outcome of a search, to the plain data that a report shows.

Method.  Measured figures are taken over as they are; curves, blocks and holders come from
`lowtide.report.trace`.  Eager's curve is the captured graph in program order with the reference
executor's facts; the plan's curve has the arena's facts and its in-place reuse.

Predicted latencies of the frontier are scaled by what the chosen plan's measurement says about its own
prediction, so that measured and predicted points can stand in one picture.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import replace

import torch

from lowtide.analysis.facts import Facts, assumed_facts, fresh_bytes, workspace_bytes
from lowtide.cost.devices import device_named
from lowtide.ir.graph import Graph, Node
from lowtide.report.data import (
    Figures,
    Floor,
    Iteration,
    Limit,
    Move,
    Point,
    ReportData,
    SearchRecord,
    Verdict,
)
from lowtide.report.trace import Trace, label_of, resident_by_role, trace
from lowtide.run.measure import Measurement
from lowtide.run.plan import Plan
from lowtide.run.probe import probe
from lowtide.search.estimator import Estimator
from lowtide.search.floors import describe
from lowtide.search.outcome import Outcome
from lowtide.units import format_percent

__all__ = ["data_of_outcome", "data_of_plan"]


def data_of_plan(plan: Plan) -> ReportData:
    """What a plan alone can tell, nothing measured: its recipe, its curve, who is alive, its floor."""
    program = plan.program
    before = _eager_trace(program.graph, assumed_facts(program.graph), {})
    after = _plan_trace(plan, {})
    resident = resident_by_role(plan.graph)
    return ReportData(
        workload=program.workload.name,
        device="cpu",
        limit=Limit(),
        verdict=Verdict(met=True),
        eager=Figures(),
        plan=Figures(),
        eager_predicted=Figures(before.curve.peak_bytes, before.curve.resident_bytes),
        plan_predicted=Figures(plan.predicted_peak_bytes, plan.resident_bytes, plan.arena_bytes),
        eager_curve=before.curve,
        plan_curve=after.curve,
        blocks=after.blocks,
        resident=resident,
        eager_holders=before.holders,
        plan_holders=after.holders,
        moves=tuple(Move(kind, f"{count} in all") for kind, count in sorted(plan.moves.items())),
        floor=_floor(plan.graph, plan.facts, ""),
        opaque=program.opaque,
    )


def data_of_outcome(outcome: Outcome) -> ReportData:
    """Everything that a search found, measured and verified."""
    plan, graph = outcome.plan, outcome.plan.program.graph
    here = outcome.verified != "none"
    estimator = Estimator(None if here else device_named(outcome.device))
    facts = probe(graph, "reference") if here else assumed_facts(graph)
    costs = estimator.costs(graph)
    before, after = _eager_trace(graph, facts, costs), _plan_trace(plan, estimator.costs(plan.graph))
    return replace(
        data_of_plan(plan),
        device=_device(outcome),
        limit=_limit(outcome),
        verdict=Verdict(outcome.met, outcome.verified, outcome.max_rel_error, outcome.bit_equal),
        eager=_figures(outcome.eager, None),
        plan=_figures(outcome.measured, plan.arena_bytes),
        latency_ratio=outcome.latency_ratio,
        eager_predicted=Figures(
            before.curve.peak_bytes, graph.resident_bytes, None, None, sum(costs.values())
        ),
        plan_predicted=Figures(
            outcome.predicted_peak_bytes,
            plan.resident_bytes,
            plan.arena_bytes,
            None,
            outcome.predicted_latency_s,
        ),
        eager_curve=before.curve,
        plan_curve=after.curve,
        blocks=after.blocks,
        eager_holders=before.holders,
        plan_holders=after.holders,
        moves=_moves(outcome),
        floor=_outcome_floor(outcome),
        search=_search(outcome),
        points=_points(outcome),
        command=_command(outcome),
        settings=tuple((name, str(value)) for name, value in outcome.settings.items()),
        versions=_versions(),
    )


def _eager_trace(graph: Graph, facts: Facts, costs: Mapping[int, float]) -> Trace:
    return trace(graph, [node.id for node in graph], facts, seconds=costs)


def _plan_trace(plan: Plan, costs: Mapping[int, float]) -> Trace:
    offsets = plan.placement.offsets
    return trace(plan.graph, plan.schedule.order, plan.facts, inplace=True, offsets=offsets, seconds=costs)


def _figures(measured: Measurement, arena_bytes: int | None) -> Figures:
    return Figures(
        measured.peak_bytes,
        measured.resident_bytes,
        arena_bytes,
        measured.rss_peak_bytes,
        measured.latency_s,
    )


def _limit(outcome: Outcome) -> Limit:
    limit = outcome.limit
    if limit.memory_bytes is None:
        return Limit(latency_ratio=limit.latency_ratio)
    share = round(limit.memory_bytes / outcome.eager.peak_bytes, 3)
    return Limit(limit.memory_bytes, None, f"{format_percent(share)} of eager's peak")


def _moves(outcome: Outcome) -> tuple[Move, ...]:
    """The moves by kind and module, largest saving first."""
    found: dict[tuple[str, str], Move] = {}
    counts: dict[tuple[str, str], int] = {}
    for move in outcome.moves:
        key = (move.kind, move.where)
        old = found.get(key, Move(move.kind, move.where, move.source, 0, 0.0))
        saved, cost_s = (old.saved_bytes or 0) + move.saved_bytes, (old.cost_s or 0.0) + move.cost_s
        counts[key] = counts.get(key, 0) + 1
        found[key] = replace(old, saved_bytes=saved, cost_s=cost_s, detail=_counted(counts[key]))
    return tuple(sorted(found.values(), key=lambda move: (-(move.saved_bytes or 0), move.kind, move.where)))


def _counted(count: int) -> str:
    return "" if count == 1 else f"{count} values"


def _floor(graph: Graph, facts: Facts, where: str) -> Floor | None:
    """The node that needs the most at once (of those that `where` describes, if given), and what it needs."""
    known = facts.keys()
    nodes = [node for node in graph if node.id in known and not graph.is_view(node)]
    chosen = [node for node in nodes if describe(node) == where] or nodes
    if not chosen:
        return None
    sizes = {storage: size for node in nodes for storage, size in fresh_bytes(graph, node, facts).items()}
    needs = {node.id: _needs(graph, node, facts, sizes) for node in chosen}
    worst = max(chosen, key=lambda node: sum(needs[node.id].values()))
    parts = sorted(needs[worst.id].items(), key=lambda part: -part[1])
    nbytes = graph.resident_bytes + sum(needs[worst.id].values())
    return Floor(nbytes, label_of(worst.op), worst.origin.module, worst.origin.source, tuple(parts))


def _outcome_floor(outcome: Outcome) -> Floor:
    plan = outcome.plan
    found = _floor(plan.graph, plan.facts, outcome.floor_node) or Floor(0, outcome.floor_node)
    return replace(found, nbytes=outcome.floor_bytes)


def _needs(graph: Graph, node: Node, facts: Facts, sizes: Mapping[int, int]) -> dict[str, int]:
    """What has to exist while `node` runs, resident bytes apart."""
    read = {graph.values[value].storage for value in node.inputs}
    made = {graph.values[value].storage for value in node.outputs} - read
    parts = {
        "inputs": sum(sizes.get(storage, 0) for storage in read),
        "results": sum(sizes.get(storage, 0) for storage in made),
        "workspace": workspace_bytes(graph, node, facts),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _search(outcome: Outcome) -> SearchRecord:
    record = outcome.search
    found = tuple(Iteration(*entry) for entry in record.iterations)
    return SearchRecord(record.states, record.seconds, record.stop_reason, found)


def _points(outcome: Outcome) -> tuple[Point, ...]:
    """Eager and the plan as measured, the other points as predicted on the plan's scale."""
    eager, plan = outcome.eager, outcome.measured
    scale = plan.latency_s / outcome.predicted_latency_s if outcome.predicted_latency_s else 1.0
    others = [
        Point(peak_bytes, latency_s * scale)
        for peak_bytes, latency_s in outcome.points
        if latency_s != outcome.predicted_latency_s
    ]
    return (
        Point(eager.peak_bytes, eager.latency_s, True, name="eager"),
        Point(plan.peak_bytes, eager.latency_s * outcome.latency_ratio, True, True, "this plan"),
        *others,
    )


def _command(outcome: Outcome) -> str:
    """The command line of this run; empty for workloads that have no name on it."""
    name = outcome.plan.program.workload.name
    if ":" not in name:
        return ""
    limit = outcome.limit
    asked = (
        f"--memory {limit.memory_bytes}B"
        if limit.memory_bytes is not None
        else f"--latency {limit.latency_ratio}x"
    )
    chosen = " ".join(
        f"--{option} {outcome.settings[option]}"
        for option in ("seed", "threads")
        if option in outcome.settings
    )
    return f"lowtide optimize {name} {asked} {chosen}".rstrip()


def _device(outcome: Outcome) -> str:
    if outcome.device != "cpu":
        return outcome.device
    threads = outcome.settings.get("threads", torch.get_num_threads())
    return f"cpu ({platform.machine()}, {threads} threads)"


def _versions() -> tuple[tuple[str, str], ...]:
    try:
        ours = importlib.metadata.version("lowtide")
    except importlib.metadata.PackageNotFoundError:
        ours = "not installed, run from its source"
    return (("lowtide", ours), ("torch", torch.__version__), ("python", platform.python_version()))
