"""A level of the search: one graph (the whole, or the body of a Fission) with its own remat frontier.

Problem.  Recomputation, order and fission meet at every level of nesting, and a limit on the whole has
to become a limit on each body.

Method.  A level fixes a good order first (updates right after their gradients), mirrors the graph in
that order and searches recomputation sets on the mirror.  `realise` turns a chosen set into a graph
and asks the schedulers again, because recomputation opens better orders.

Not done here: splitting (`bases.py`), placement and running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.analysis.timeline import Timeline, timeline
from lowtide.ir import Graph
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.estimator import Estimator
from lowtide.search.mirror import build_mirror
from lowtide.search.recompute import Recomputation, RecomputeOptions
from lowtide.transforms import remat

__all__ = ["Level", "Realised", "open_level", "realise", "reordered"]


@dataclass
class Level:
    """A graph in its base order and the running search for what to recompute in it."""

    graph: Graph
    late: frozenset[int]
    search: Recomputation


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


def open_level(
    graph: Graph,
    estimator: Estimator,
    seed: int,
    as_run: Callable[[Graph], Graph] | None = None,
    options: RecomputeOptions | None = None,
) -> Level:
    """Order `graph`, mirror it, and start its recomputation search.

    `as_run` gives the form of a body that runs: what is an output there lies outside, without memory here.
    """
    graph = reordered(graph, best_schedule(graph, estimator.facts(graph), inplace=True).order)
    late = remat.late_nodes(graph)
    runs = graph if as_run is None else as_run(graph)
    order = [node.id for node in runs.nodes]
    mirror = build_mirror(runs, order, estimator.facts(runs), estimator.costs(runs), late, as_run is not None)
    allowed = remat.recomputable(graph, late)

    def mask(storages: frozenset[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return np.array([storage in storages for storage in mirror.storage_ids], np.bool_)

    groups = tuple(mask(members) for members in remat.segments(graph, allowed).values())
    search = Recomputation(mirror, mask(allowed), groups, seed, options or RecomputeOptions())
    return Level(graph, late, search)


def realise(level: Level, chosen: frozenset[int], estimator: Estimator) -> Realised:
    """Apply a recomputation set and keep the best of the mirrored order and a fresh schedule."""
    graph = remat.apply(level.graph, remat.RematCandidate(chosen, level.late)).graph
    facts = estimator.facts(graph)
    costs = estimator.costs(graph)
    orders = [tuple(node.id for node in graph.nodes), tuple(best_schedule(graph, facts, inplace=True).order)]
    curves = [timeline(graph, order, facts, inplace=True) for order in orders]
    best = min(range(len(orders)), key=lambda index: curves[index].peak_above_bytes)
    seconds = sum(costs.get(node.id, 0.0) for node in graph.nodes)
    return Realised(graph, orders[best], curves[best], seconds)
