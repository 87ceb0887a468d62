"""Bases of the search: the whole graph, with none, one or many of its regions split.

Problem.  What is split changes the graph itself, so it is not a decision like the others.

Method.  A base is a level with a choice of regions; how finely each is split and what is recomputed in it
and around it is decided together on that level (`levels.py`).  All bases together form the frontier;
`realise_base` turns a point into a graph and an order.

Invariants.  A point's peak and time were judged on mirrors; `realise_base` may only improve them (it asks
the schedulers again).

Not done here: which regions (`splits.py`), and which base when (`explorer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.ir import Graph
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Choice, Level, Realised, Split, open_level, realise
from lowtide.search.recompute import Halted, Point

__all__ = ["Base", "choices_of", "open_base", "realise_base"]

WORKSPACE_SHARE = 0.02
"""An operator whose workspace is less than this share of a target is not worth a split."""


@dataclass
class Base:
    """A starting graph with the search on it; `level.regions` are those of `splits` that are legal."""

    label: str
    splits: tuple[Split, ...]
    level: Level

    @property
    def states(self) -> int:
        """Judged decisions so far."""
        return self.level.states

    def points(self) -> list[Point]:
        """All non-dominated points found so far, by rising time."""
        return list(self.level.search.points)

    def sweep(self, floor_bytes: int, halted: Halted, steps: int = 24, slowest_s: float = 1e9) -> None:
        """Trace this base down to `floor_bytes` above resident."""
        self.level.search.sweep(floor_bytes, halted, steps, slowest_s)

    def improve(self, target_bytes: int, seconds: float, halted: Halted, max_rounds: int = 10**9) -> None:
        """Lower the time within a target."""
        self.level.search.improve(target_bytes, seconds, halted, max_rounds)

    def tighten(self, point: Point, share: float, bound_s: float, halted: Halted) -> bool:
        """Look for a point with at most `share` of this one's peak within `bound_s`; True if there is one."""
        search, target = self.level.search, int(point.peak_bytes * share)

        def found() -> bool:
            known = search.cheapest(target)
            return known is not None and known.latency_s <= bound_s

        search.reach(target, search.mask(point), halted)
        if not found():
            search.improve(target, 1.0, lambda: halted() or found(), 30)
        return found()

    def crowded(self, target_bytes: int) -> list[int]:
        """Nodes whose workspace is in the way of `target_bytes`, at the point nearest to it.

        Only workspace can be split away from a single operator: its operands and results are needed whole.
        """
        search = self.level.search
        point = search.cheapest(target_bytes) or search.smallest()
        now = search.evaluate(search.mask(point))
        steps = np.flatnonzero(now.live_bytes >= min(target_bytes, now.peak_bytes))
        nodes = dict.fromkeys(int(now.steps[k]) for k in steps)
        least = max(target_bytes, 1) * WORKSPACE_SHARE
        split = {region.node for region in self.level.regions}
        wide = [n for n in nodes if search.mirror.workspace[n] >= least]
        return [search.mirror.node_ids[n] for n in wide if search.mirror.node_ids[n] not in split]


def open_base(
    label: str,
    graph: Graph,
    splits: Sequence[Split],
    estimator: Estimator,
    seed: int,
    halted: Halted = lambda: False,
) -> Base | None:
    """The base with all `splits` (the largest first); None if there are some and none is legal."""
    ordered = tuple(sorted(splits, key=lambda each: -len(each.candidates[0].axes)))
    level = open_level(graph, estimator, seed, splits=ordered, halted=halted)
    return Base(label, ordered, level) if level.regions or not splits else None


def realise_base(base: Base, point: Point, estimator: Estimator) -> Realised:
    """The graph and order of a point, its decisions applied inside and outside."""
    return realise(base.level, point, estimator)


def choices_of(point: Point) -> Iterator[Choice]:
    """The choices of a point for its regions, and for the regions inside them."""
    for choice in point.options:
        assert isinstance(choice, Choice)
        yield choice
        yield from choices_of(choice.point)
