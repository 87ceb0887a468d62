"""Where a graph can be cut: maximal convex regions along one graph-level dimension.

Problem.  A dimension touches most of a graph, but not all of its nodes can run part by part: some have no
loop there (BatchNorm over the batch), some need the sum of all parts, some would have to be cut in two ways.

Method.  Each node of the dimension takes the loop that fits its producers best.  Then all nodes are
layered: along a path, the layer grows by one where the path leaves the dimension, where a sum is read, and
where a value is read cut otherwise than it was made.  Pieces of one layer are the regions.

    conv - relu - conv | batch norm | relu - conv - ...          layer 0 | - | layer 1

Invariants.  Two nodes of one layer have no path through another layer or through a node outside, so a
piece is convex; inside it every value is cut as it was made.

Not done.  Several layerings (a node that could belong to two layers is in the earlier one).
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.analysis.dims import Dimension, axes
from lowtide.analysis.region import before, connected_parts
from lowtide.ir import Graph, Node
from lowtide.ir.graph import Role

__all__ = ["Region", "regions"]

Region = Mapping[int, int]
"""Node id -> position of its axis in ``axes(graph, node)``."""


def regions(graph: Graph, dimension: Dimension) -> tuple[Region, ...]:
    """Maximal regions along a dimension that hold at least two operators, largest first."""
    chosen = _without_counts(graph, _choose_axes(graph, dimension))
    layers: dict[int, list[int]] = {}
    for node, layer in _layers(graph, chosen).items():
        if node in chosen:
            layers.setdefault(layer, []).append(node)
    found = [
        {node: chosen[node] for node in piece}
        for members in layers.values()
        for piece in connected_parts(graph, members)
        if sum(not graph.is_view(graph.node[node]) for node in piece) > 1
    ]
    return tuple(sorted(found, key=lambda each: (-len(each), min(each))))


def _choose_axes(graph: Graph, dimension: Dimension) -> dict[int, int]:
    """One axis per node of the dimension: the one that fits most of what its producers chose."""
    cut: dict[int, int | None] = {}
    chosen: dict[int, int] = {}
    for node in graph.nodes:
        positions = dimension.nodes.get(node.id)
        if not positions:
            continue
        options = axes(graph, node)
        fitting = {
            position: sum(
                cut[value] == dim
                for value, dim in zip(node.inputs, options[position].inputs, strict=True)
                if value in cut
            )
            for position in positions
        }
        best = max(positions, key=lambda position: (fitting[position], -position))
        chosen[node.id] = best
        cut.update(zip(node.outputs, options[best].outputs, strict=True))
    return chosen


def _without_counts(graph: Graph, chosen: Mapping[int, int]) -> dict[int, int]:
    """Leave out sums that no weight goes into, such as the number of targets, and what they need.

    They are cheap and known before the region starts; inside, they would part forward from backward.
    """
    weighted = {value for value in graph.inputs if graph.storage_of(value).role is Role.PARAM}
    for node in graph.nodes:
        if not weighted.isdisjoint(node.inputs):
            weighted.update(node.outputs)
    outside: set[int] = set()
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        if not weighted.isdisjoint(node.outputs):
            continue
        summed = node.id in chosen and None in axes(graph, node)[chosen[node.id]].outputs
        if summed or not needed.isdisjoint(node.outputs):
            outside.add(node.id)
            needed.update(node.inputs)
    return {node: position for node, position in chosen.items() if node not in outside}


def _layers(graph: Graph, chosen: Mapping[int, int]) -> dict[int, int]:
    """Layer of every node: 0 before any region; one more after each border that a path crosses."""
    made: dict[int, int | None] = {}
    for number, position in chosen.items():
        found = axes(graph, graph.node[number])[position]
        made.update(zip(graph.node[number].outputs, found.outputs, strict=True))
    order = before(graph)
    layer: dict[int, int] = {}
    for node in graph.nodes:
        smooth = _smooth_producers(graph, node, chosen, made)
        layer[node.id] = max(
            (layer[each] + (each in chosen and each not in smooth) for each in order[node.id]), default=0
        )
    return layer


def _smooth_producers(
    graph: Graph, node: Node, chosen: Mapping[int, int], made: Mapping[int, int | None]
) -> set[int]:
    """The producers whose values `node` reads cut just as they were made."""
    if node.id not in chosen:
        return set()
    dims = axes(graph, node)[chosen[node.id]].inputs
    smooth: set[int] = set()
    rough: set[int] = set()
    for value, dim in zip(node.inputs, dims, strict=True):
        producer = graph.producer.get(value)
        if producer is not None:
            fits = value in made and made[value] is not None and made[value] == dim
            (smooth if fits else rough).add(producer)
    return smooth - rough
