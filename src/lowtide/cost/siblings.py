"""Times of operators on more or fewer rows than they were timed with.

Problem.  A region of rows is tried in many sizes of part, and every size gives every operator of it another
shape; timing all of them takes longer than the search.

Method.  The bodies of a region have the nodes of the graph that they were cut from.  A node that was timed
with rows enough to compare (within a factor `REACH`) tells its time for others: in proportion to the rows.

Invariants.  Nothing that is guessed here is kept on disk, nor guessed from again.

Not done.  Other loops: a part of a product reads all of its weight, and its time is not in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lowtide.ir import Aten, Graph, Node

__all__ = ["Siblings"]

REACH = 2.0
"""How many times the rows of another size are comparable."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Siblings:
    """Seconds by node of the graph that regions are cut from, for every size that was timed."""

    known: dict[tuple[int, str], list[tuple[Shapes, float]]] = field(default_factory=dict)

    def learn(self, graph: Graph, node: Node, seconds: float) -> None:
        """A node of a body was timed."""
        if isinstance(node.op, Aten):
            self.known.setdefault((node.id, node.op.overload), []).append((_shapes(graph, node), seconds))

    def guess(self, graph: Graph, node: Node) -> float | None:
        """Seconds from the size nearest to this one; None if none is near enough."""
        if not isinstance(node.op, Aten):
            return None
        mine = _shapes(graph, node)
        found = []
        for theirs, seconds in self.known.get((node.id, node.op.overload), ()):
            ratio = _ratio(theirs, mine)
            if ratio is not None and 1 / REACH <= ratio <= REACH:
                found.append((abs(ratio - 1.0), ratio * seconds))
        return min(found)[1] if found else None


def _shapes(graph: Graph, node: Node) -> Shapes:
    return tuple(graph.values[value].meta.shape for value in (*node.outputs, *node.inputs))


def _ratio(one: Shapes, other: Shapes) -> float | None:
    """Rows of `other` to those of `one`; None if they differ in more than the size of one dimension each."""
    if len(one) != len(other) or any(len(a) != len(b) for a, b in zip(one, other, strict=True)):
        return None
    ratios = [list(_differing(a, b)) for a, b in zip(one, other, strict=True)]
    if any(len(each) > 1 for each in ratios):
        return None
    return next((each[0] for each in ratios if each), 1.0)


def _differing(one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[float]:
    return (b / max(a, 1) for a, b in zip(one, other, strict=True) if a != b)
