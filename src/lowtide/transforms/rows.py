"""Where images can be cut in rows: candidates for fission with halos.

Method.  As for other dimensions, the dimensions that one loop runs over are joined through all nodes, windows
included, so that the rows of an image and of its pooled copies are one component; layers give maximal
regions.  Rows near the output of a deep region need many rows at its start, so beside each whole region
stand the runs of its nodes where memory is in the way: only there parts are worth their halo.

    live bytes   ____                          ____
                |    |____              ____  |            whole region, or the two runs above a level
                |         |____________|    |_|

Invariants.  Every candidate passes `check_rows`.  Its work, the rows made by all parts over the rows of the
whole, weighted by bytes (1 without a halo), is bounded.

Not done.  Choosing between rows and columns by layout: rows of a plane are one block of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import rustworkx

from lowtide.analysis.axis import Axis
from lowtide.analysis.region import connected_parts
from lowtide.analysis.windows import WindowAxis
from lowtide.ir import Graph
from lowtide.transforms.body import border_of
from lowtide.transforms.halo import HaloCandidate, assignment_of, check_rows, loops, prepare, spans_of
from lowtide.transforms.regions import Region, choose_loops, layers_of

__all__ = ["row_candidates", "row_regions"]

MOST_WORK = 1.7
"""More rows than this times those of the whole are not worth computing."""


def row_candidates(
    graph: Graph,
    counts: Sequence[int] = (2, 4, 8),
    live: Mapping[int, int] | None = None,
    most_work: float = MOST_WORK,
) -> Iterator[tuple[tuple[HaloCandidate, ...], ...]]:
    """Sets of regions to split together, the largest region first; per region its candidates by `counts`.

    `live`: bytes that are alive while a node of the prepared graph runs; without it only whole regions are
    found.  Of rows and columns of the same nodes, rows are taken.
    """
    normal = prepare(graph)
    seen: set[object] = set()
    for whole in row_regions(normal):
        for runs in ((whole,), *_hot_runs(normal, whole, live or {})):
            key = tuple(tuple(run) for run in runs)
            if key not in seen:
                seen.add(key)
                found = (tuple(_candidates(normal, run, counts, most_work)) for run in runs)
                kept = tuple(candidates for candidates in found if candidates)
                if kept:
                    yield kept


def _candidates(
    graph: Graph, region: Region, counts: Sequence[int], most_work: float
) -> Iterator[HaloCandidate]:
    for count in counts:
        found = _candidate(graph, region, count, most_work)
        if found is not None:
            yield found


def _candidate(graph: Graph, region: Region, count: int, most_work: float) -> HaloCandidate | None:
    assignment = assignment_of(graph, region)
    sizes = (1,) * count
    if check_rows(graph, tuple(region), assignment, sizes):
        return None
    if _work(graph, assignment, tuple(region), sizes) > most_work:
        return None
    return HaloCandidate(region, sizes)


def _work(graph: Graph, assignment: Mapping[int, Axis], nodes: Sequence[int], sizes: Sequence[int]) -> float:
    """Rows that all parts make over the rows of the whole, weighted by the bytes of the results."""
    border = border_of(graph, nodes, assignment)
    whole = parts = 0.0
    each_part = spans_of(graph, border, assignment, sizes)
    for number in border.nodes:
        nbytes = float(sum(graph.values[value].meta.span_bytes for value in graph.node[number].outputs))
        whole += nbytes
        for spans in each_part:
            made = spans.nodes[number].made
            parts += nbytes * (made[1] - made[0]) / assignment[number].extent
    return parts / max(whole, 1.0)


def row_regions(graph: Graph) -> tuple[Region, ...]:
    """Maximal regions of a prepared graph along rows, with a window in each, the largest first."""
    found = []
    for component in _components(graph):
        chosen = choose_loops(graph, component, loops)
        layers: dict[int, list[int]] = {}
        for node, layer in layers_of(graph, chosen, loops).items():
            if node in chosen:
                layers.setdefault(layer, []).append(node)
        for members in layers.values():
            for piece in connected_parts(graph, members):
                region = {node: chosen[node] for node in piece}
                if _has_window(graph, region):
                    found.append(region)
    return tuple(sorted(found, key=lambda each: (-len(each), _last_dim(graph, each), min(each))))


def _has_window(graph: Graph, region: Region) -> bool:
    return any(isinstance(axis, WindowAxis) for axis in assignment_of(graph, region).values())


def _last_dim(graph: Graph, region: Region) -> int:
    """The dimension that is cut in the results: rows before columns."""
    dims = [dim for axis in assignment_of(graph, region).values() for dim in axis.outputs if dim is not None]
    return max(dims, default=0)


def _components(graph: Graph) -> list[dict[int, list[int]]]:
    """Node id -> positions of its loops, per component of dimensions that has a window."""
    joined = rustworkx.PyGraph()
    index: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        for axis in loops(graph, node):
            members = [_vertex(joined, index, pair) for pair in _members(node.inputs, node.outputs, axis)]
            joined.add_edges_from_no_data([(members[0], other) for other in members[1:]])
    label = {vertex: k for k, part in enumerate(rustworkx.connected_components(joined)) for vertex in part}
    found: dict[int, dict[int, list[int]]] = {}
    wanted: set[int] = set()
    for node in graph.nodes:
        for position, axis in enumerate(loops(graph, node)):
            part = label[index[_members(node.inputs, node.outputs, axis)[0]]]
            found.setdefault(part, {}).setdefault(node.id, []).append(position)
            if isinstance(axis, WindowAxis):
                wanted.add(part)
    return [found[part] for part in sorted(wanted)]


def _vertex(joined: rustworkx.PyGraph, index: dict[tuple[int, int], int], pair: tuple[int, int]) -> int:
    if pair not in index:
        index[pair] = joined.add_node(pair)
    return index[pair]


def _members(inputs: Sequence[int], outputs: Sequence[int], axis: Axis) -> list[tuple[int, int]]:
    """The (value, dimension) pairs that one loop runs over."""
    pairs = (*zip(inputs, axis.inputs, strict=True), *zip(outputs, axis.outputs, strict=True))
    return [(value, dim) for value, dim in pairs if dim is not None]


LEVELS = (0.25, 0.4, 0.6)
"""Shares of the peak above which a node is in the way."""

SHORT = 3
"""A dip of at most this many operators does not end a run."""


def _hot_runs(graph: Graph, whole: Region, live: Mapping[int, int]) -> Iterator[tuple[Region, ...]]:
    """Per level, the runs of nodes of `whole` that are alive with more than that share of the peak."""
    peak = max(live.values(), default=0)
    for level in LEVELS if peak else ():
        runs: list[list[int]] = [[]]
        dip: list[int] = []
        for number in whole:
            if live.get(number, 0) > level * peak:
                runs[-1] += [*dip, number] if runs[-1] else [number]
                dip = []
            elif runs[-1]:
                dip.append(number)
                if sum(not graph.is_view(graph.node[each]) for each in dip) > SHORT:
                    runs.append([])
                    dip = []
        kept = tuple({number: whole[number] for number in run} for run in runs if len(run) > 1)
        if kept:
            yield kept
