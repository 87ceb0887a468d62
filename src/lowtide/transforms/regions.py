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

from collections.abc import Callable, Collection, Mapping, Sequence

import rustworkx

from lowtide.analysis.axis import Axis
from lowtide.analysis.dims import SUM_OF_SUMS, Dimension, axes, axis_at, is_plain_addition
from lowtide.analysis.region import before, connected_parts
from lowtide.ir import Graph, Node
from lowtide.ir.graph import Role

__all__ = ["Loops", "Region", "choose_loops", "inner_bytes", "layers_of", "nested_regions", "regions"]

Region = Mapping[int, int]
"""Node id -> position of its axis (`axis_at`)."""

Loops = Callable[[Graph, Node], tuple[Axis, ...]]
"""The loops that a node offers: `axes`, or those with halos as well."""


def regions(graph: Graph, dimension: Dimension) -> tuple[Region, ...]:
    """Maximal regions along a dimension that hold at least two operators, largest first."""
    chosen = _without_counts(graph, choose_loops(graph, dimension.nodes, axes))
    layers: dict[int, list[int]] = {}
    for node, layer in layers_of(graph, chosen, axes).items():
        if node in chosen:
            layers.setdefault(layer, []).append(node)
    pieces = [
        _trimmed(graph, piece) for members in layers.values() for piece in connected_parts(graph, members)
    ]
    found = [
        _with_sums(graph, {node: chosen[node] for node in piece})
        for piece in pieces
        if sum(not graph.is_view(graph.node[node]) for node in piece) > 1
    ]
    return tuple(sorted(found, key=lambda each: (-len(each), min(each))))


def choose_loops(graph: Graph, nodes: Mapping[int, Sequence[int]], loops: Loops) -> dict[int, int]:
    """One loop per node, of the positions given: the one that fits most of what its producers chose."""
    cut: dict[int, int | None] = {}
    chosen: dict[int, int] = {}
    for node in graph.nodes:
        positions = nodes.get(node.id)
        if not positions:
            continue
        options = loops(graph, node)
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
    weighted = _weighted(graph)
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


def _weighted(graph: Graph) -> set[int]:
    """The values that depend on a parameter, the parameters included; all where there is none."""
    found = {value for value in graph.inputs if graph.storage_of(value).role is Role.PARAM}
    if not found:
        return set(graph.values)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def layers_of(graph: Graph, chosen: Mapping[int, int], loops: Loops) -> dict[int, int]:
    """Layer of every node: 0 before any region; one more after each border that a path crosses."""
    made: dict[int, int | None] = {}
    for number, position in chosen.items():
        found = loops(graph, graph.node[number])[position]
        made.update(zip(graph.node[number].outputs, found.outputs, strict=True))
    order = before(graph)
    layer: dict[int, int] = {}
    for node in graph.nodes:
        read = loops(graph, node)[chosen[node.id]].inputs if node.id in chosen else ()
        smooth = _smooth_producers(graph, node, read, made)
        layer[node.id] = max(
            (layer[each] + (each in chosen and each not in smooth) for each in order[node.id]), default=0
        )
    return layer


def _smooth_producers(
    graph: Graph, node: Node, read: Sequence[int | None], made: Mapping[int, int | None]
) -> set[int]:
    """The producers whose values `node` reads cut just as they were made; none if it is not cut."""
    smooth: set[int] = set()
    rough: set[int] = set()
    for value, dim in zip(node.inputs, read, strict=False):
        producer = graph.producer.get(value)
        if producer is not None:
            fits = value in made and made[value] is not None and made[value] == dim
            (smooth if fits else rough).add(producer)
    return smooth - rough


def _with_sums(graph: Graph, region: dict[int, int]) -> dict[int, int]:
    """`region` and the additions of two of its sums that nothing else reads: a tied weight's gradients."""
    grown = dict(region)
    for node in graph.nodes:
        if node.id in grown or not is_plain_addition(graph, node):
            continue
        makers = [graph.producer.get(value) for value in node.inputs]
        if all(maker in grown for maker in makers) and all(
            graph.readers[value] == (node.id,)
            and value not in graph.outputs
            and _is_sum(graph, grown, graph.producer[value], value)
            for value in node.inputs
        ):
            grown[node.id] = SUM_OF_SUMS
    return {node.id: grown[node.id] for node in graph.nodes if node.id in grown}


def _is_sum(graph: Graph, region: Region, number: int, value: int) -> bool:
    node = graph.node[number]
    return axis_at(graph, node, region[number]).outputs[node.outputs.index(value)] is None


def _trimmed(graph: Graph, piece: Sequence[int]) -> tuple[int, ...]:
    """`piece` without the nodes at its start that make little of much, such as the packing of a mask.

    Inputs exist as wholes while the parts run.  A node that reads only inputs, and is the only one to read
    them, is better done before if its results are half as large; inputs that the caller owns cost nothing.
    """
    inside = set(piece)
    passed: set[int] = set()  # views that come along if a later node is done before
    for number in piece:
        node = graph.node[number]
        if any(graph.producer.get(value) in inside - passed for value in node.inputs):
            continue
        if graph.is_view(node):
            passed.add(number)
        elif 2 * _made_bytes(graph, node) <= _freed_bytes(graph, node, inside - passed):
            inside.discard(number)
    removed = set(piece) - inside
    for number in reversed(piece):  # whatever serves a node that is done before is done before as well
        if number in passed and _serves_outside(graph, number, inside, removed):
            inside.discard(number)
            removed.add(number)
    return tuple(number for number in piece if number in inside)


def _made_bytes(graph: Graph, node: Node) -> int:
    return sum(graph.storages[storage].nbytes for storage in {graph.values[v].storage for v in node.outputs})


def _freed_bytes(graph: Graph, node: Node, inside: Collection[int]) -> int:
    """Bytes of the inputs of `node` that nothing else inside reads."""
    found = 0
    for number in {graph.values[value].storage for value in node.inputs}:
        storage = graph.storages[number]
        readers = {reader for value in graph.views_of[number] for reader in graph.readers[value]}
        if not storage.role.resident and readers.isdisjoint(set(inside) - {node.id}):
            found += storage.nbytes
    return found


def _serves_outside(graph: Graph, number: int, inside: Collection[int], removed: Collection[int]) -> bool:
    """Whether a view at the start serves a node that was removed, or nothing inside at all."""
    readers = {reader for value in graph.node[number].outputs for reader in graph.readers[value]}
    return bool(readers) and (readers.isdisjoint(inside) or not readers.isdisjoint(removed))


# --- regions inside a region ----------------------------------------------------------------------


def nested_regions(graph: Graph, region: Region) -> tuple[Region, ...]:
    """Regions inside `region` that start at one value and come back to it, largest inner bytes first.

    What a node dominates depends on it alone: from the input of a layer on, all later layers, the loss, and
    the backward of those layers (MAGIS, section 4.2).  Of a chain of dominators with much the same region,
    the one with the least bytes at its border is kept.  Weights, masks and constants are no paths.  A region
    must be worth it in two parts: half of its inner bytes must exceed the bytes that it reads from outside.
    """
    weighted = _weighted(graph)
    flow = [number for number in region if not weighted.isdisjoint(graph.node[number].outputs)]
    under = _dominated(graph, flow)
    found: list[dict[int, int]] = []
    for number in flow:
        inside = _with_sources(graph, under[number] - {number}, region)
        if sum(not graph.is_view(graph.node[each]) for each in inside) > 2 and len(inside) < len(region):
            found.append({each: region[each] for each in region if each in inside})
    found.sort(key=lambda each: (_crossing_bytes(graph, each), -len(each)))
    kept: list[dict[int, int]] = []
    for each in found:
        if all(len(each.keys() & other.keys()) < 0.8 * max(len(each), len(other)) for other in kept):
            kept.append(each)
    worth = [each for each in kept if inner_bytes(graph, each) > 2 * _crossing_bytes(graph, each)]
    return tuple(sorted(worth, key=lambda each: -inner_bytes(graph, each)))


def _dominated(graph: Graph, flow: Sequence[int]) -> dict[int, set[int]]:
    """Node -> itself and the nodes of `flow` that paths from the start of `flow` reach only through it."""
    digraph = rustworkx.PyDiGraph()
    source = digraph.add_node(None)
    index = {number: digraph.add_node(number) for number in flow}
    for number, k in index.items():
        producers = {graph.producer.get(value) for value in graph.node[number].inputs} & index.keys()
        edges = [index[each] for each in producers if each is not None] or [source]
        digraph.add_edges_from_no_data([(each, k) for each in edges])
    parent = rustworkx.immediate_dominators(digraph, source)
    under = {number: {number} for number in flow}
    for number in reversed(flow):
        above = digraph[parent[index[number]]]
        if above is not None:
            under[above] |= under[number]
    return under


def _with_sources(graph: Graph, inside: set[int], region: Region) -> set[int]:
    """`inside` and the nodes of `region` that only it needs: constants, unpacked masks."""
    grown = set(inside)
    for number in reversed(tuple(region)):
        readers = {reader for value in graph.node[number].outputs for reader in graph.readers[value]}
        if readers and readers <= grown:
            grown.add(number)
    return grown


def _crossing_bytes(graph: Graph, region: Region) -> int:
    """Bytes that a region reads, made outside and not the caller's."""
    read = {graph.values[value].storage for number in region for value in graph.node[number].inputs}
    made = {graph.values[value].storage for number in region for value in graph.node[number].outputs}
    storages = (graph.storages[number] for number in read - made)
    return sum(storage.nbytes for storage in storages if not storage.role.resident)


def inner_bytes(graph: Graph, region: Region) -> int:
    """Bytes of what a region makes and nobody outside reads."""
    made: dict[int, bool] = {}
    for number in region:
        for value in graph.node[number].outputs:
            outside = value in graph.outputs or any(reader not in region for reader in graph.readers[value])
            storage = graph.values[value].storage
            made[storage] = made.get(storage, False) or outside
    return sum(graph.storages[storage].nbytes for storage, outside in made.items() if not outside)
