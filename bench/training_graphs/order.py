"""The order to start from: what belongs to the backward, what can wait until it is read, what frees.

Problem.  The recorded order lists weights first and masks with the forward, long before anybody reads them.

Method.  `late_nodes`: what no result of the forward needs.  `tidy` drops what nobody reads, puts parts of a
tuple right behind it, and defers to their first reader weights and inputs, what is made of weights alone,
and late nodes that read early values only (masks).  `release` then runs a late node as soon as it frees
more than it makes.

Invariants.  The nodes stay the same, but for unread parts of tuples.  An update stays behind all readers of
its weight.
"""

from __future__ import annotations

from collections.abc import Collection

from .model import Graph, Node

__all__ = ["late_nodes", "release", "tidy"]

_SMALL = 4
"""A late node that makes this much less than it reads (a weight's gradient) never waits."""


def late_nodes(graph: Graph) -> frozenset[int]:
    """The nodes that neither are nor lead to a result other than a weight's update."""
    needed: set[int] = set()
    for node in reversed(graph.nodes):
        result = not graph.readers[node.id] and node.kind not in ("inplace", "weight", "input")
        if node.id in needed or (result and node.op != "index_out"):
            needed.add(node.id)
            needed.update(node.inputs)
    given = {node.id for node in graph.nodes if node.op == "placeholder"}
    return frozenset(node.id for node in graph.nodes) - needed - given


def tidy(graph: Graph, late: Collection[int], masks: bool = True) -> Graph:
    """The same nodes, whatever can wait deferred to its first reader."""
    kept = [node for node in graph.nodes if node.op != "index_out" or graph.readers[node.id]]
    node_of = {node.id: node for node in kept}
    parts: dict[int, list[Node]] = {}
    for node in kept:
        if node.op == "index_out":
            parts.setdefault(node.inputs[0], []).append(node)
    deferred = _deferrable(kept, late if masks else ())
    order: list[Node] = []
    done: set[int] = set()

    def emit(node: Node) -> None:
        for value in node.inputs:
            if value not in done:
                emit(node_of[value])
        order.append(node)
        done.add(node.id)
        for part in parts.get(node.id, ()):
            if part.id not in done:
                emit(part)

    for node in kept:
        if node.id not in done and node.id not in deferred:
            emit(node)
    for node in kept:
        if node.id not in done:
            emit(node)
    return Graph(tuple(order), graph.inputs, graph.outputs)


def _deferrable(nodes: Collection[Node], late: Collection[int]) -> set[int]:
    weights: set[int] = set()
    found: set[int] = set()
    for node in nodes:
        given = node.op == "placeholder"
        derived = node.op not in ("fission", "index_out", "placeholder") and node.kind != "inplace"
        if node.kind == "weight" or node.free or (derived and weights.issuperset(node.inputs)):
            weights.add(node.id)
        mask = derived and node.id in late and late_free(node, late)
        if given or node.id in weights or mask:
            found.add(node.id)
    return found


def late_free(node: Node, late: Collection[int]) -> bool:
    """Whether a node reads early values only."""
    return all(value not in late for value in node.inputs)


def release(graph: Graph, late: Collection[int]) -> Graph:
    """The same nodes; a late node that frees more than it makes runs as soon as it can."""
    left = {node.id: len(graph.readers[node.id]) for node in graph.nodes}
    done: set[int] = set()
    order: list[Node] = []
    last_reader = _last_readers(graph)
    ready: dict[int, Node] = {}
    waiting = {node.id: node for node in graph.nodes if node.id in late and node.kind != "inplace"}

    def run(node: Node) -> None:
        order.append(node)
        done.add(node.id)
        waiting.pop(node.id, None)
        ready.pop(node.id, None)
        for value in dict.fromkeys(node.inputs):
            left[value] -= 1
        for reader in graph.readers[node.id]:
            if reader in waiting and done.issuperset(waiting[reader].inputs):
                ready[reader] = waiting[reader]

    for node in graph.nodes:
        if node.id in done:
            continue
        run(node)
        while (gain := _best_release(graph, ready.values(), left, last_reader)) is not None:
            run(gain)
    return Graph(tuple(order), graph.inputs, graph.outputs)


def _last_readers(graph: Graph) -> dict[int, bool]:
    """Whether a value is the region's operand: its bytes are not the body's to free."""
    return {node.id: node.free for node in graph.nodes}


def _best_release(
    graph: Graph, ready: Collection[Node], left: dict[int, int], free: dict[int, bool]
) -> Node | None:
    best, most = None, 0
    for node in ready:
        if node.inputs and node.count * _SMALL <= max(graph.node[value].count for value in node.inputs):
            return node
        if node.op in ("fission", "fission_out"):
            continue
        freed = sum(graph.node[v].count for v in dict.fromkeys(node.inputs) if left[v] == 1 and not free[v])
        gain = freed - node.count
        if gain > most:
            best, most = node, gain
    return best
