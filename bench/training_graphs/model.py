"""The graph of a file in memory: frozen nodes in schedule order, regions as nodes with a body.

Problem.  The format's dictionaries hold what follows from other fields (shapes of inputs, bytes, prices), and
its nodes are found by scanning; rewrites need neither.

Method.  `Node` keeps what is given: operator tag, producers, shape, attributes, and which dimensions are
one axis (`links`, per input pairs of an input dimension and an output dimension, negative: reduced).  A
graph is its nodes in schedule order.  A region that runs in parts is a node whose `split` holds the body at
part shape.

Invariants.  Producers come before readers.  Ids are unique in one graph; a body has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["SCALAR_TIME", "Graph", "Links", "Node", "Shape", "Split", "elements"]

Shape = tuple[int, ...]
Links = tuple[tuple[tuple[int, int], ...], ...]
SCALAR_TIME = 1e-8
"""Milliseconds of what the format prices as nothing."""


def elements(shape: Iterable[int]) -> int:
    """Number of elements."""
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True)
class Split:
    """A body that runs `parts` times.

    in_dims: per input the dimension that is sliced, None if shared; out_dims: per output the dimension that
    is concatenated, -1 if the parts are summed; length: size of the axis that is cut.
    """

    parts: int
    length: int
    in_dims: tuple[int | None, ...]
    out_dims: tuple[int, ...]
    body: Graph


@dataclass(frozen=True)
class Node:
    """One line of a schedule."""

    id: int
    op: str
    kind: str
    inputs: tuple[int, ...] = ()
    shape: Shape = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    links: Links = ()
    split: Split | None = None
    again: bool = False  # a copy of another node that was computed before
    free: bool = False  # holds no bytes of its own: the whole is counted outside the body

    @property
    def count(self) -> int:
        """Elements that the result holds, all outputs of a tuple included."""
        if self.op == "layer_norm":
            return sum(elements(shape) for shape in self.attrs["multi_out_shapes"])
        return elements(self.shape)


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in schedule order; `inputs` and `outputs` bind a body by position to its region."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    @cached_property
    def node(self) -> Mapping[int, Node]:
        """Node by id."""
        return {node.id: node for node in self.nodes}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Id -> the nodes that read it, in schedule order, once each."""
        found: dict[int, list[int]] = {node.id: [] for node in self.nodes}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found[value].append(node.id)
        return {value: tuple(nodes) for value, nodes in found.items()}

    @cached_property
    def next_id(self) -> int:
        """An id that no node has, here or in a body."""
        inside = (node.split.body.next_id for node in self.nodes if node.split)
        return max([*(node.id + 1 for node in self.nodes), *inside], default=0)

    def in_shapes(self, node: Node) -> list[Shape]:
        """Shapes of a node's operands."""
        return [self.node[value].shape for value in node.inputs]
