"""How the values of a node with bodies correspond to the values of the bodies.

Problem.  A Fused and a Fission hold graphs of their own; the values on both sides are bound by position
alone, so nothing but a check finds a body that takes something else than it is given.

Method.  For each node, compare both sides position by position and describe every difference.  For a
Fission, the slice of the outer tensor has to have the shape of the body's tensor, and the slices of an
output have to be the whole: without overlap where parts write, at least covering where parts merge.

Not done.  Strides of a slice (the body's strides are a choice of who made it), and whether a body
computes the right thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Fission, Fused, Merge, Part, Slice
from lowtide.ir.spelling import spell_meta, spell_slice

__all__ = ["Finding", "fission_faults", "fused_faults"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong: what, at which node, about which values."""

    what: str
    node: int | None = None
    values: tuple[int, ...] = ()


def fused_faults(graph: Graph, node: Node, op: Fused) -> Iterator[Finding]:
    """Differences between a Fused node and its body."""
    body = op.body
    for word, ours, theirs in (("input", node.inputs, body.inputs), ("output", node.outputs, body.outputs)):
        if len(ours) != len(theirs):
            yield Finding(f"the node has {len(ours)} {word}s, its body {len(theirs)}", node.id, ours)
            return
        for position, (outer, inner) in enumerate(zip(ours, theirs, strict=True)):
            given, taken = graph.values[outer].meta, body.values[inner].meta
            if given != taken:
                what = f"{word} {position}: %{outer} is {spell_meta(given)}, in the body {spell_meta(taken)}"
                yield Finding(what, node.id, (outer,))
    yield from _alias_faults(graph, node, body)
    yield from _written_faults(graph, node, body)


def _alias_faults(graph: Graph, node: Node, body: Graph) -> Iterator[Finding]:
    for outer, inner in zip(node.outputs, body.outputs, strict=True):
        for given, taken in zip(node.inputs, body.inputs, strict=True):
            outside = graph.values[outer].storage == graph.values[given].storage
            inside = body.values[inner].storage == body.values[taken].storage
            if inside and not outside:
                what = f"the body returns a view of input %{given}, output %{outer} has another storage"
                yield Finding(what, node.id, (outer, given))


def _written_faults(graph: Graph, node: Node, body: Graph) -> Iterator[Finding]:
    inside = {body.values[value].storage for inner in body.nodes for value in inner.writes}
    bound = list(zip(node.inputs, body.inputs, strict=True))
    written = {outer for outer, inner in bound if body.values[inner].storage in inside}
    if written != set(node.writes):
        what = f"the body writes {_names(sorted(written))}, the node says {_names(sorted(node.writes))}"
        yield Finding(what, node.id, tuple(sorted(written ^ set(node.writes))))
    for value in written:
        storage = graph.values[value].storage
        sharers = tuple(outer for outer, _ in bound if graph.values[outer].storage == storage)
        if len(sharers) > 1:
            yield Finding(f"the written storage s{storage} is bound {len(sharers)} times", node.id, sharers)


def fission_faults(graph: Graph, node: Node, op: Fission) -> Iterator[Finding]:
    """Differences between a Fission node, its parts and its bodies."""
    if len(op.merges) != len(node.outputs):
        yield Finding(f"{len(op.merges)} merges for {len(node.outputs)} outputs", node.id, node.outputs)
    if not op.parts:
        yield Finding("no parts", node.id)
    found = [
        fault for number, part in enumerate(op.parts) for fault in _part_faults(graph, node, op, number, part)
    ]
    yield from found
    if found or len(op.merges) != len(node.outputs):
        return
    for position, (value, merge) in enumerate(zip(node.outputs, op.merges, strict=True)):
        slices = [part.outputs[position] for part in op.parts]
        if gap := _tiling_fault(slices, graph.values[value].meta.shape, merge):
            yield Finding(f"output %{value} ({merge.value}): {gap}", node.id, (value,))


def _part_faults(graph: Graph, node: Node, op: Fission, number: int, part: Part) -> Iterator[Finding]:
    if not 0 <= part.body < len(op.bodies):
        yield Finding(f"part {number} names body {part.body} of {len(op.bodies)}", node.id)
        return
    body = op.bodies[part.body]
    for word, ours, slices, theirs in (
        ("input", node.inputs, part.inputs, body.inputs),
        ("output", node.outputs, part.outputs, body.outputs),
    ):
        if not len(ours) == len(slices) == len(theirs):
            what = (
                f"part {number} has {len(slices)} {word} slices, the node {len(ours)}, the body {len(theirs)}"
            )
            yield Finding(what, node.id, ours)
            return
        for outer, piece, inner in zip(ours, slices, theirs, strict=True):
            if what := _slice_fault(graph.values[outer].meta, piece, body.values[inner].meta):
                yield Finding(f"part {number}, {word} %{outer}: {what}", node.id, (outer,))


def _slice_fault(outer: TensorMeta, piece: Slice, inner: TensorMeta) -> str:
    """Why `inner` is not the slice of `outer`; empty if it is."""
    shape = list(outer.shape)
    if piece.axis is not None:
        if not 0 <= piece.axis < len(shape) or not 0 <= piece.start < piece.stop <= shape[piece.axis]:
            return f"{spell_slice(piece)} is not inside {spell_meta(outer)}"
        shape[piece.axis] = piece.stop - piece.start
    if (tuple(shape), outer.dtype, outer.device) != (inner.shape, inner.dtype, inner.device):
        return f"{spell_slice(piece)} of {spell_meta(outer)}, but the body has {spell_meta(inner)}"
    return ""


def _tiling_fault(slices: Sequence[Slice], shape: tuple[int, ...], merge: Merge) -> str:
    """Why the slices do not make up the whole of a tensor of this shape; empty if they do."""
    axes = {piece.axis for piece in slices}
    if axes == {None}:
        return "every part writes all of it" if merge is Merge.WRITE and len(slices) > 1 else ""
    if len(axes) > 1:
        return f"parts are cut along different axes {axes}"
    axis = axes.pop()
    assert axis is not None
    end = 0
    for piece in sorted(slices, key=lambda piece: piece.start):
        if piece.start > end:
            return f"[{end}, {piece.start}) of axis {axis} is in no part"
        if piece.start < end and merge is Merge.WRITE:
            return f"[{piece.start}, {end}) of axis {axis} is in two parts"
        end = max(end, piece.stop)
    return "" if end == shape[axis] else f"[{end}, {shape[axis]}) of axis {axis} is in no part"


def _names(values: Sequence[int]) -> str:
    return ", ".join(f"%{value}" for value in values) or "nothing"
