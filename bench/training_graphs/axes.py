"""Which dimension of each value belongs to one axis, followed along the links of a graph.

Problem.  A region can run in parts along an axis if every node of it can: whatever it makes is cut along one
dimension, or is a sum over the axis.

Method.  From the dimensions of a few values, follow each node's links.  An operand that stays whole must
have no dimension that is the same axis as the cut one.

Invariants.  `WHOLE` (not on the axis) and `SUM` (reduced over it) are final: what reads a sum is whole.  A
node that cannot be cut raises `Uncuttable`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .model import Graph, Node

__all__ = ["SUM", "Uncuttable", "batch_of", "cut_along"]

SUM = -1


class Uncuttable(ValueError):
    """A node that the axis cannot pass."""


def batch_of(graph: Graph) -> dict[int, int]:
    """The first dimension of every input: where the batch starts."""
    return {node.id: 0 for node in graph.nodes if node.kind == "input"}


def cut_along(
    graph: Graph, seeds: Mapping[int, int], members: Collection[int] | None = None
) -> dict[int, int | None]:
    """Value -> the dimension that is cut, SUM, or None for whole; followed through `members`."""
    cut: dict[int, int | None] = dict(seeds)
    for node in graph.nodes:
        if node.id in cut:
            continue
        inside = members is None or node.id in members
        cut[node.id] = _result(graph, node, cut) if inside else None
    return cut


def _result(graph: Graph, node: Node, cut: Mapping[int, int | None]) -> int | None:
    reached: set[int] = set()
    for value, pairs in zip(node.inputs, node.links, strict=True):
        dim = cut[value]
        if dim is None or dim == SUM:
            continue
        found = {out for own, out in pairs if own == dim}
        if not found:
            raise Uncuttable(f"{node.id}:{node.op} does not carry dimension {dim} of {value}")
        reached |= found
    if not reached:
        return None
    if len(reached) > 1:
        raise Uncuttable(f"{node.id}:{node.op} puts the axis at {sorted(reached)}")
    out = reached.pop()
    for value, pairs in zip(node.inputs, node.links, strict=True):
        shape = graph.node[value].shape
        whole = cut[value] is None or cut[value] == SUM
        if whole and any(other == out and shape[own] != 1 for own, other in pairs):
            raise Uncuttable(f"{node.id}:{node.op} needs {value} cut as well")
    return SUM if out < 0 else out
