"""A region inside: the late layers, forward, loss and backward, in parts of their own.

rewrite:    cut the forward at a place; what comes behind, and the backward as far as it needs only that,
            the values that cross and the weights used there, becomes a region of the innermost graph along
            the batch.
legal when: `carve` says so.
effect:     late layers hold one part of their values; early ones hold a whole one of the level above.
            Gradients of the late weights are sums of this region, then results of the one above.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from .axes import Uncuttable, batch_of, cut_along
from .model import Graph, Node
from .split import carve, with_sources

__all__ = ["carve_late", "places"]


def innermost(graph: Graph) -> Node | None:
    """The largest region of a graph, if it has one."""
    regions = [node for node in graph.nodes if node.split is not None]
    return max(regions, key=lambda node: len(node.split.body.nodes) if node.split else 0, default=None)


def carve_late(graph: Graph, late: Collection[int], before: int, parts: int) -> Graph:
    """`graph` with the layers behind the first `before` nodes of the forward as a region of `parts` parts."""
    region = innermost(graph)
    if region is not None and region.split is not None:
        inner = carve_late(region.split.body, late, before, parts)
        return replace_node(graph, replace(region, split=replace(region.split, body=inner)))
    cut = cut_along(
        graph, {value: dim for value, dim in batch_of(graph).items() if not graph.node[value].free}
    )
    forward = [
        n.id for n in graph.nodes if n.id not in late and n.op != "placeholder" and cut[n.id] is not None
    ]
    if not 0 < before < len(forward) - 1:
        raise Uncuttable(f"no place {before} in a forward of {len(forward)} nodes")
    members = set(forward[before:])
    crossing = {v for m in members for v in graph.node[m].inputs if v not in members}
    weights = set().union(*(_roots(graph, v, cut) for v in crossing if cut[v] is None))
    for node in graph.nodes:
        if node.id not in late or node.kind == "inplace" or cut[node.id] is None:
            continue
        known = (
            v in members
            or v in crossing
            or _given(graph, v)
            or (cut[v] is None and _roots(graph, v, cut) <= weights)
            for v in node.inputs
        )
        if all(known) and not members.isdisjoint(node.inputs):
            members.add(node.id)
    members = with_sources(graph, members) - set(forward[:before])
    return carve(graph, members, parts, cut)


def _roots(graph: Graph, value: int, cut: Mapping[int, int | None]) -> set[int]:
    """The weights that a value off the axis is made of."""
    node = graph.node[value]
    if not node.inputs or cut[value] is not None:
        return {value}
    return set().union(*(_roots(graph, each, cut) for each in node.inputs))


def _given(graph: Graph, value: int) -> bool:
    node = graph.node[value]
    return node.op == "placeholder" and not node.free and node.kind == "input"


def replace_node(graph: Graph, node: Node) -> Graph:
    """The graph with another node of the same id."""
    nodes = tuple(node if each.id == node.id else each for each in graph.nodes)
    return Graph(nodes, graph.inputs, graph.outputs)


def places(graph: Graph, late: Collection[int]) -> list[int]:
    """Places where few bytes cross: candidates for `carve_late`, from early to late."""
    region = innermost(graph)
    if region is not None and region.split is not None:
        return places(region.split.body, late)
    cut = cut_along(
        graph, {value: dim for value, dim in batch_of(graph).items() if not graph.node[value].free}
    )
    forward = [
        n.id for n in graph.nodes if n.id not in late and n.op != "placeholder" and cut[n.id] is not None
    ]
    at = {value: k for k, value in enumerate(forward)}
    last = {v: max((at[r] for r in graph.readers[v] if r in at), default=-1) for v in forward}
    crossing = [sum(graph.node[v].count for v in forward[:k] if last[v] >= k) for k in range(len(forward))]
    return [k for k in range(2, len(forward) - 4) if crossing[k] <= min(crossing[max(0, k - 4) : k + 5])]
