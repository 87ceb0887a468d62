"""A rewrite by example: the graph again, with some nodes replaced and what depends on their layout made anew.

Problem.  A merged product hands out slices where there were whole tensors, a dropped copy hands out a
permuted view: whatever reads them must be asked whether it can, and its own result may change layout.

Method.  Nodes are walked in program order.  A node in `instead` is replaced by what its function emits.  A
reader of a replaced value is emitted again; if a fake run says that its results lie as before, they keep
their ids and nothing further changes, else they get new ids and their readers are asked in turn.

Invariants.  Raises `Unfit` if an operator refuses a layout, or if the caller would get another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lowtide.ir.aten import renumber
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict
from lowtide.transforms.rewriting.record import Applied, Rewritten

__all__ = ["Emit", "Unfit", "replay"]

Emit = Callable[["Draft", Node], Mapping[int, int] | None]
"""Emits what replaces a node; gives the new value of each old one, None if nothing took its place."""


class Unfit(Exception):
    """A reader that cannot take the layout it would get."""


def replay(graph: Graph, instead: Mapping[int, Emit], applied: tuple[Applied, ...]) -> Rewritten:
    """`graph` with the nodes of `instead` replaced, dead views and constants left out; raises Unfit."""
    work = _Replay(graph)
    for node in graph.nodes:
        if node.id in instead:
            work.replaced.update(instead[node.id](work.draft, node) or {})
        else:
            work.visit(node)
    if any(value in work.replaced for value in graph.outputs):
        raise Unfit("the caller would get another layout")
    work.draft.nodes = _live(work.draft, graph)
    new = work.draft.graph(graph.inputs, graph.outputs)
    forward: dict[int, int | None] = {value: None for value in graph.values if value not in new.values}
    forward.update({old: here for old, here in work.replaced.items() if here in new.values})
    return Rewritten(new, forward, applied)


@dataclass
class _Replay:
    graph: Graph
    replaced: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft(self.graph)

    def visit(self, node: Node) -> None:
        """Keep a node, or emit it on what took the place of its inputs."""
        if not any(value in self.replaced for value in node.inputs):
            self.draft.nodes.append(node)
            return
        if not isinstance(node.op, Aten) or node.writes:
            raise Unfit(f"node {node.id} is tied to its inputs")
        inputs = tuple(self.replaced.get(value, value) for value in node.inputs)
        try:
            same = self._lies_as_before(node, node.op, inputs)
            if same:
                self.draft.emit(node.op, inputs, node.origin, node.outputs, node=node.id)
                return
            made = self.draft.emit(node.op, inputs, node.origin, node=node.id)
        except (RuntimeError, ValueError) as error:
            raise Unfit(f"node {node.id} refuses the layout: {error}") from error
        if len(made) < len(node.outputs):
            raise Unfit(f"node {node.id} gives fewer results")
        self.replaced.update(zip(node.outputs, made, strict=False))

    def _lies_as_before(self, node: Node, op: Aten, inputs: tuple[int, ...]) -> bool:
        unique = tuple(dict.fromkeys(inputs))
        asked = renumber(op, [unique.index(value) for value in inputs]) if len(unique) < len(inputs) else op
        results = predict(asked, tuple(self.draft.values[value].meta for value in unique))
        if len(results) != len(node.outputs) or self.graph.is_view(node):
            return False
        metas = [self.graph.values[out].meta for out in node.outputs]
        return all(r.alias is None and r.meta == meta for r, meta in zip(results, metas, strict=True))


def _live(draft: Draft, graph: Graph) -> list[Node]:
    """Nodes without those that nothing needs any more."""
    alive = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(draft.nodes):
        removable = isinstance(node.op, Aten) and not node.writes and bool(node.outputs)
        was_dead = node.id in graph.node and not any(
            graph.readers[out] or out in graph.outputs for out in graph.node[node.id].outputs
        )
        if removable and not was_dead and not alive.intersection(node.outputs):
            continue
        kept.append(node)
        alive.update(node.inputs)
    return kept[::-1]
