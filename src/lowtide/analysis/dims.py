"""The D-graph: which dimensions of which values are one loop of the whole graph (MAGIS, section 4.1).

Problem.  "Split along the batch" means a different dimension at every value: dimension 0 of images,
of logits and of merged (batch x token) rows, the contracted dimension of a weight gradient.

Method.  `axes` gives the loops of each node.  Joining the dimensions that one loop runs over, through
all nodes, gives connected components: batch, heads, tokens, hidden, vocabulary.  A node may own
several loops of one component (queries and keys both come from the tokens); which of them a region
uses is decided there, not here.

Invariants.  A cut is a fraction of the component, ``[a / extent, b / extent)``, the same for every
member, whatever its size in elements.

Not done.  Loops inside Fission, Fused and update nodes: those are opaque here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from lowtide.analysis.axis import Axis, axis_of, describe_call
from lowtide.analysis.axis_rules import rule_of
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Merge
from lowtide.ir.random import is_random

__all__ = [
    "SUM_OF_SUMS",
    "Dimension",
    "axes",
    "axes_of",
    "axis_at",
    "dimensions",
    "is_plain_addition",
    "opaque_operators",
]


@dataclass(frozen=True)
class Dimension:
    """One component of the D-graph.

    values: value id -> its dimensions in the component; nodes: node id -> positions in
    ``axes(graph, node)``.  extent: the most parts of equal size that every member allows.
    """

    values: Mapping[int, tuple[int, ...]]
    nodes: Mapping[int, tuple[int, ...]]
    extent: int


@lru_cache(maxsize=1 << 16)
def axes_of(op: Aten, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> tuple[Axis, ...]:
    """The loops of one operator call, given what it reads and makes."""
    rule = rule_of(op.overload)
    if rule is None or is_random(op) or not outputs:
        return ()
    links = [link for link in rule(describe_call(op, inputs, outputs)) if link.extent > 1]
    found = (axis_of(op, link, len(inputs)) for link in links)
    return tuple(axis for axis in found if axis is not None)


def axes(graph: Graph, node: Node) -> tuple[Axis, ...]:
    """The loops of `node` along which it can be cut; none if it is opaque, random or writes."""
    if not isinstance(node.op, Aten) or node.writes:
        return ()
    known = graph.memo.setdefault(axes, {})
    assert isinstance(known, dict)
    found: tuple[Axis, ...] | None = known.get(node.id)
    if found is None:
        metas = graph.values
        inputs = tuple(metas[value].meta for value in node.inputs)
        found = axes_of(node.op, inputs, tuple(metas[value].meta for value in node.outputs))
        known[node.id] = found
    return found


def opaque_operators(graph: Graph) -> tuple[str, ...]:
    """Overloads in `graph` that no axis rule covers, sorted."""
    names = {node.op.overload for node in graph.nodes if isinstance(node.op, Aten) and not node.writes}
    return tuple(sorted(name for name in names if rule_of(name) is None))


COUPLED = frozenset(
    {
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten.native_batch_norm.default",
        "aten.native_batch_norm_backward.default",
        "aten._softmax.default",
        "aten._log_softmax.default",
        "aten._softmax_backward_data.default",
        "aten._log_softmax_backward_data.default",
        "aten.cumsum.default",
    }
)
"""Operators whose first output has the shape of its first input, with dimensions that belong together
although they are no loop: the batch on both sides of a BatchNorm is one batch."""


SUM_OF_SUMS = -1
"""The position of the axis that `axis_at` gives a plain addition of two sums over parts."""


def axis_at(graph: Graph, node: Node, position: int) -> Axis:
    """``axes(graph, node)[position]``, or for `SUM_OF_SUMS` the way in which both terms are summed in parts.

    Raises IndexError if the node has no such axis.
    """
    if position != SUM_OF_SUMS:
        return axes(graph, node)[position]
    if not is_plain_addition(graph, node):
        raise IndexError(f"node {node.id} is no addition of two sums")
    return Axis(0, (None, None), (None,), (Merge.ADD,))  # an extent of 0 leaves the others' divisor as it is


def is_plain_addition(graph: Graph, node: Node) -> bool:
    """Whether `node` is a + b of two different values of one shape, strides and type."""
    op = node.op
    if not isinstance(op, Aten) or op.overload != "aten.add.Tensor" or len(op.args) != 2 or op.kwargs:
        return False
    metas = {graph.values[value].meta for value in (*node.inputs, *node.outputs)}
    return len(node.inputs) == 2 and len(metas) == 1


class _Union:
    """Disjoint sets of hashable members."""

    def __init__(self) -> None:
        self.parent: dict[tuple[int, int], tuple[int, int]] = {}

    def find(self, member: tuple[int, int]) -> tuple[int, int]:
        parent = self.parent.setdefault(member, member)
        while parent != self.parent[parent]:
            self.parent[member] = parent = self.parent[parent]
        return parent

    def join(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        self.parent[self.find(one)] = self.find(other)


def _members(node: Node, axis: Axis) -> list[tuple[int, int]]:
    """The (value, dimension) pairs that one loop of `node` runs over."""
    pairs = (*zip(node.inputs, axis.inputs, strict=True), *zip(node.outputs, axis.outputs, strict=True))
    return [(value, dim) for value, dim in pairs if dim is not None]


def dimensions(graph: Graph) -> tuple[Dimension, ...]:
    """The components of the D-graph of `graph`, those with the most nodes first."""
    found = graph.memo.get(Dimension)
    if not isinstance(found, tuple):
        found = graph.memo[Dimension] = _dimensions(graph)
    return found


def _dimensions(graph: Graph) -> tuple[Dimension, ...]:
    union = _Union()
    for node in graph.nodes:
        for axis in axes(graph, node):
            first, *rest = _members(node, axis)
            union.find(first)
            for other in rest:
                union.join(first, other)
        if isinstance(node.op, Aten) and node.op.overload in COUPLED:
            for dim in range(len(graph.values[node.outputs[0]].meta.shape)):
                union.join((node.inputs[0], dim), (node.outputs[0], dim))
    values: dict[tuple[int, int], dict[int, list[int]]] = {}
    for value, dim in sorted(union.parent):
        values.setdefault(union.find((value, dim)), {}).setdefault(value, []).append(dim)
    nodes: dict[tuple[int, int], dict[int, list[int]]] = {root: {} for root in values}
    extents: dict[tuple[int, int], int] = dict.fromkeys(values, 0)  # gcd(0, n) is n
    for node in graph.nodes:
        for position, axis in enumerate(axes(graph, node)):
            root = union.find(_members(node, axis)[0])
            nodes[root].setdefault(node.id, []).append(position)
            extents[root] = math.gcd(extents[root], axis.extent)
    found = [
        Dimension(
            {value: tuple(dims) for value, dims in values[root].items()},
            {node: tuple(positions) for node, positions in nodes[root].items()},
            extents[root],
        )
        for root in values
        if nodes[root]
    ]
    return tuple(sorted(found, key=lambda each: (-len(each.nodes), min(each.values))))
