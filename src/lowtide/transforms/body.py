"""The body of a Fission: the region's nodes at the size of one part.

Problem.  A part is a graph of its own, with its own shapes, strides and storages; guessing them from the
whole goes wrong at views, at slices that are not contiguous, and at kernels that ignore strides.

Method.  `border_of` finds what crosses the region's border: inputs (each with the dimension that is
cut, or None), outputs (only storages that the region makes; a view that is needed outside is made
again there), and views to be made again.  `build_body` runs the region's nodes on fake tensors of the
part's size, with integer arguments scaled, and keeps what an output needs.

Invariants.  Body inputs are the caller's in the body's eyes (INPUT, or the role that they have outside),
body outputs OUTPUT storages, each alone on its storage, so that the body holds only what is inside.  Nodes
keep their ids, values get new ones, and all bodies of one Fission have the same nodes; a value that is read
both cut and whole becomes two inputs.

Not done.  The order of the body's nodes: it is program order, a schedule may change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.analysis.axis import Axis, at_part
from lowtide.analysis.axis_rules import dense_inputs
from lowtide.ir import Graph, Merge, Node, Origin, Ref, Storage, TensorMeta
from lowtide.ir.graph import Role
from lowtide.ir.ops import Aten
from lowtide.transforms.draft import Draft

__all__ = ["Border", "border_of", "build_body"]

Cut = tuple[int, int | None]
"""A value and the dimension that is cut; None: the whole (input) or a sum (output)."""


@dataclass(frozen=True)
class Border:
    """What crosses the border of a region; `replayed`: view nodes that are made again outside."""

    nodes: tuple[int, ...]
    inputs: tuple[Cut, ...]
    outputs: tuple[Cut, ...]
    merges: tuple[Merge, ...]
    replayed: tuple[int, ...]

    def origin(self, members: Sequence[Node]) -> Origin:
        """Where the region comes from: the module that holds all of it, the phase that it ends in."""
        paths = [node.origin.module.split(".") for node in members]
        depth = 0
        while all(len(path) > depth and path[depth] == paths[0][depth] for path in paths):
            depth += 1
        last = members[-1].origin
        return Origin(".".join(paths[0][:depth]), members[0].origin.source, last.phase)


def border_of(graph: Graph, nodes: Sequence[int], assignment: Mapping[int, Axis]) -> Border:
    """The border of a legal region."""
    inside = frozenset(nodes)
    ordered = tuple(node.id for node in graph.nodes if node.id in inside)
    wanted = [
        value
        for node in ordered
        for value in graph.node[node].outputs
        if value in graph.outputs or not inside.issuperset(graph.readers[value])
    ]
    outputs: dict[int, None] = {}
    replayed: set[int] = set()
    for value in wanted:
        base, views = _base(graph, value, inside)
        replayed.update(views)
        if graph.producer.get(base) in inside:
            outputs[base] = None
    cuts = {
        value: (dim, merge)
        for node in ordered
        for value, dim, merge in zip(
            graph.node[node].outputs, assignment[node].outputs, assignment[node].merges, strict=True
        )
    }
    needed = _needed(graph, ordered, outputs)
    return Border(
        nodes=needed,
        inputs=_inputs(graph, needed, inside, assignment),
        outputs=tuple((value, cuts[value][0]) for value in outputs),
        merges=tuple(cuts[value][1] or Merge.WRITE for value in outputs),
        replayed=tuple(node for node in ordered if node in replayed),
    )


def _base(graph: Graph, value: int, inside: frozenset[int]) -> tuple[int, list[int]]:
    """The value that `value` is a view of, made outside or not by a view; and the views between."""
    views: list[int] = []
    while (producer := graph.producer.get(value)) in inside:
        assert producer is not None
        node = graph.node[producer]
        if not graph.is_view(node):
            break
        views.append(producer)
        storage = graph.values[value].storage
        value = next(each for each in node.inputs if graph.values[each].storage == storage)
    return value, views


def _needed(graph: Graph, ordered: Sequence[int], outputs: Mapping[int, None]) -> tuple[int, ...]:
    """The nodes that some output needs; the rest are views that are made again outside."""
    live = set(outputs)
    kept: list[int] = []
    for number in reversed(ordered):
        node = graph.node[number]
        if live.intersection(node.outputs):
            kept.append(number)
            live.update(node.inputs)
    return tuple(reversed(kept))


def _inputs(
    graph: Graph, nodes: Sequence[int], inside: frozenset[int], assignment: Mapping[int, Axis]
) -> tuple[Cut, ...]:
    found: dict[Cut, None] = {}
    for number in nodes:
        for cut in zip(graph.node[number].inputs, assignment[number].inputs, strict=True):
            if graph.producer.get(cut[0]) not in inside:
                found[cut] = None
    return tuple(found)


@dataclass
class _Builder:
    """One body in the making; `place` maps (outer value, cut) to the body's value."""

    graph: Graph
    draft: Draft
    place: dict[Cut, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)

    def add_input(self, cut: Cut, size: int, extent: int) -> int:
        value, dim = cut
        outer = self.graph.values[value].meta
        shape = list(outer.shape)
        if dim is not None:
            shape[dim] = shape[dim] // extent * size
        meta = TensorMeta(tuple(shape), outer.stride, outer.dtype, outer.device)
        role = self.graph.storage_of(value).role
        kept = role if role.resident or role is Role.HOST else Role.INPUT
        storage = self.draft.storage(0 if role is Role.HOST else meta.span_bytes, kept)
        self.place[cut] = self.draft.value(meta, storage)
        return self.place[cut]

    def add_node(self, node: Node, axis: Axis, size: int, extent: int) -> None:
        assert isinstance(node.op, Aten)
        op = at_part(node.op, axis, size, extent)
        inputs = [
            self.made[value] if value in self.made else self.place[value, dim]
            for value, dim in zip(node.inputs, axis.inputs, strict=True)
        ]
        for position in dense_inputs(op):
            # By where it comes from, not by its size: all bodies have the same nodes.
            cut = axis.inputs[position] if node.inputs[position] not in self.made else 0
            if cut or not self.draft.values[inputs[position]].meta.contiguous:
                clone = Aten("aten.clone.default", (Ref(0),), (("memory_format", torch.contiguous_format),))
                (inputs[position],) = self.draft.emit(clone, (inputs[position],), node.origin)
        outputs = self.draft.emit(op, inputs, node.origin, node=node.id)
        for outer, dim, inner in zip(node.outputs, axis.outputs, outputs, strict=True):
            self._check(node, outer, dim, inner, size, extent)
            self.made[outer] = inner

    def _check(self, node: Node, outer: int, dim: int | None, inner: int, size: int, extent: int) -> None:
        shape = list(self.graph.values[outer].meta.shape)
        if dim is not None:
            shape[dim] = shape[dim] // extent * size
        found = self.draft.values[inner].meta.shape
        if found != tuple(shape):
            raise ValueError(f"node {node.id} ({node.op}) gives {found} for a part, not {tuple(shape)}")


def build_body(graph: Graph, assignment: Mapping[int, Axis], border: Border, size: int, extent: int) -> Graph:
    """The region's nodes for a part of `size` of `extent` units.

    Raises ValueError if an operator's result for a part has not the part's shape: its rule is wrong.
    """
    empty = Graph(graph.nodes, {}, {}, (), ())
    builder = _Builder(graph, Draft(empty))
    inputs = [builder.add_input(cut, size, extent) for cut in border.inputs]
    for number in border.nodes:
        builder.add_node(graph.node[number], assignment[number], size, extent)
    outputs = [builder.made[value] for value, _ in border.outputs]
    storages = builder.draft.storages
    for value in outputs:
        storage = builder.draft.values[value].storage
        storages[storage] = Storage(storage, storages[storage].nbytes, Role.OUTPUT)
    return builder.draft.graph(inputs, outputs)
