"""Bodies of parts that overlap: the region's nodes on the rows that one part has.

Method.  As `lowtide.transforms.body`, but every part has its own rows (`lowtide.transforms.spans`).  Where a
node is given fewer rows than are there, a view stands before it; where zeros belong around a sum's operand,
a copy with them.  Parts of equal pattern share a body.

Invariants.  All bodies of one Fission have the same nodes: a view or a copy that one of them needs is in all
of them, as a view of everything where it is not needed.

Not done.  Padding folded into the operator before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.analysis.axis import Axis
from lowtide.analysis.axis_rules import dense_inputs
from lowtide.analysis.windows import Span
from lowtide.ir import Graph, Node, Origin, Ref, Storage, TensorMeta
from lowtide.ir.graph import Role
from lowtide.ir.ops import Arg, Aten
from lowtide.transforms.body import Border
from lowtide.transforms.draft import Draft
from lowtide.transforms.spans import Cut, Given, NodeSpans, PartSpans

__all__ = ["build_bodies"]

Edge = tuple[int, int]
"""A node and the position of one of its inputs."""


def build_bodies(
    graph: Graph, assignment: Mapping[int, Axis], border: Border, parts: Sequence[PartSpans]
) -> tuple[tuple[Graph, ...], tuple[int, ...]]:
    """The different bodies of `parts`, the one with the most rows first; per part, which of them it runs."""
    views = _edges(parts, lambda given: given.narrowed)
    copies = _edges(parts, lambda given: given.padded)
    cut = {k for part in parts for k, pair in enumerate(part.outputs) if pair and pair[0] != pair[1]}
    kinds: dict[object, PartSpans] = {}
    for part in sorted(parts, key=lambda each: -each.rows):
        kinds.setdefault(part.pattern(), part)
    bodies = tuple(
        _Builder(graph, assignment, views, copies).build(border, part, cut) for part in kinds.values()
    )
    return bodies, tuple(list(kinds).index(part.pattern()) for part in parts)


def _edges(parts: Sequence[PartSpans], wanted: Callable[[Given], bool]) -> frozenset[Edge]:
    return frozenset(
        (number, position)
        for part in parts
        for number, spans in part.nodes.items()
        for position, given in enumerate(spans.inputs)
        if given is not None and wanted(given)
    )


@dataclass
class _Builder:
    """One body in the making; `place` maps what the region reads, `made` what it makes."""

    graph: Graph
    assignment: Mapping[int, Axis]
    views: Collection[Edge]
    copies: Collection[Edge]
    place: dict[Cut, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)

    def build(self, border: Border, part: PartSpans, cut: Collection[int]) -> Graph:
        """The body of `part`; `cut` are the outputs that need a view in some part."""
        self.draft = Draft(Graph(self.graph.nodes, {}, {}, (), ()))
        inputs = [self._input(each, span) for each, span in zip(border.inputs, part.inputs, strict=True)]
        for number, spans in part.nodes.items():
            self._node(self.graph.node[number], spans)
        outputs = []
        for position, ((value, dim), pair) in enumerate(zip(border.outputs, part.outputs, strict=True)):
            found = self.made[value]
            if position in cut and pair is not None and dim is not None:
                origin = self.graph.node[self.graph.producer[value]].origin
                found = self._view(found, dim, pair[0], pair[1], origin)
            outputs.append(found)
        storages = self.draft.storages
        for value in outputs:
            storage = self.draft.values[value].storage
            storages[storage] = Storage(storage, storages[storage].nbytes, Role.OUTPUT)
        return self.draft.graph(inputs, outputs)

    def _input(self, cut: Cut, span: Span | None) -> int:
        value, dim = cut
        outer = self.graph.values[value].meta
        shape = list(outer.shape)
        if dim is not None and span is not None:
            shape[dim] = span[1] - span[0]
        meta = TensorMeta(tuple(shape), outer.stride, outer.dtype, outer.device)
        role = self.graph.storage_of(value).role
        kept = role if role.resident or role is Role.HOST else Role.INPUT
        storage = self.draft.storage(0 if role is Role.HOST else meta.span_bytes, kept)
        self.place[cut] = self.draft.value(meta, storage)
        return self.place[cut]

    def _node(self, node: Node, spans: NodeSpans) -> None:
        inputs = []
        for position, (value, dim) in enumerate(
            zip(node.inputs, self.assignment[node.id].inputs, strict=True)
        ):
            found = self.made[value] if value in self.made else self.place[value, dim]
            given = spans.inputs[position]
            if given is not None:
                found = self._given(found, given, (node.id, position), node.origin)
            if position in dense_inputs(spans.op):
                found = self._dense(found, node.origin)
            inputs.append(found)
        outputs = self.draft.emit(spans.op, inputs, node.origin, node=node.id)
        for outer, dim, inner in zip(node.outputs, self.assignment[node.id].outputs, outputs, strict=True):
            self._check(node, outer, dim, inner, spans)
            self.made[outer] = inner

    def _given(self, value: int, given: Given, edge: Edge, origin: Origin) -> int:
        if edge in self.views:
            value = self._view(value, given.dim, given.used, given.there, origin)
        if edge in self.copies:
            rank = len(self.draft.values[value].meta.shape)
            if not given.padded:
                return self._view(value, given.dim, given.used, given.used, origin)
            pad: tuple[Arg, ...] = (*(0, 0) * (rank - given.dim - 1), *given.zeros)
            (value,) = self.draft.emit(Aten("aten.constant_pad_nd.default", (Ref(0), pad)), (value,), origin)
        return value

    def _view(self, value: int, dim: int, rows: Span, there: Span, origin: Origin) -> int:
        cut = Aten("aten.slice.Tensor", (Ref(0), dim, rows[0] - there[0], rows[1] - there[0]))
        return self.draft.emit(cut, (value,), origin)[0]

    def _dense(self, value: int, origin: Origin) -> int:
        clone = Aten("aten.clone.default", (Ref(0),), (("memory_format", torch.contiguous_format),))
        return self.draft.emit(clone, (value,), origin)[0]

    def _check(self, node: Node, outer: int, dim: int | None, inner: int, spans: NodeSpans) -> None:
        shape = list(self.graph.values[outer].meta.shape)
        if dim is not None:
            unit = shape[dim] // self.assignment[node.id].extent
            shape[dim] = unit * (spans.made[1] - spans.made[0])
        found = self.draft.values[inner].meta.shape
        if found != tuple(shape):
            raise ValueError(f"node {node.id} ({spans.op}) gives {found} for a part, not {tuple(shape)}")
