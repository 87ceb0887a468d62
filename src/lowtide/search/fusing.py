"""Fusion of a plan's graph: groups that were measured to pay, at every level of nesting.

Problem.  Fusing is decided last, on the graph as it will run: what is recomputed belongs into its readers,
what is inside a region stays inside.  The planner predicts; a kernel that is slower than the operators it
replaces must not be in a plan.

Method.  The planner proposes groups for the graph and for each body in it.  All kernels that nobody has made
are compiled together, every distinct one is timed once beside its operators (`Estimator`), and a group that
loses is given up: first its matrix products (the library's may be better), then, if the rest loses too, the
group.  What lost is remembered by content, for the other layers and the next graph.  Where a plan's numbers
turn out not to be eager's (a sum that cancels is rounded otherwise), `be_careful` leaves reductions and
products to eager's operators, and then everything.

Invariants.  No group crosses the border of a region or of a phase far away (`REACH`).  Values that parts
of a region add up in place are made by operators of their own, as before.

Not done here: which storages are recomputed, which regions are split (`bases`); whether the whole plan is
faster when run (`promise`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lowtide.analysis.key import graph_key, node_key
from lowtide.analysis.parts import deliveries, terms_of
from lowtide.fusion.kernels import Foundry
from lowtide.fusion.planner import Limits, plan_blocks
from lowtide.fusion.profit import Pricing
from lowtide.ir import Fission, Fused, Graph, Node
from lowtide.ir.extract import extract
from lowtide.run.kernels import KernelCall
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Realised, best_order, reordered
from lowtide.search.outcome import Move
from lowtide.transforms import fuse

__all__ = ["REACH", "Fuser", "kernel_moves"]

REACH = 16
"""Operators between the first and the last of a group in the order of the plan."""

ROUNDS = 3
"""Proposals per graph: after the last, groups that lose are left out."""

GAIN = 0.98
"""A group has to take at most this share of its operators' time."""

LEAST_SHARE = 0.1
"""What operators that are fused into a product cost at least, as a part of their own time."""

_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "convolution", "mm"))


@dataclass
class Fuser:
    """Fuses realised graphs; `kernels` grows with what was compiled, and is the estimator's own.

    `judged`: groups have to win against their operators; else the planner's word is taken.
    """

    estimator: Estimator
    kernels: dict[str, KernelCall]
    foundry: Foundry = field(default_factory=Foundry)
    pricing: Pricing = field(default_factory=Pricing)
    lost_products: set[str] = field(default_factory=set)
    lost_groups: set[str] = field(default_factory=set)
    care: int = 0
    reach: int = REACH
    judged: bool = True

    def be_careful(self) -> None:
        """Fuse less from now on: element-wise operators only, then nothing."""
        self.care += 1

    def fuse(self, realised: Realised) -> Realised | None:
        """The same step with groups as kernels, in its best order; None if there is nothing to fuse."""
        fused = self._grouped(reordered(realised.graph, realised.order))
        return None if fused is None else self._scheduled(fused)

    def _grouped(self, graph: Graph) -> Graph | None:
        """The graph with the groups that pay, compiled; None if there are none."""
        if self.care > 1:
            return None
        for _ in range(ROUNDS if self.judged else 0):
            if not self._judge(graph):
                break
        fused = self._fused(graph, ())
        if fused is graph:
            return None
        self._compile(fused)
        return fused

    def shares(self, graph: Graph) -> dict[int, float]:
        """By node, the part of its own time that is left when `graph` is fused as it is.

        In a kernel with a matrix product or convolution the others take what the product leaves.
        """
        fused = self._grouped(graph)
        found: dict[int, float] = {}
        if fused is None:
            return found
        apart, together = self.estimator.costs(graph), self.estimator.costs(fused)
        for node in fused.nodes:
            if isinstance(node.op, Fused) and node.op.kind == "kernel":
                members = [graph.node[inner.id] for inner in node.op.body.nodes]
                found.update(_shares(members, apart, together[node.id]))
        return found

    def _judge(self, graph: Graph) -> bool:
        """Measure the groups that are proposed now; whether any was given up."""
        fused = self._fused(graph, ())
        self._compile(fused)
        before = len(self.lost_products), len(self.lost_groups)
        for plain, now in _levels(graph, fused):
            self._give_up_losers(plain, now)
        return before != (len(self.lost_products), len(self.lost_groups))

    def _give_up_losers(self, plain: Graph, now: Graph) -> None:
        apart, together = self.estimator.costs(plain), self.estimator.costs(now)
        for node in now.nodes:
            if not isinstance(node.op, Fused) or node.op.kind != "kernel" or node.id in plain.node:
                continue
            members = [plain.node[inner.id] for inner in node.op.body.nodes]
            before = sum(apart.get(member.id, 0.0) for member in members)
            if graph_key(node.op.body) in self.kernels and together[node.id] <= GAIN * before:
                continue
            products = [m for m in members if not plain.is_view(m) and _is_product(m)]
            computing = sum(not plain.is_view(member) for member in members)
            if products and computing > 1:
                self.lost_products.update(node_key(plain, product) for product in products)
            else:
                self.lost_groups.add(graph_key(node.op.body))

    def _compile(self, graph: Graph) -> None:
        self.kernels.update(self.foundry.kernels(graph))

    def _fused(self, graph: Graph, banned: tuple[int, ...]) -> Graph:
        """`graph` with the groups of this moment, inside and outside; the same object if there are none."""
        nodes = tuple(self._inside(graph, node) for node in graph.nodes)
        if any(one is not other for one, other in zip(nodes, graph.nodes, strict=True)):
            graph = replace(graph, nodes=nodes)
        kept = {*banned, *(node.id for node in graph.nodes if self._lost(graph, node))}
        blocks = plan_blocks(graph, self.pricing, Limits(reach=self.reach, reductions=not self.care), kept)
        groups = tuple(b for b in blocks if graph_key(extract(graph, b).body) not in self.lost_groups)
        return _contracted(graph, groups) if groups else graph

    def _lost(self, graph: Graph, node: Node) -> bool:
        return _is_product(node) and node_key(graph, node) in self.lost_products

    def _inside(self, graph: Graph, node: Node) -> Node:
        """A region with its bodies fused."""
        if not isinstance(node.op, Fission):
            return node
        kept = _delivered(graph, node)
        bodies = tuple(self._fused(body, banned) for body, banned in zip(node.op.bodies, kept, strict=True))
        if all(one is other for one, other in zip(bodies, node.op.bodies, strict=True)):
            return node
        return replace(node, op=replace(node.op, bodies=bodies))

    def _scheduled(self, graph: Graph) -> Realised:
        graph = self._bodies_scheduled(graph)
        costs = self.estimator.costs(graph)
        seconds = sum(costs.get(node.id, 0.0) for node in graph.nodes)
        return Realised(graph, *best_order(graph, self.estimator.facts(graph)), seconds)

    def _bodies_scheduled(self, graph: Graph) -> Graph:
        def scheduled(node: Node) -> Node:
            if not isinstance(node.op, Fission):
                return node
            bodies = tuple(self._bodies_scheduled(body) for body in node.op.bodies)
            ordered = tuple(
                reordered(body, best_schedule(body, self.estimator.facts(body), inplace=True).order)
                for body in bodies
            )
            return replace(node, op=replace(node.op, bodies=ordered))

        return replace(graph, nodes=tuple(scheduled(node) for node in graph.nodes))


def _shares(
    members: Sequence[Node], apart: Mapping[int, float], seconds: float
) -> Iterator[tuple[int, float]]:
    """Each member's part of its own time where all together take `seconds`."""
    products = sum(apart.get(member.id, 0.0) for member in members if _is_product(member))
    others = sum(apart.get(member.id, 0.0) for member in members) - products
    of_products = min(1.0, seconds / products) if products else 1.0
    rest = max(seconds - products, LEAST_SHARE * others)
    for member in members:
        yield member.id, of_products if _is_product(member) else min(1.0, rest / others) if others else 1.0


def _contracted(graph: Graph, groups: tuple[frozenset[int], ...]) -> Graph:
    """The graph with all groups, or with those that are legal beside the ones before them."""
    try:
        return fuse.apply(graph, fuse.FuseCandidate(groups)).graph
    except fuse.IllegalFusion:
        kept: tuple[frozenset[int], ...] = ()
        for group in groups:
            with suppress(fuse.IllegalFusion):
                fuse.apply(graph, fuse.FuseCandidate((*kept, group)))
                kept = (*kept, group)
    return fuse.apply(graph, fuse.FuseCandidate(kept)).graph if kept else graph


def _is_product(node: Node) -> bool:
    return getattr(node.op, "overload", "") in _PRODUCTS


def _levels(plain: Graph, now: Graph) -> Iterator[tuple[Graph, Graph]]:
    """The graph, and each body in it, before and after fusing."""
    yield plain, now
    for node in plain.nodes:
        if isinstance(node.op, Fission):
            other = now.node[node.id].op
            assert isinstance(other, Fission)
            for one, two in zip(node.op.bodies, other.bodies, strict=True):
                yield from _levels(one, two)


def _delivered(graph: Graph, node: Node) -> list[tuple[int, ...]]:
    """Per body, the nodes whose results are accumulated in place, or are sums that vanish."""
    assert isinstance(node.op, Fission)
    ways = deliveries(graph, node)
    found = []
    for body in node.op.bodies:
        kept: set[int] = set()
        for value, way in zip(body.outputs, ways, strict=True):
            if way in ("accumulate", "terms"):
                kept.update(_makers(body, value))
        found.append(tuple(sorted(kept)))
    return found


def _makers(body: Graph, value: int) -> Iterator[int]:
    """The producer of a sum, of its terms, and of the sums between."""
    if value not in body.producer:
        return
    yield body.producer[value]
    if terms_of(body, value) != (value,):
        for each in body.node[body.producer[value]].inputs:
            yield from _makers(body, each)


def kernel_moves(graph: Graph) -> Iterator[Move]:
    """A Fuse move per kernel of a graph, with the bytes of results that are never stored; those of a region's
    bodies once.
    """
    for node in graph.nodes:
        if isinstance(node.op, Fission):
            yield from kernel_moves(node.op.bodies[0])
        elif isinstance(node.op, Fused) and node.op.kind == "kernel":
            where = node.origin.module or node.origin.phase
            yield Move("fuse", where, node.origin.source, _inner_bytes(node.op.body))


def _inner_bytes(body: Graph) -> int:
    given = {body.values[value].storage for value in (*body.inputs, *body.outputs)}
    return sum(storage.nbytes for storage in body.storages.values() if storage.id not in given)
