"""Common sub-expressions: the same operator on the same inputs is made once.

rewrite:    y = f(x), z = f(x)      becomes      y = f(x), and z's readers read y
legal when: f draws no random numbers, nothing writes what it reads, the caller does not get z, and both
            belong to one phase and are needed in one (what is recomputed for the backward to save memory, by
            the user or by us, stays recomputed); views may be shared by all.
effect:     one call less; y lives as long as z did.  Numerics: exact.
"""

from __future__ import annotations

from math import prod

from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten
from lowtide.ir.random import is_random
from lowtide.transforms.draft import Draft
from lowtide.transforms.rewriting.record import Applied, Rewritten

__all__ = ["without_duplicates"]

_PHASES = ("forward", "loss", "backward", "clip", "update")


def _needed_in(graph: Graph) -> dict[int, int]:
    """Node id -> the first phase that its results reach (for copies made for the backward: that)."""
    found: dict[int, int] = {}
    for node in reversed(graph.nodes):
        own = _PHASES.index(node.origin.phase) if node.origin.phase in _PHASES else 0
        readers = [found[reader] for out in node.outputs for reader in graph.readers[out]]
        returned = any(out in graph.outputs for out in node.outputs)
        found[node.id] = own if returned else max(own, min(readers, default=own))
    return found


def without_duplicates(graph: Graph) -> Rewritten:
    """`graph` with every legal duplicate gone; `graph` itself if there is none."""
    work = _Merging(graph)
    for node in graph.nodes:
        work.visit(node)
    if not work.renamed:
        return Rewritten(graph)
    new = work.draft.graph(graph.inputs, graph.outputs)
    forward: dict[int, int | None] = {value: None for value in graph.values if value not in new.values}
    forward.update(work.renamed)
    return Rewritten(new, forward, tuple(work.applied))


class _Merging:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.draft = Draft(graph)
        self.renamed: dict[int, int] = {}
        self.applied: list[Applied] = []
        self.seen: dict[tuple[object, ...], Node] = {}
        self.needed = _needed_in(graph)
        self.written = {graph.values[value].storage for node in graph.nodes for value in node.writes}

    def visit(self, node: Node) -> None:
        """Keep, merge, or (a view of what was merged) make again."""
        inputs = tuple(self.renamed.get(value, value) for value in node.inputs)
        view = self.graph.is_view(node)
        if not self._mergeable(node):
            self._keep(node, inputs, view)
            return
        key = (node.op, inputs, *(() if view else (node.origin.phase, self.needed[node.id])))
        first = self.seen.get(key)
        if first is None:
            self.seen[key] = self._keep(node, inputs, view)
        elif self._returned(node):
            self._keep(node, inputs, view)
        else:
            self.renamed.update(zip(node.outputs, first.outputs, strict=True))
            if not view:
                size = sum(prod(self.graph.values[out].meta.shape) for out in node.outputs)
                self.applied.append(Applied("common-term", first.outputs[0], size))

    def _mergeable(self, node: Node) -> bool:
        if not isinstance(node.op, Aten) or node.writes or not node.outputs or is_random(node.op):
            return False
        return not any(self.graph.values[value].storage in self.written for value in node.inputs)

    def _returned(self, node: Node) -> bool:
        """Whether the caller gets a result, or something on its storage."""
        storages = {self.graph.values[out].storage for out in node.outputs}
        return any(each in self.graph.outputs for s in storages for each in self.graph.views_of[s])

    def _keep(self, node: Node, inputs: tuple[int, ...], view: bool) -> Node:
        moved = view and any(
            self.draft.values[a].storage != self.graph.values[b].storage
            for a, b in zip(inputs, node.inputs, strict=True)
        )
        if moved:
            assert isinstance(node.op, Aten)
            made = self.draft.emit(node.op, inputs, node.origin, node=node.id)
            self.renamed.update(zip(node.outputs, made, strict=True))
        elif inputs == node.inputs:
            self.draft.nodes.append(node)
        elif isinstance(node.op, Aten) and not node.writes:
            self.draft.emit(node.op, inputs, node.origin, node.outputs, node=node.id)
        else:
            writes = tuple(self.renamed.get(value, value) for value in node.writes)
            self.draft.nodes.append(Node(node.id, node.op, inputs, node.outputs, writes, node.origin))
        return self.draft.nodes[-1]
