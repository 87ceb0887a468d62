"""Which regions are worth a split: of the whole model, of its end, of single operators.

Problem.  A graph has hundreds of legal regions, and each that is opened costs a second.

Method.  Three families.  *Large*: the region along the batch that holds most of the graph.  *Inner*: what
starts at one value and comes back to it, such as the head with its loss, or the late layers with all of
their backward; of these, the one with the highest *heat*, and the smallest that has most of it.  The heat of
a region is what a split would save at the peak, less what it would cost: the outputs of a split exist from
its start, so parameter gradients that the update would free at once have to be kept (MAGIS, section 4.2,
with the simulated peak).  *Rows*: of images, with halos; all of them, or the runs of operators where memory
is in the way, together.  *Single*: one operator whose workspace is in the way.

Not done here: applying them (`levels.py`), and which to open when (`explorer.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lowtide.analysis.axis import Axis
from lowtide.analysis.dims import axes
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph, Merge, Node
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.dimensions import FINE_COUNTS, worth_counts
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Split
from lowtide.transforms import fission, halo
from lowtide.transforms.fission import FissionCandidate
from lowtide.transforms.regions import inner_bytes
from lowtide.transforms.rows import row_candidates

__all__ = ["inner_splits", "large_split", "nothing_inside", "row_splits", "single_split"]

DEEP_SHARE = 0.5
"""A region with this share of the graph's nodes is large."""

SMALL_NODES = 30
"""A region with fewer nodes is not searched inside."""

MOST_HEAT = 0.8
"""The smallest inner region with this share of the highest heat is preferred: it pins fewer outputs."""


def nothing_inside(body: Graph) -> Sequence[Split]:
    """Search a body, but split nothing in it."""
    return ()


def large_split(graph: Graph, estimator: Estimator, counts: Sequence[int] = FINE_COUNTS) -> Split | None:
    """The region along the batch that holds most of the graph; its bodies are searched and split inside."""
    for candidates in _by_region(fission.candidates(graph, counts)):
        if candidates[0].label == "batch" and len(candidates[0].axes) >= DEEP_SHARE * len(graph.nodes):
            normal = fission.prepare(graph, candidates[0].masks)
            return Split(worth_counts(normal, candidates), lambda body: inner_splits(body, estimator)[:1])
    return None


def inner_splits(
    graph: Graph,
    estimator: Estimator,
    crests: Sequence[frozenset[int]] = (),
    taken: Collection[int] = (),
    counts: Sequence[int] = (2, 4, 8, 16),
) -> tuple[Split, ...]:
    """The smallest inner region with most of the heat, and the hottest; none if none is worth it.

    `crests`: the storages that are alive where memory is near its peak; without any, those at the peak
    of the graph without any decision.  Regions with nodes that are `taken` do not count.
    """
    regions = _by_region(fission.nested_candidates(graph, counts))
    found = [each for each in regions if not any(node in each[0].axes for node in taken)]
    if not found:
        return ()
    normal = fission.prepare(graph, found[0][0].masks)
    crests = crests or [_at_peak(normal, estimator)]
    heat = [max(_heat(normal, candidates[0], alive) for alive in crests) for candidates in found]
    hottest = max(range(len(found)), key=heat.__getitem__)
    if heat[hottest] <= 0:
        return ()
    good = [k for k in range(len(found)) if heat[k] >= MOST_HEAT * heat[hottest]]
    smallest = min(good, key=lambda k: len(found[k][0].axes))
    return tuple(_searched(found[k]) for k in dict.fromkeys((smallest, hottest)))


def _searched(candidates: tuple[FissionCandidate, ...]) -> Split:
    large = len(candidates[0].axes) > SMALL_NODES
    return Split(candidates, nothing_inside if large else None)


def _by_region(candidates: Iterable[FissionCandidate]) -> list[tuple[FissionCandidate, ...]]:
    """The candidates of each region together, in the order in which the regions come."""
    found: dict[tuple[object, ...], list[FissionCandidate]] = {}
    for each in candidates:
        found.setdefault((each.label, *each.axes.items()), []).append(each)
    return [tuple(group) for group in found.values()]


def _at_peak(graph: Graph, estimator: Estimator) -> frozenset[int]:
    """The storages that are alive at the peak of the best order."""
    facts = estimator.facts(graph)
    order = best_schedule(graph, facts, inplace=True).order
    curve = timeline(graph, order, facts, inplace=True)
    return frozenset(storage for buffer in curve.alive(curve.peak_step) for storage in buffer.storages)


def _heat(graph: Graph, region: FissionCandidate, alive: frozenset[int]) -> float:
    """The bytes that an infinitely fine split would save at the peak."""
    made = {graph.values[out].storage for number in region.axes for out in graph.node[number].outputs}
    read = {graph.values[value].storage for number in region.axes for value in graph.node[number].inputs}
    own = {s for s in made if graph.producer.get(_first(graph, s)) in region.axes}
    outside = {
        graph.values[value].storage
        for number in region.axes
        for value in graph.node[number].outputs
        if value in graph.outputs or any(reader not in region.axes for reader in graph.readers[value])
    }
    size = graph.storages
    inner = sum(size[s].nbytes for s in own & alive - outside)
    pinned = sum(
        size[s].nbytes for s in outside | (read - own) if s not in alive and not size[s].role.resident
    )
    return inner - pinned


def _first(graph: Graph, storage: int) -> int:
    return graph.views_of[storage][0]


# -- rows with halos -----------------------------------------------------------------------------------

ROW_COUNTS = (2, 3, 5, 8)

LEAST_ROWS = 0.5
"""Of the peak: regions that make less than this, all of it counted, are not worth a base."""


def row_splits(graph: Graph, estimator: Estimator) -> list[tuple[Split, ...]]:
    """Sets of regions to split along rows together: a whole region first, then the hot runs of it."""
    normal = halo.prepare(graph)
    facts = estimator.facts(normal)
    order = [node.id for node in normal.nodes]
    curve = timeline(normal, order, facts, inplace=True)
    live = dict(zip(order, curve.above_bytes, strict=True))
    found = []
    for regions in row_candidates(graph, ROW_COUNTS, live):
        inside = sum(inner_bytes(normal, candidates[0].axes) for candidates in regions)
        if inside > LEAST_ROWS * curve.peak_above_bytes:
            found.append(tuple(Split(candidates) for candidates in regions))
    return found


# -- single operators ----------------------------------------------------------------------------------


MUCH_MORE = 1.2
"""How many times the bytes a sum over parts must cut to be offered beside parts that are bit-equal."""


def single_split(
    graph: Graph, node: int, counts: Sequence[int] = (2, 4, 8, 16), masks: bool = False
) -> Split | None:
    """One node of a prepared graph, along the axis that cuts most of its bytes.

    Axes that keep every sum whole are preferred, since their parts are bit-equal to the whole; a sum that
    cuts far more is offered beside them, such as the images of a batch in the gradient of a weight.
    """
    found = graph.node.get(node)
    if found is None or graph.is_view(found):
        return None
    exact: list[tuple[int, int, int]] = []
    summed: list[tuple[int, int, int]] = []
    for position, axis in enumerate(axes(graph, found)):
        if axis.extent >= min(counts) and not fission.check_region(graph, [node], {node: axis}):
            option = (_cut_bytes(graph, found, axis), -position, axis.extent)
            (summed if Merge.ADD in axis.merges else exact).append(option)
    best = [max(options) for options in (exact, summed) if options]
    if len(best) == 2 and best[1][0] < MUCH_MORE * best[0][0]:
        del best[1]
    candidates = tuple(
        FissionCandidate({node: -position}, fission.even_sizes(extent, count), str(extent), masks)
        for _, position, extent in best
        for count in counts
        if count <= extent
    )
    return Split(candidates) if candidates else None


def _cut_bytes(graph: Graph, node: Node, axis: Axis) -> int:
    """Bytes of the operands and results that a part holds only a part of."""
    pairs = [*zip(node.inputs, axis.inputs, strict=True), *zip(node.outputs, axis.outputs, strict=True)]
    return sum(_bytes_of(graph, value) for value, dim in pairs if dim is not None)


def _bytes_of(graph: Graph, value: int) -> int:
    meta = graph.values[value].meta
    return meta.nbytes
