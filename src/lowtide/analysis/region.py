"""Regions of a graph: convexity, connected pieces, dominators, narrow waists.

Problem.  A transformation that replaces a set of nodes by one node must not make a cycle; a search
wants to know where a graph is narrow and which bytes depend on which node.

Method.  `before` is the partial order that every schedule respects: data, hazards on storages, and
the chain of random nodes, which draw in program order.  Reachability is a bit set (a Python integer)
per node; dominators come from rustworkx.

Invariants.  A set is convex exactly if contracting it leaves no cycle: no path of `before` leaves the
set and comes back.

Not done.  Which region is worth anything (`lowtide.search`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

import rustworkx

from lowtide.ir.graph import Graph
from lowtide.ir.random import is_random

__all__ = ["before", "connected_parts", "immediate_dominators", "leaks", "narrow_waists"]


def before(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """Node id -> the nodes that have to run before it; random nodes keep their program order."""
    known = graph.memo.get(before)
    if known is None:
        known = graph.memo[before] = _before(graph)
    return cast("Mapping[int, tuple[int, ...]]", known)


def _before(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = dict(graph.dependencies)
    last: int | None = None
    for node in graph.nodes:
        if is_random(node.op):
            if last is not None and last not in found[node.id]:
                found[node.id] = (*found[node.id], last)
            last = node.id
    return found


def leaks(graph: Graph, nodes: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Where paths leave `nodes` and come back: (outside node, inside node); empty if convex."""
    inside = frozenset(nodes)
    order = before(graph)
    after: set[int] = set()  # outside, and reachable from the inside
    found: list[tuple[int, int]] = []
    for node in graph.nodes:
        earlier = order[node.id]
        if node.id in inside:
            found.extend((each, node.id) for each in earlier if each in after)
        elif any(each in inside or each in after for each in earlier):
            after.add(node.id)
    return tuple(found)


def connected_parts(graph: Graph, nodes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """The pieces of `nodes` that values made inside connect, each in program order, by first node."""
    position = {node.id: k for k, node in enumerate(graph.nodes)}
    members = sorted(nodes, key=position.__getitem__)
    pieces = rustworkx.PyGraph()
    index = dict(zip(members, pieces.add_nodes_from(members), strict=True))
    for member in members:
        for value in graph.node[member].inputs:
            producer = graph.producer.get(value)
            if producer in index:
                pieces.add_edge(index[producer], index[member], None)
    found = [
        tuple(sorted((pieces[k] for k in part), key=position.__getitem__))
        for part in rustworkx.connected_components(pieces)
    ]
    return tuple(sorted(found, key=lambda part: position[part[0]]))


def immediate_dominators(graph: Graph) -> dict[int, int | None]:
    """Node id -> the last node that every data path from the inputs to it passes; None for none."""
    digraph = rustworkx.PyDiGraph()
    source = digraph.add_node(None)
    index = {node.id: digraph.add_node(node.id) for node in graph.nodes}
    for node in graph.nodes:
        producers = {graph.producer.get(value) for value in node.inputs}
        known = [index[each] for each in producers if each is not None]
        from_outside = not known or None in producers
        edges = [*known, source] if from_outside else known
        digraph.add_edges_from_no_data([(each, index[node.id]) for each in edges])
    tree = rustworkx.immediate_dominators(digraph, source)
    return {node: digraph[tree[k]] for node, k in index.items()}


def narrow_waists(graph: Graph) -> dict[int, int]:
    """Node id -> how many nodes are neither before nor after it (MAGIS, section 5); 0 cuts the graph."""
    order = before(graph)
    bit = {node.id: 1 << k for k, node in enumerate(graph.nodes)}
    ancestors: dict[int, int] = {}
    count: dict[int, int] = {}
    for node in graph.nodes:
        seen = 0
        for each in order[node.id]:
            seen |= ancestors[each] | bit[each]
        ancestors[node.id] = seen
        count[node.id] = len(graph) - 1 - seen.bit_count()
    descendants = {node.id: 0 for node in graph.nodes}
    for node in reversed(graph.nodes):
        count[node.id] -= descendants[node.id].bit_count()
        reached = descendants[node.id] | bit[node.id]
        for each in order[node.id]:
            descendants[each] |= reached
    return count
