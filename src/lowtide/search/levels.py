"""A level of the search: one graph (the whole, or the body of a split region) with its own frontier.

Problem.  Recomputation, order and splitting meet at every level of nesting, and a limit on the whole has
to become a limit on each body.

Method.  A level takes a graph and regions to split.  Each region becomes one node with a *menu*: for every
number of parts its body is a level of its own, and every point of that level is an option, which needs so
much workspace and takes so long.  Then the level fixes a good order (updates right after their gradients),
mirrors the graph in that order, and searches recomputation and options together (`recompute.py`): what a
region may hold is judged with what everything else holds at that step.  `realise` turns a point into a
graph, from the outside in, and asks the schedulers again, because decisions open better orders.

Invariants.  All options of one region have the same node in the level's graph: its inputs and outputs
do not depend on how finely it is split.  Bodies of other sizes repeat the decisions made for the largest.

Not done here: which regions (`splits.py`), placement and running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.analysis.facts import Facts
from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.analysis.timeline import Timeline, timeline
from lowtide.cost.profiled import bodies_s, largest_body
from lowtide.errors import LowtideError
from lowtide.ir import Fission, Graph, Node
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.copies import copies_of
from lowtide.search.estimator import Estimator
from lowtide.search.mirror import Mirror, build_mirror
from lowtide.search.recompute import Halted, Menu, Point, Recomputation, RecomputeOptions
from lowtide.transforms import remat, splitting
from lowtide.transforms.halo import HaloCandidate
from lowtide.transforms.splitting import SplitCandidate

__all__ = ["Choice", "Level", "Realised", "Region", "Split", "Variant", "open_level", "realise", "reordered"]

MOST_SHARED = 0.1
"""Of an operator's bytes: what its parts may have in common if their times are to be in proportion."""

MOST_OPTIONS = 32
"""Options on one menu; more would make no difference that placement keeps."""


@dataclass(frozen=True)
class Split:
    """A region in several numbers of parts; `inside` says which regions of a body to split in turn.

    Without `inside` a body is only ordered: nothing in it is recomputed.
    """

    candidates: tuple[SplitCandidate, ...]
    inside: Callable[[Graph], Sequence[Split]] | None = None


@dataclass(frozen=True)
class Variant:
    """A region in one number of parts: what its node does, and the level of its largest body.

    A part takes what the level's point takes, `parts` times in all (other bodies by their time), and
    `merging_s` on top for adding up sums.
    """

    candidate: SplitCandidate
    op: Fission
    level: Level
    parts: float
    merging_s: float

    @property
    def seconds(self) -> float:
        """What it takes with nothing decided inside."""
        return self.parts * self.level.search.points[0].latency_s + self.merging_s


@dataclass(frozen=True, eq=False)
class Choice:
    """An option of a region: a variant, and a point of its body's level."""

    variant: Variant
    point: Point
    workspace_bytes: int
    seconds: float


@dataclass(frozen=True)
class Region:
    """A split region: its node in the level's graph, and its variants by rising number of parts."""

    node: int
    variants: tuple[Variant, ...]


@dataclass
class Level:
    """A graph in its base order and the running search on it.

    `source` is the graph before the regions were split; `search.menus` belong to `regions`.
    """

    graph: Graph
    late: frozenset[int]
    search: Recomputation
    source: Graph
    regions: tuple[Region, ...] = ()

    @property
    def states(self) -> int:
        """Judged states so far, those of the bodies included."""
        inner = (variant.level.states for region in self.regions for variant in region.variants)
        return self.search.states + sum(inner)


@dataclass(frozen=True)
class Realised:
    """A graph with the order to run it in, its timeline (in-place reuse on) and predicted seconds."""

    graph: Graph
    order: tuple[int, ...]
    timeline: Timeline
    latency_s: float


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The same graph with `order` as its program order; `order` must respect `graph.dependencies`."""
    return replace(graph, nodes=tuple(graph.node[node] for node in order))


def _never() -> bool:
    return False


# -- opening -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opening:
    """What all levels of one base share."""

    estimator: Estimator
    seed: int
    options: RecomputeOptions
    halted: Halted


def open_level(
    graph: Graph,
    estimator: Estimator,
    seed: int,
    as_run: Callable[[Graph], Graph] | None = None,
    options: RecomputeOptions | None = None,
    splits: Sequence[Split] = (),
    halted: Halted = _never,
) -> Level:
    """Split regions of `graph`, order it, mirror it, and start its search.

    `as_run` gives the form of a body that runs: what is an output there lies outside, without memory here.
    Regions that turn out to be illegal are left whole.
    """
    opening = _Opening(estimator, seed, options or RecomputeOptions(), halted)
    return _open(opening, graph, as_run, splits)


def _open(
    opening: _Opening,
    source: Graph,
    as_run: Callable[[Graph], Graph] | None,
    splits: Sequence[Split],
    rows: bool = False,
) -> Level:
    estimator, graph = opening.estimator, source
    regions: list[Region] = []
    for split in splits:
        graph, region = _split(opening, graph, split)
        regions += [region] if region is not None else []
    graph = reordered(graph, _base_order(graph, estimator.facts(graph)))
    late = remat.late_nodes(graph)
    runs = graph if as_run is None else as_run(graph)
    order = [node.id for node in runs.nodes]
    delivered = None if as_run is None else frozenset(graph.values[out].storage for out in graph.outputs)
    known = {region.node: region.variants[0].seconds for region in regions}
    prices = estimator.prices(runs, rows, known)
    mirror = build_mirror(runs, order, estimator.facts(runs), prices, late, delivered)
    allowed = remat.recomputable(graph, late)
    search = Recomputation(
        mirror,
        _mask(mirror, allowed),
        tuple(_mask(mirror, members) for members in remat.segments(graph, allowed).values()),
        opening.seed,
        opening.options,
        tuple(_menu(mirror, region) for region in regions),
        tuple(_mask(mirror, members) for members in copies_of(graph, allowed)),
    )
    return Level(graph, late, search, source, tuple(regions))


def _base_order(graph: Graph, facts: Facts) -> tuple[int, ...]:
    """The best order, with parameter gradients and updates as early as they can be.

    A gradient is free once its parameter is updated, and the activation that it was made from is free before
    the gradient of the activation takes its room.  Where the peak is elsewhere the schedulers do not care,
    but it moves when more is decided.
    """
    order = tuple(best_schedule(graph, facts, inplace=True).order)
    early = _updates_early(graph, order)
    peaks = [timeline(graph, each, facts, inplace=True).peak_above_bytes for each in (early, order)]
    return early if peaks[0] <= peaks[1] else order


def _serving_updates(graph: Graph) -> set[int]:
    """Updates, and what runs for one of them, or makes the gradients of several (weight and bias)."""
    serves: dict[int, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        if node.origin.phase == "update" and not node.outputs:
            serves[node.id] = frozenset((node.id,))
            continue
        readers = [graph.readers[value] for value in node.outputs if graph.readers[value]]
        kept = any(value in graph.outputs for value in node.outputs)
        if readers and not kept and all(reader in serves for each in readers for reader in each):
            updates = [frozenset().union(*(serves[reader] for reader in each)) for each in readers]
            if all(len(each) == 1 for each in updates):
                serves[node.id] = frozenset().union(*updates)
    return set(serves)


def _updates_early(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """`order` with what serves updates alone right after the last of the others that it waits for."""
    moved = _serving_updates(graph)
    anchor: dict[int, int] = {}
    for place, number in enumerate(order):
        waits = (anchor[each] for each in graph.dependencies[number])
        anchor[number] = max(waits, default=-1) if number in moved else place
    return tuple(sorted(order, key=lambda number: (anchor[number], number in moved)))


def _mask(mirror: Mirror, storages: frozenset[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([storage in storages for storage in mirror.storage_ids], np.bool_)


def _split(opening: _Opening, graph: Graph, split: Split) -> tuple[Graph, Region | None]:
    """`graph` with the region as one node, run by its first variant; as it was if no variant is legal."""
    result, number = graph, -1
    variants: list[Variant] = []
    for candidate in split.candidates:
        if variants and opening.halted():
            break
        try:
            applied = splitting.apply(graph, candidate).graph
        except LowtideError:
            continue
        node = _newest(applied)
        variant = _variant(opening, applied, node, candidate, split)
        if not variants:
            number = node.id
            result = _with_op(applied, number, _sketch(variant))
        variants.append(variant)
    return (result, Region(number, tuple(variants))) if variants else (graph, None)


def _newest(graph: Graph) -> Node:
    """The Fission that was applied last: its number is the highest."""
    return max((node for node in graph.nodes if isinstance(node.op, Fission)), key=lambda node: node.id)


def _sketch(variant: Variant) -> Fission:
    """A region as its level sees it, only to be judged: every part runs the largest body."""
    parts = tuple(replace(part, body=0) for part in variant.op.parts)
    return replace(variant.op, bodies=(variant.level.graph,), parts=parts)


def _with_op(graph: Graph, number: int, op: Fission) -> Graph:
    nodes = tuple(replace(node, op=op) if node.id == number else node for node in graph.nodes)
    return replace(graph, nodes=nodes)


def _variant(opening: _Opening, graph: Graph, node: Node, candidate: SplitCandidate, split: Split) -> Variant:
    op = node.op
    assert isinstance(op, Fission)
    first = op.bodies[largest_body(op)]

    def as_run(body: Graph) -> Graph:  # how results leave a body depends on what in it makes them
        return body_as_run(body, deliveries(graph, replace(node, op=replace(op, bodies=(body,)))))

    inside = split.inside(first) if split.inside is not None else ()
    rows = isinstance(candidate, HaloCandidate) or _in_proportion(graph, node, op)
    level = _open(opening, first, as_run, inside, rows)
    if split.inside is not None:
        top = level.search.points[0].peak_bytes
        level.search.sweep(top // 16, opening.halted)
    prices = opening.estimator.prices(first, rows)
    seconds, most_s = bodies_s(op, prices), sum(prices.values())
    parts = sum(seconds[part.body] for part in op.parts) / most_s if most_s else len(op.parts)
    return Variant(candidate, op, level, parts, opening.estimator.merging_s(graph, node))


def _in_proportion(graph: Graph, node: Node, op: Fission) -> bool:
    """Whether the parts of a single operator share next to nothing: their times follow from their sizes."""
    part = op.parts[0]
    pairs = [*zip(node.inputs, part.inputs, strict=True), *zip(node.outputs, part.outputs, strict=True)]
    sizes = [(graph.values[value].meta.span_bytes, piece.axis is None) for value, piece in pairs]
    shared = sum(nbytes for nbytes, whole in sizes if whole)
    return len(op.bodies[0]) == 1 and shared <= MOST_SHARED * sum(nbytes for nbytes, _ in sizes)


def _menu(mirror: Mirror, region: Region) -> Menu:
    """The options of all variants that no other option beats, thinned."""
    found = [
        Choice(variant, point, point.peak_bytes, variant.merging_s + variant.parts * point.latency_s)
        for variant in region.variants
        for point in variant.level.search.points
    ]
    found.sort(key=lambda each: (each.seconds, each.workspace_bytes))
    kept: list[Choice] = []
    for each in found:
        if not kept or each.workspace_bytes < kept[-1].workspace_bytes:
            kept.append(each)
    return Menu(mirror.node_ids.index(region.node), tuple(_thinned(kept)))


def _thinned(options: list[Choice]) -> list[Choice]:
    """At most about `MOST_OPTIONS`, the first and the last among them, by about equal steps of workspace."""
    if len(options) <= MOST_OPTIONS:
        return options
    top, floor = options[0].workspace_bytes, max(options[-1].workspace_bytes, 1)
    marks = np.geomspace(max(top, floor + 1), floor, MOST_OPTIONS)
    kept = [options[0]]
    for mark in marks[1:]:
        fits = next((each for each in options if each.workspace_bytes <= mark), options[-1])
        if fits is not kept[-1]:
            kept.append(fits)
    return kept


# -- realising -----------------------------------------------------------------------------------------


def realise(level: Level, point: Point, estimator: Estimator) -> Realised:
    """The graph of a point with the best of the mirrored order and a fresh schedule."""
    graph, order, curve = _decided(level, level.source, point, estimator)
    costs = estimator.costs(graph)
    return Realised(graph, order, curve, sum(costs.get(node.id, 0.0) for node in graph.nodes))


def _decided(
    level: Level, source: Graph, point: Point, estimator: Estimator
) -> tuple[Graph, tuple[int, ...], Timeline]:
    """`source`, the level's or one with the same nodes for another size of part, as the point decides."""
    graph = source
    for region, choice in zip(level.regions, point.options, strict=True):
        applied = splitting.apply(graph, splitting.resized(graph, choice.variant.candidate)).graph
        graph = _run_as(applied, choice, estimator)
        assert region.node in graph.node
    graph = reordered(graph, [node.id for node in level.graph.nodes])
    chosen = _same_storages(level.graph, graph, point.chosen)
    graph = remat.apply(graph, remat.RematCandidate(chosen, level.late)).graph
    return graph, *best_order(graph, estimator.facts(graph))


def best_order(graph: Graph, facts: Facts) -> tuple[tuple[int, ...], Timeline]:
    """Program order or a fresh schedule, whichever needs less, with its timeline."""
    orders = [tuple(node.id for node in graph.nodes), tuple(best_schedule(graph, facts, inplace=True).order)]
    curves = [timeline(graph, order, facts, inplace=True) for order in orders]
    best = min(range(len(orders)), key=lambda index: curves[index].peak_above_bytes)
    return orders[best], curves[best]


def _run_as(graph: Graph, choice: Choice, estimator: Estimator) -> Graph:
    """`graph` with its newest Fission's bodies as the choice says."""
    node = _newest(graph)
    op, level = node.op, choice.variant.level
    assert isinstance(op, Fission)
    made = (_decided(level, body, choice.point, estimator) for body in op.bodies)
    bodies = tuple(reordered(body, order) for body, order, _ in made)
    return _with_op(graph, node.id, replace(op, bodies=bodies))


def _same_storages(old: Graph, new: Graph, chosen: frozenset[int]) -> frozenset[int]:
    """The storages of `new` that the same nodes make as those of `old`."""
    owner = remat.owner_of(old)
    places = {(owner[storage], _position(old, old.node[owner[storage]], storage)) for storage in chosen}
    return frozenset(new.values[new.node[node].outputs[position]].storage for node, position in places)


def _position(graph: Graph, node: Node, storage: int) -> int:
    return next(k for k, out in enumerate(node.outputs) if graph.values[out].storage == storage)
