"""Splits along dimensions that are no batch: heads, query rows, tokens, channels.

Problem.  An inference on one example has no batch to split, and a large attention or head is all of its peak.

Method.  The regions of every dimension that hold a good share of the peak, those of identical layers together
(they are decided on one by one, but opened as one base).  Parts get finer as long as what one of them
holds is worth it.

Not done.  Two dimensions of one region at once; nest instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph
from lowtide.ir.ops import Aten
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Split
from lowtide.transforms import fission
from lowtide.transforms.fission import FissionCandidate
from lowtide.transforms.regions import inner_bytes

__all__ = ["FINE_COUNTS", "dimension_splits", "worth_counts"]

FINE_COUNTS = (2, 4, 8, 16, 32, 64, 128)

LEAST_PART_BYTES = 1 << 21
"""A part that holds less is in cache: cutting it again only costs calls."""

LEAST_SHARE = 0.2
"""Of the peak: a region with less inside is not worth a base."""

MOST_GROUPS = 4


def worth_counts(graph: Graph, candidates: Sequence[FissionCandidate]) -> tuple[FissionCandidate, ...]:
    """The candidates of one region of a prepared graph, without those whose parts are finer than of use."""
    inner = inner_bytes(graph, candidates[0].axes)
    return tuple(
        each
        for k, each in enumerate(candidates)
        if k < 2 or inner / len(candidates[k - 1].sizes) > LEAST_PART_BYTES
    )


def dimension_splits(graph: Graph, estimator: Estimator) -> Iterator[tuple[Split, ...]]:
    """Groups of equal regions to split together, those with the most bytes inside one of them first."""
    normal = fission.prepare(graph)
    order = [node.id for node in normal.nodes]
    peak = timeline(normal, order, estimator.facts(normal), inplace=True).peak_above_bytes
    groups: dict[object, dict[object, list[FissionCandidate]]] = {}
    for each in fission.candidates(graph, FINE_COUNTS):
        region = (each.label, *each.axes.items())
        groups.setdefault(_pattern(normal, each), {}).setdefault(region, []).append(each)
    found = [[worth_counts(normal, region) for region in group.values()] for group in groups.values()]
    found = [group for group in found if inner_bytes(normal, group[0][0].axes) > LEAST_SHARE * peak]
    found.sort(key=lambda group: -inner_bytes(normal, group[0][0].axes))
    for group in found[:MOST_GROUPS]:
        yield tuple(Split(candidates) for candidates in group)


def _pattern(graph: Graph, candidate: FissionCandidate) -> tuple[object, ...]:
    ops = (graph.node[number].op for number in candidate.axes)
    return (sum(candidate.sizes), *(op.overload if isinstance(op, Aten) else str(type(op)) for op in ops))
