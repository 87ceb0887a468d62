"""Clean-up that every captured graph gets: dead code away, false dependencies away.

Dead code: what no output, no write and no random draw needs.  A random node stays even if nobody reads it, so
that the generator ends where eager leaves it.

False dependencies: the backward of a training-mode BatchNorm lists the running statistics but works with the
saved ones, so it does not have to come before their update.  (Tests hold the CPU kernel to that, bit by bit.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lowtide.capture.layout import indices
from lowtide.ir.aten import renumber
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten
from lowtide.ir.random import is_random

__all__ = ["drop_statistics", "drop_unread_constants", "eliminate_dead_code"]

_NORM_BACKWARD = "aten.native_batch_norm_backward.default"
_STATISTICS = (3, 4)
_TRAIN = 7


def eliminate_dead_code(graph: Graph, wanted: Collection[int]) -> Graph:
    """The graph without nodes that neither its outputs nor the `wanted` values need; inputs all stay."""
    needed = {*graph.outputs, *wanted}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.writes or is_random(node.op) or not needed.isdisjoint(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return with_nodes(graph, kept[::-1])


def drop_unread_constants(graph: Graph) -> Graph:
    """The graph without constants that nobody reads."""
    kept = tuple(
        value
        for value in graph.inputs
        if graph.readers[value] or value in graph.outputs or graph.storage_of(value).role is not Role.CONST
    )
    return with_nodes(replace(graph, inputs=kept), graph.nodes)


def with_nodes(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """The graph of these nodes, without values and storages that nobody mentions any more."""
    used = set(graph.inputs).union(*(node.inputs for node in nodes), *(node.outputs for node in nodes))
    values = {key: value for key, value in graph.values.items() if key in used}
    storages = {value.storage for value in values.values()}
    return Graph(
        tuple(nodes),
        values,
        {key: storage for key, storage in graph.storages.items() if key in storages},
        graph.inputs,
        graph.outputs,
    )


def drop_statistics(graph: Graph) -> Graph:
    """rewrite: running statistics of a training-mode BatchNorm backward -> None."""
    return replace(graph, nodes=tuple(_without_statistics(node) for node in graph.nodes))


def _without_statistics(node: Node) -> Node:
    op = node.op
    if not isinstance(op, Aten) or op.overload != _NORM_BACKWARD or op.args[_TRAIN] is not True:
        return node
    args = tuple(None if index in _STATISTICS else arg for index, arg in enumerate(op.args))
    return without_unused_inputs(replace(node, op=replace(op, args=args)))


def without_unused_inputs(node: Node) -> Node:
    """The node without inputs that its operation does not mention."""
    assert isinstance(node.op, Aten)
    used = sorted(set(indices(node.op)))
    positions = {old: new for new, old in enumerate(used)}
    op = renumber(node.op, [positions.get(index, 0) for index in range(len(node.inputs))])
    return replace(node, op=op, inputs=tuple(node.inputs[index] for index in used))
