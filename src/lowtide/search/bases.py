"""Bases of the search: the whole graph, with none, one or many of its regions split into parts.

Problem.  Splitting and recomputation trade the same bytes: a split leaves less to recompute, and a body
can be recomputed as any graph can.  A limit on the whole has to become a limit on a body.

Method.  A base is an outer level in which the chosen regions are Fission nodes.  Where one of them holds
most of the graph (the batch, from forward through backward), its body is a level of its own: the bytes
that the outer graph holds while it runs are known once the order is fixed, what is left of a target is
the target of the body.  Small regions (an operator whose workspace is in the way) only shrink what their
node needs.  All bases together form the frontier; `realise_base` turns a point into a graph and an order.

Invariants.  A point's peak and time were judged on mirrors; `realise_base` may only improve them (it asks
the schedulers again).  Bodies of other sizes repeat the choices made for the first.

Not done here: nesting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.analysis.axis import Axis
from lowtide.analysis.dims import axes
from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.errors import LowtideError
from lowtide.ir import Fission, Graph, Merge, Node
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Level, Realised, open_level, realise, reordered
from lowtide.search.recompute import Point
from lowtide.transforms import fission, remat
from lowtide.transforms.fission import FissionCandidate

__all__ = ["Base", "BasePoint", "large_splits", "nested_splits", "open_base", "realise_base", "single_split"]


@dataclass(frozen=True)
class BasePoint:
    """A point of one base: recomputation outside and inside its deep Fission; bytes are above resident."""

    peak_bytes: int
    latency_s: float
    outer: frozenset[int]
    inner: frozenset[int] = frozenset()


@dataclass
class Base:
    """A starting graph with the searches on it; `node` is the deep Fission and `inner` its body's level."""

    label: str
    candidates: tuple[FissionCandidate, ...]
    outer: Level
    inner: Level | None = None
    node: int = -1
    _outside: tuple[int, int, float] | None = field(default=None, repr=False)

    @property
    def states(self) -> int:
        """Judged sets so far."""
        return self.outer.search.states + (self.inner.search.states if self.inner else 0)

    def points(self) -> list[BasePoint]:
        """All non-dominated points found so far."""
        if self.inner is None:
            return [BasePoint(p.peak_bytes, p.latency_s, p.chosen) for p in self.outer.search.points]
        live, elsewhere, seconds = self._around()
        return [self._combine(p, live, elsewhere, seconds) for p in self.inner.search.points]

    def _combine(self, point: Point, live: int, elsewhere: int, seconds: float) -> BasePoint:
        peak = max(elsewhere, live + point.peak_bytes)
        return BasePoint(peak, seconds + self._repeats() * point.latency_s, frozenset(), point.chosen)

    def _repeats(self) -> float:
        """How many times the first body's time the parts take together (uneven parts by their size)."""
        sizes = self.candidates[0].sizes
        return sum(sizes) / sizes[0]

    def _around(self) -> tuple[int, int, float]:
        """Bytes that the outer graph holds while the Fission runs, its peak elsewhere, its other time."""
        if self._outside is None:
            mirror = self.outer.search.mirror
            now = mirror.evaluate(np.zeros(len(mirror.storage_ids), np.bool_))
            at = mirror.node_ids.index(self.node)
            step = int(np.flatnonzero(now.steps == at)[0])
            live = int(now.live_bytes[step] - mirror.workspace[at])
            others = np.delete(now.live_bytes, step)
            self._outside = live, int(others.max(initial=0)), now.latency_s - float(mirror.cost[at])
        return self._outside

    def sweep(self, floor_bytes: int, halted: Callable[[], bool]) -> None:
        """Trace this base down to `floor_bytes` above resident."""
        self._level().search.sweep(self._inside(floor_bytes), halted)

    def improve(
        self, target_bytes: int, seconds: float, halted: Callable[[], bool], max_rounds: int = 10**9
    ) -> None:
        """Lower the time within a target."""
        self._level().search.improve(self._inside(target_bytes), seconds, halted, max_rounds)

    def crowded(self, target_bytes: int) -> list[int]:
        """Outer nodes whose workspace is in the way of `target_bytes`, at the point nearest to it.

        Only workspace can be split away from a single operator: its operands and results are needed whole.
        """
        if self.inner is not None:
            return []
        search = self.outer.search
        point = search.cheapest(target_bytes) or search.smallest()
        now = search.mirror.evaluate(search.mask(point))
        steps = np.flatnonzero(now.live_bytes >= min(target_bytes, now.peak_bytes))
        nodes = dict.fromkeys(int(now.steps[k]) for k in steps)
        least = max(target_bytes, 1) * WORKSPACE_SHARE
        return [search.mirror.node_ids[n] for n in nodes if search.mirror.workspace[n] >= least]

    def _level(self) -> Level:
        return self.outer if self.inner is None else self.inner

    def _inside(self, target_bytes: int) -> int:
        return target_bytes if self.inner is None else max(target_bytes - self._around()[0], 1)


# -- finding splits ------------------------------------------------------------------------------------

WORKSPACE_SHARE = 0.02
"""An operator whose workspace is less than this share of a target is not worth a split."""

DEEP_SHARE = 0.5
"""A region with this share of the graph's nodes is searched inside."""


def large_splits(graph: Graph, counts: tuple[int, ...] = (2, 4, 8, 16, 32)) -> Iterator[FissionCandidate]:
    """The region along the batch that holds most of the graph, in several counts; none if there is none."""
    for candidate in fission.candidates(graph, counts):
        if candidate.label == "batch" and len(candidate.axes) >= DEEP_SHARE * len(graph.nodes):
            yield candidate


def nested_splits(
    graph: Graph, counts: tuple[int, ...] = (4, 8), regions: int = 6
) -> Iterator[FissionCandidate]:
    """Regions that start and end inside the model, such as a head with its loss; the most bytes first."""
    seen: dict[tuple[int, ...], None] = {}
    for candidate in fission.nested_candidates(graph, counts):
        seen[candidate.nodes] = None
        if len(seen) > regions:
            return
        if len(candidate.axes) < DEEP_SHARE * len(graph.nodes):
            yield candidate


def single_split(graph: Graph, node: int, count: int, masks: bool = False) -> FissionCandidate | None:
    """One node of a prepared graph split in `count` along the axis that cuts most of its bytes.

    Axes that keep every sum whole come first: their parts are bit-equal to the whole.
    """
    found = graph.node.get(node)
    if found is None or graph.is_view(found):
        return None
    options = []
    for position, axis in enumerate(axes(graph, found)):
        if axis.extent >= count and not fission.check_region(graph, [node], {node: axis}):
            exact = all(merge is not Merge.ADD for merge in axis.merges)
            options.append((exact, _cut_bytes(graph, found, axis), -position, axis.extent))
    if not options:
        return None
    _, _, position, extent = max(options)
    return FissionCandidate({node: -position}, fission.even_sizes(extent, count), str(extent), masks)


def _cut_bytes(graph: Graph, node: Node, axis: Axis) -> int:
    """Bytes of the operands and results that a part holds only a part of."""
    pairs = [*zip(node.inputs, axis.inputs, strict=True), *zip(node.outputs, axis.outputs, strict=True)]
    return sum(_bytes_of(graph, value) for value, dim in pairs if dim is not None)


def _bytes_of(graph: Graph, value: int) -> int:
    meta = graph.values[value].meta
    return meta.numel * meta.dtype.itemsize


# -- opening and realising -----------------------------------------------------------------------------


def open_base(
    label: str, graph: Graph, candidates: Sequence[FissionCandidate], estimator: Estimator, seed: int
) -> Base | None:
    """The base with all `candidates` applied (the largest first); None if one turns out to be illegal."""
    before = {node.id for node in graph.nodes}
    applied = sorted(candidates, key=lambda each: -len(each.axes))
    try:
        for candidate in applied:
            graph = fission.apply(graph, candidate).graph
    except LowtideError:
        return None
    graph = _scheduled_bodies(graph, before, estimator)
    fissions = [node for node in graph.nodes if isinstance(node.op, Fission) and node.id not in before]
    deep = [
        n for n, c in zip(sorted(fissions, key=lambda n: n.id), applied, strict=True) if _is_deep(c, before)
    ]
    outer = open_level(graph, estimator, seed)
    if not deep:
        return Base(label, tuple(applied), outer)
    op, ways = deep[0].op, deliveries(graph, deep[0])
    assert isinstance(op, Fission)
    inner = open_level(op.bodies[0], estimator, seed, lambda body: body_as_run(body, ways))
    return Base(label, tuple(applied), outer, inner, deep[0].id)


def _is_deep(candidate: FissionCandidate, nodes: set[int]) -> bool:
    return len(candidate.axes) >= DEEP_SHARE * len(nodes)


def _scheduled_bodies(graph: Graph, old: set[int], estimator: Estimator) -> Graph:
    """Give every new body its best order as program order."""

    def scheduled(node: Node) -> Node:
        if node.id in old or not isinstance(node.op, Fission):
            return node
        bodies = tuple(
            reordered(body, best_schedule(body, estimator.facts(body), inplace=True).order)
            for body in node.op.bodies
        )
        return replace(node, op=replace(node.op, bodies=bodies))

    return replace(graph, nodes=tuple(scheduled(node) for node in graph.nodes))


def realise_base(base: Base, point: BasePoint, estimator: Estimator) -> Realised:
    """The graph and order of a point, recomputation applied inside and outside."""
    if base.inner is None:
        return realise(base.outer, point.outer, estimator)
    node = base.outer.graph.node[base.node]
    assert isinstance(node.op, Fission)
    bodies = tuple(_realise_body(base.inner, body, point.inner, estimator) for body in node.op.bodies)
    changed = replace(node, op=replace(node.op, bodies=bodies))
    nodes = tuple(changed if each.id == node.id else each for each in base.outer.graph.nodes)
    level = Level(replace(base.outer.graph, nodes=nodes), base.outer.late, base.outer.search)
    return realise(level, point.outer, estimator)


def _realise_body(level: Level, body: Graph, chosen: frozenset[int], estimator: Estimator) -> Graph:
    """`body` with the level's order and the same choices, then its own best order as program order."""
    owner = remat.owner_of(level.graph)
    places = {(owner[s], _position(level.graph, level.graph.node[owner[s]], s)) for s in chosen}
    same = frozenset(body.values[body.node[node].outputs[position]].storage for node, position in places)
    ordered = reordered(body, [node.id for node in level.graph.nodes])
    made = realise(Level(ordered, level.late, level.search), same, estimator)
    return reordered(made.graph, made.order)


def _position(graph: Graph, node: Node, storage: int) -> int:
    return next(k for k, out in enumerate(node.outputs) if graph.values[out].storage == storage)
