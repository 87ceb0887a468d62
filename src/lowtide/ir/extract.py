"""A set of nodes as a graph of its own: the body of a Fused node, and what crosses its border.

Problem.  A group of nodes that becomes one node needs a body with only what is inside, inputs and outputs
in a fixed order, and the views between its members made inside.

Method.  Views are free, so they are not members: a member that reads a view of another member's result
gets a copy of the view node inside; a view of anything older is an input of its own (a strided window).
A result is an output if anything outside reads it, directly or through views; those views stay outside.

Invariants.  Body inputs are INPUT (or HOST) storages, each alone on its storage at offset 0; CONST if they
are weights that no node of the graph writes (an inference): what a kernel derives from them may be kept.
Outputs are OUTPUT storages.  Nodes and values keep their ids.  Not done here: whether the set is convex.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Node, Role, Storage, Value

__all__ = ["Extract", "base_of", "extract"]


@dataclass(frozen=True)
class Extract:
    """The body and, by position, the outer values that its inputs and outputs bind to."""

    body: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def base_of(graph: Graph, value: int) -> tuple[int, tuple[int, ...]]:
    """(the value that `value` is a view of, itself not made by a view; the views between, last first)."""
    views: list[int] = []
    while (producer := graph.producer.get(value)) is not None:
        node = graph.node[producer]
        if not graph.is_view(node):
            break
        views.append(producer)
        storage = graph.values[value].storage
        value = next(each for each in node.inputs if graph.values[each].storage == storage)
    return value, tuple(views)


def extract(graph: Graph, members: Collection[int]) -> Extract:
    """The body of `members` (no views among them), with the views that connect them."""
    inside = frozenset(members)
    kept = set(inside)
    for number in inside:
        for value in graph.node[number].inputs:
            base, views = base_of(graph, value)
            if graph.producer.get(base) in inside:
                kept.update(views)
    nodes = tuple(node for node in graph.nodes if node.id in kept)
    made = {out for node in nodes for out in node.outputs}
    inputs = tuple(dict.fromkeys(v for node in nodes for v in node.inputs if v not in made))
    outputs = tuple(
        out
        for node in nodes
        if node.id in inside
        for out in node.outputs
        if _needed_outside(graph, out, inside)
    )
    return Extract(_body(graph, nodes, inputs, outputs), inputs, outputs)


def _input_role(graph: Graph, value: int) -> Role:
    storage = graph.storage_of(value)
    if storage.role is Role.HOST:
        return Role.HOST
    kept = storage.role in (Role.PARAM, Role.BUFFER, Role.CONST) and storage.id not in graph.written
    return Role.CONST if kept else Role.INPUT


def _needed_outside(graph: Graph, value: int, inside: frozenset[int]) -> bool:
    """Whether a node outside reads the storage of `value`, or the graph returns it."""
    for each in graph.views_of[graph.values[value].storage]:
        if each in graph.outputs:
            return True
        for reader in graph.readers[each]:
            if reader not in inside and not graph.is_view(graph.node[reader]):
                return True
    return False


def _body(graph: Graph, nodes: tuple[Node, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Graph:
    values: dict[int, Value] = {}
    storages: dict[int, Storage] = {}
    fresh = max(graph.storages, default=-1) + 1
    for number, value in enumerate(inputs):
        old = graph.values[value]
        role = _input_role(graph, value)
        nbytes = 0 if role is Role.HOST else old.meta.span_bytes
        storages[fresh + number] = Storage(fresh + number, nbytes, role)
        values[value] = Value(value, old.meta, fresh + number)
    given = {graph.values[out].storage for out in outputs}
    for node in nodes:
        for out in node.outputs:
            old = graph.values[out]
            values[out] = old
            role = Role.OUTPUT if old.storage in given else Role.TEMP
            storages.setdefault(old.storage, Storage(old.storage, graph.storages[old.storage].nbytes, role))
    return Graph(nodes, values, storages, inputs, outputs)
