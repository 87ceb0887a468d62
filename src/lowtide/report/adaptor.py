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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from lowtide.analysis.facts import Facts, assumed_facts, fresh_bytes, workspace_bytes
from lowtide.cost.devices import device_named
from lowtide.cost.estimate import Estimate
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Fission
from lowtide.report.data import (
    Curve,
    Figures,
    Floor,
    Iteration,
    Limit,
    Move,
    Point,
    ReportData,
    Resident,
    SearchRecord,
    Verdict,
)
from lowtide.report.trace import Price, Trace, label_of, resident_by_role, trace
from lowtide.report.tree import OUTSIDE
from lowtide.run.measure import Measurement
from lowtide.run.plan import Plan
from lowtide.run.probe import probe
from lowtide.search.estimator import Estimator
from lowtide.search.floors import describe, floor_of
from lowtide.search.outcome import Outcome
from lowtide.units import format_percent

__all__ = ["by_module", "data_of_outcome", "data_of_plan", "plan_trace"]

MOST_ROWS = 20


def data_of_plan(plan: Plan) -> ReportData:
    """What a plan alone can tell, nothing run or measured: its recipe, its curve, who is alive, its floor."""
    graph = plan.graph
    after = plan_trace(plan, None)
    return ReportData(
        workload=plan.program.workload.name,
        device="cpu",
        limit=Limit(),
        verdict=Verdict(met=True),
        eager=Figures(),
        plan=Figures(),
        plan_predicted=Figures(plan.predicted_peak_bytes, plan.resident_bytes, plan.arena_bytes),
        eager_curve=Curve((), plan.resident_bytes),
        plan_curve=after.curve,
        blocks=after.blocks,
        resident=_resident(plan),
        kept_bytes=plan.kept_bytes,
        plan_holders=after.holders,
        moves=by_module((*_moves_seen(graph, after), *_rules(plan))),
        floor=_floor(graph, plan.facts),
        opaque=plan.program.opaque,
    )


def data_of_outcome(outcome: Outcome) -> ReportData:
    """Everything that a search found, measured and verified."""
    plan, graph = outcome.plan, outcome.plan.program.graph
    here = outcome.verified != "none"
    estimator = Estimator(None if here else device_named(outcome.device))
    facts = probe(graph, "reference") if here else assumed_facts(graph)
    before, after = _eager_trace(graph, facts, estimator.costs), plan_trace(plan, estimator.costs)
    predicted_s = before.curve.edges(True)[-1]
    eager_s, plan_s = outcome.eager.latency_s, outcome.eager.latency_s * outcome.latency_ratio
    return replace(
        data_of_plan(plan),
        device=_device(outcome),
        limit=_limit(outcome),
        verdict=Verdict(outcome.met, outcome.verified, outcome.max_rel_error, outcome.bit_equal),
        eager=_figures(outcome.eager, None),
        plan=_figures(outcome.measured, plan.arena_bytes),
        latency_ratio=outcome.latency_ratio,
        eager_predicted=Figures(before.curve.peak_bytes, graph.resident_bytes, None, None, predicted_s),
        plan_predicted=Figures(
            outcome.predicted_peak_bytes,
            plan.resident_bytes,
            plan.arena_bytes,
            None,
            outcome.predicted_latency_s,
        ),
        eager_curve=before.curve.lasting(eager_s),
        plan_curve=after.curve.lasting(plan_s),
        blocks=after.blocks,
        eager_holders=before.holders,
        plan_holders=after.holders,
        moves=_moves(outcome),
        floor=_floor(graph, estimator.facts(graph), outcome.floor_bytes),
        search=_search(outcome),
        points=_points(outcome),
        command=_command(outcome),
        settings=tuple((name, str(value)) for name, value in outcome.settings.items()),
        versions=_versions(),
    )


def _eager_trace(graph: Graph, facts: Facts, price: Price | None) -> Trace:
    return trace(graph, [node.id for node in graph], {(): facts}, price=price)


def plan_trace(plan: Plan, price: Price | None) -> Trace:
    """What a plan does with memory, step by step; with the estimator's `price` also for how long."""
    recipe, layout = plan.recipe, plan.recipe.layout
    found = trace(
        recipe.graph,
        recipe.order,
        recipe.facts,
        inplace=True,
        offsets=layout.offsets,
        pieces=layout.pieces,
        price=price,
    )
    always_bytes = plan.resident_bytes + plan.kept_bytes
    return replace(found, curve=replace(found.curve, resident_bytes=always_bytes))


def _resident(plan: Plan) -> tuple[Resident, ...]:
    """The caller's bytes by role, and the weights that the plan keeps beside them."""
    own = (Resident("derived weights", plan.kept_bytes),) if plan.kept_bytes else ()
    return (*resident_by_role(plan.program.graph), *own)


def _figures(measured: Measurement | Estimate, arena_bytes: int | None) -> Figures:
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


def _moves_seen(graph: Graph, found: Trace) -> tuple[Move, ...]:
    """The moves that can be read off a graph: regions in parts, and what is made a second time."""
    splits = [
        Move("fission", node.origin.module or node.origin.phase, node.origin.source, detail=label_of(node.op))
        for node in graph
        if isinstance(node.op, Fission)
    ]
    again = [
        Move("remat", block.module, block.source, block.nbytes)
        for block in found.blocks
        if block.kind == "recomputed"
    ]
    return (*splits, *again)


def _rules(plan: Plan) -> Iterator[Move]:
    """The rewrites of a plan, by rule."""
    for rule, count in plan.recipe.rules:
        yield from [Move("rewrite", rule)] * count


def _moves(outcome: Outcome) -> tuple[Move, ...]:
    return by_module(
        [
            Move(
                move.kind,
                move.detail or move.where,  # a rewrite is known by its rule
                move.source,
                move.saved_bytes or None,
                move.cost_s or None,
            )
            for move in outcome.moves
        ]
    )


def by_module(moves: Sequence[Move]) -> tuple[Move, ...]:
    """Moves of one kind in one module joined; paths are cut until at most `MOST_ROWS` rows are left."""
    depth = max((move.where.count(".") + 1 for move in moves), default=1)
    while True:
        rows: dict[tuple[str, str], list[Move]] = defaultdict(list)
        for move in moves:
            rows[move.kind, ".".join(move.where.split(".")[:depth])].append(move)
        if len(rows) <= MOST_ROWS or depth == 1:
            break
        depth -= 1
    joined = [_joined(where or OUTSIDE, found) for (_, where), found in rows.items()]
    return tuple(sorted(joined, key=lambda move: (move.kind, -(move.saved_bytes or 0), move.where)))


def _joined(where: str, moves: Sequence[Move]) -> Move:
    sources = list(dict.fromkeys(move.source for move in moves if move.source))
    source = sources[0] + (f" and {len(sources) - 1} more" if len(sources) > 1 else "") if sources else ""
    saved = [move.saved_bytes for move in moves if move.saved_bytes is not None]
    costs = [move.cost_s for move in moves if move.cost_s is not None]
    return Move(
        moves[0].kind,
        where,
        source,
        sum(saved) if saved else None,
        sum(costs) if costs else None,
        moves[0].detail if len(moves) == 1 else f"{len(moves)} values",
        len(moves),
    )


def _floor(graph: Graph, facts: Facts, reached: int | None = None) -> Floor:
    """The floor of whole operators, what its node needs at once, and what was `reached` under it."""
    found = floor_of(graph, facts)
    least = reached if reached is not None and reached < found.total_bytes else None
    return replace(_explained(graph, facts, found.total_bytes, found.node), least=least)


def _explained(graph: Graph, facts: Facts, nbytes: int, where: str) -> Floor:
    """The floor of `nbytes` at the node that `where` describes: of several, the one that needs the most."""
    chosen = [node for node in graph if describe(node) == where and not graph.is_view(node)]
    if not chosen:
        return Floor(nbytes, where)
    sizes = {key: size for node in graph for key, size in fresh_bytes(graph, node, facts).items()}
    needs = {node.id: _needs(graph, node, facts, sizes) for node in chosen}
    worst = max(chosen, key=lambda node: sum(needs[node.id].values()))
    parts = needs[worst.id]
    reused = graph.resident_bytes + sum(parts.values()) - nbytes
    if 0 < reused <= parts.get("results", 0):  # written over an input that dies here
        parts["results"] -= reused
    told = tuple((name, size) for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size)
    return Floor(nbytes, label_of(worst.op), worst.origin.module, worst.origin.source, told)


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
    latency_s = eager.latency_s * outcome.latency_ratio
    scale = latency_s / outcome.predicted_latency_s if outcome.predicted_latency_s else 1.0
    others = [
        Point(peak_bytes, predicted_s * scale)
        for peak_bytes, predicted_s in outcome.points
        if predicted_s != outcome.predicted_latency_s
    ]
    return (
        Point(eager.peak_bytes, eager.latency_s, True, name="eager"),
        Point(plan.peak_bytes, latency_s, True, True, "this plan"),
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
    drawn = " --rng philox" if outcome.settings.get("rng") == "philox" else ""
    return f"lowtide optimize {name} {asked} {chosen}".rstrip() + drawn


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
