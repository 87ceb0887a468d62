"""Fission: a set of nodes becomes one node whose body runs part by part.

rewrite:    members S, a dimension per value (`axes.cut_along`), n parts -> one region; operands are sliced or
            shared, results concatenated or summed, read through one `fission_out` each.
legal when: S is convex (no path leaves and comes back), n divides the axis, a sum is read outside only,
            nothing inside updates a weight.
effect:     inner values shrink to one part; sliced operands count again at part size, results twice while
            their parts are put together; each part pays every operator's price at its own shape.

Not done.  Halos; parts of unequal size (the format has none); slices of what is already cut along the same
axis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from .axes import SUM, Uncuttable, batch_of, cut_along
from .model import Graph, Node, Shape, Split

__all__ = ["carve", "split_batch", "with_sources"]


def carve(graph: Graph, members: Collection[int], parts: int, cut: Mapping[int, int | None]) -> Graph:
    """`graph` with the region `members` in `parts` parts; raises Uncuttable where that is not legal."""
    inside = [node for node in graph.nodes if node.id in members]
    ids = {node.id for node in inside}
    _check(graph, inside, ids, parts, cut)
    given = list(dict.fromkeys(value for node in inside for value in node.inputs if value not in ids))
    results = [n.id for n in inside if not graph.readers[n.id] or not ids.issuperset(graph.readers[n.id])]
    region = graph.next_id
    body = _body(graph, inside, given, results, parts, cut)
    length = next(graph.node[value].shape[dim] for value in given if (dim := _dim(cut[value])) is not None)
    split = Split(
        parts,
        length,
        tuple(_dim(cut[value]) for value in given),
        tuple(_out(cut[value]) for value in results),
        body,
    )
    whole = Node(region, "fission", "fission", tuple(given), (), {}, (), split)
    outs = {
        value: Node(value, "fission_out", "fission_out", (region,), graph.node[value].shape, {"index": k})
        for k, value in enumerate(results)
    }
    return _placed(graph, ids, whole, outs)


def _dim(cut: int | None) -> int | None:
    return None if cut is None or cut == SUM else cut


def _out(cut: int | None) -> int:
    if cut is None:
        raise Uncuttable("a result of the region does not depend on the axis")
    return cut


def _check(
    graph: Graph, inside: list[Node], ids: set[int], parts: int, cut: Mapping[int, int | None]
) -> None:
    for node in inside:
        if node.kind in ("inplace", "weight", "input"):
            raise Uncuttable(f"{node.id}:{node.op} cannot be inside a region")
        if cut[node.id] == SUM and not ids.isdisjoint(graph.readers[node.id]):
            raise Uncuttable(f"the sum {node.id} is read inside")
        dim = _dim(cut[node.id])
        if dim is not None and node.shape[dim] % parts:
            raise Uncuttable(f"{parts} parts do not divide {node.shape} along {dim}")
    after = _after(graph, ids)
    for node in inside:
        if any(value in after and value not in ids for value in node.inputs):
            raise Uncuttable(f"a path leaves the region and comes back at {node.id}:{node.op}")


def _after(graph: Graph, ids: Collection[int]) -> set[int]:
    """What depends on the nodes `ids`, themselves included."""
    found = set(ids)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.add(node.id)
    return found


def _part_shape(shape: Shape, dim: int | None, parts: int) -> Shape:
    return shape if dim is None else (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])


def _body(
    graph: Graph,
    inside: list[Node],
    given: list[int],
    results: list[int],
    parts: int,
    cut: Mapping[int, int | None],
) -> Graph:
    nodes = []
    for value in given:
        dim = _dim(cut[value])
        shape = _part_shape(graph.node[value].shape, dim, parts)
        attrs = {"name": f"v{value}", "is_weight": False}
        nodes.append(Node(value, "placeholder", "input", (), shape, attrs, free=dim is None))
    for node in inside:
        dim = _dim(cut[node.id])
        attrs = dict(node.attrs)
        if "multi_out_shapes" in attrs:
            attrs["multi_out_shapes"] = [
                list(_part_shape(tuple(s), dim, parts)) for s in attrs["multi_out_shapes"]
            ]
        nodes.append(replace(node, shape=_part_shape(node.shape, dim, parts), attrs=attrs))
    return Graph(tuple(nodes), tuple(given), tuple(results))


def _placed(graph: Graph, ids: Collection[int], whole: Node, outs: Mapping[int, Node]) -> Graph:
    """What the region waits for, the region, the rest; wholes are taken at once, sums when they are read."""
    after = _after(graph, ids)
    nodes = [node for node in graph.nodes if node.id not in after]
    nodes.append(whole)
    waiting = dict(outs)
    assert whole.split is not None
    soon = [
        v for v, dim in zip(waiting, whole.split.out_dims, strict=True) if dim >= 0 or not graph.readers[v]
    ]
    nodes.extend(waiting.pop(value) for value in soon)
    for node in graph.nodes:
        if node.id in after and node.id not in ids:
            nodes.extend(waiting.pop(value) for value in node.inputs if value in waiting)
            nodes.append(node)
    nodes.extend(waiting.values())
    return Graph(tuple(nodes), graph.inputs, graph.outputs)


def with_sources(graph: Graph, members: Collection[int]) -> set[int]:
    """`members` and the nodes that only they need."""
    grown = set(members)
    for node in reversed(graph.nodes):
        readers = graph.readers[node.id]
        if readers and grown.issuperset(readers) and node.kind not in ("weight", "input", "inplace"):
            grown.add(node.id)
    return grown


def split_batch(graph: Graph, parts: int) -> Graph:
    """Forward, loss and backward in `parts` parts along the batch; weights are updated outside."""
    cut = cut_along(graph, batch_of(graph))
    inputs = {node.id for node in graph.nodes if node.kind == "input"}
    members = {value for value, dim in cut.items() if dim is not None} - inputs
    return carve(graph, with_sources(graph, members), parts, cut)
