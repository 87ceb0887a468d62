"""Weights made from weights: which nodes can run once, before the first inference.

Problem.  A folded BatchNorm or a merged projection is worth it only if its weights are not computed again at
each call.

Method.  A node is derived if it reads only parameters, buffers and constants that the graph never writes,
or what derived nodes made, and is deterministic.  `split_derived` cuts the graph in two: the preparation,
whose results become CONST inputs of the rest: resident, and for kernels as good as parameters (they keep
what they pack of them).  They are made again when an original changes.

Not done here: noticing that an original changed (the plan compares versions), training (nothing is derived).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir.graph import Graph, Node, Role, Storage
from lowtide.ir.ops import Aten
from lowtide.ir.random import is_random

__all__ = ["Prepared", "derived_nodes", "split_derived"]

_FIXED = frozenset({Role.PARAM, Role.BUFFER, Role.CONST})


@dataclass(frozen=True)
class Prepared:
    """`preparation` computes, from the graph's own inputs, the values `state` (ids as in `graph`), which are
    further inputs of `graph`."""

    preparation: Graph
    graph: Graph
    state: tuple[int, ...]


def derived_nodes(graph: Graph) -> tuple[int, ...]:
    """Nodes that depend on weights alone, in program order."""
    written = {graph.values[value].storage for node in graph.nodes for value in node.writes}
    fixed = {
        value
        for value in graph.inputs
        if graph.storage_of(value).role in _FIXED and graph.values[value].storage not in written
    }
    found = []
    for node in graph.nodes:
        if _runs_once(node) and node.inputs and fixed.issuperset(node.inputs):
            found.append(node.id)
            fixed.update(node.outputs)
    return tuple(found)


def _runs_once(node: Node) -> bool:
    return isinstance(node.op, Aten) and not node.writes and bool(node.outputs) and not is_random(node.op)


def split_derived(graph: Graph) -> Prepared:
    """Preparation and rest; views of weights stay where they are read."""
    derived = [graph.node[number] for number in derived_nodes(graph)]
    storages = {graph.values[value].storage for value in graph.inputs}
    made: set[int] = set()
    for node in derived:
        if not graph.is_view(node):
            made.update(node.outputs)
            storages.update(graph.values[out].storage for out in node.outputs)
    ahead = {node.id for node in derived if made.intersection(node.outputs)}
    if not ahead:
        return Prepared(_part(graph, (), ()), graph, ())
    views = {node.id for node in derived if node.id not in ahead}
    rest = _without_dead(tuple(node for node in graph.nodes if node.id not in ahead), graph, views)
    read = {value for node in rest for value in node.inputs} | set(graph.outputs)
    state = tuple(
        value for node in graph.nodes if node.id in ahead for value in node.outputs if value in read
    )
    first = tuple(node for node in graph.nodes if node.id in ahead | views)
    return Prepared(_part(graph, _needed(first, state), state), _rest(graph, rest, state), state)


def _without_dead(nodes: tuple[Node, ...], graph: Graph, views: set[int]) -> tuple[Node, ...]:
    """`nodes` without those `views` that none of them reads."""
    alive = set(graph.outputs)
    kept = []
    for node in reversed(nodes):
        if node.id in views and not alive.intersection(node.outputs):
            continue
        kept.append(node)
        alive.update(node.inputs)
    return tuple(reversed(kept))


def _needed(nodes: tuple[Node, ...], wanted: tuple[int, ...]) -> tuple[Node, ...]:
    alive = set(wanted)
    kept = []
    for node in reversed(nodes):
        if alive.intersection(node.outputs):
            kept.append(node)
            alive.update(node.inputs)
    return tuple(reversed(kept))


def _part(graph: Graph, nodes: tuple[Node, ...], outputs: tuple[int, ...]) -> Graph:
    """Some nodes as a graph on the same inputs; what it returns has the role OUTPUT."""
    given = {graph.values[out].storage for out in outputs}
    return _cut(graph, nodes, graph.inputs, outputs, Role.OUTPUT, given)


def _rest(graph: Graph, nodes: tuple[Node, ...], state: tuple[int, ...]) -> Graph:
    given = {graph.values[value].storage for value in state}
    return _cut(graph, nodes, (*graph.inputs, *state), graph.outputs, Role.CONST, given)


def _cut(
    graph: Graph, nodes: tuple[Node, ...], inputs: tuple[int, ...], outputs: tuple[int, ...],
    role: Role, changed: set[int],
) -> Graph:  # fmt: skip
    used = {*inputs, *outputs, *(v for node in nodes for v in (*node.inputs, *node.outputs))}
    values = {number: value for number, value in graph.values.items() if number in used}
    storages = {}
    for value in values.values():
        old = graph.storages[value.storage]
        storages[old.id] = Storage(old.id, old.nbytes, role) if old.id in changed else old
    return Graph(nodes, values, storages, inputs, outputs)
