"""How the parts of a Fission deliver their outputs, and what a body holds beside them.

Problem.  The outputs of a Fission exist as wholes before the first part runs.  A part that can put its
result there needs no memory for it; one that cannot needs a place for it until it is merged.

Method.  Four ways, decided per output from its layout and its producer:

    direct       the result is exactly the slice of the whole: written in place
    copy         the slice has other strides: kept like any value, copied once made
    accumulate   a sum of matrix products: the first part writes, later ones run ``addmm_``
    add          any other sum: the first part writes, later ones make a temporary and add it

`body_as_run` is the body in which only values are outputs that lie in the whole; everything else in it
takes memory of the body's own, for as long as its readers say (an `add` result: one step).

Invariants.  A direct slice is one block of memory that nothing else uses.

Not done.  Log-sum-exp and moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lowtide.ir.graph import Graph, Node, Role, Storage, TensorMeta
from lowtide.ir.ops import Aten, Fission, Merge

__all__ = ["Delivery", "body_as_run", "deliveries"]

Delivery = Literal["direct", "copy", "accumulate", "add"]

_PRODUCT = "aten.mm.default"


def deliveries(graph: Graph, node: Node) -> tuple[Delivery, ...]:
    """The way of each output of a Fission node."""
    op = node.op
    assert isinstance(op, Fission)
    return tuple(
        _delivery(op, position, graph.values[value].meta) for position, value in enumerate(node.outputs)
    )


def _delivery(op: Fission, position: int, outer: TensorMeta) -> Delivery:
    fits = all(_lies_within(body, position, outer) for body in op.bodies)
    if op.merges[position] is Merge.WRITE:
        return "direct" if fits else "copy"
    product = all(_is_product(body, body.outputs[position]) for body in op.bodies)
    return "accumulate" if fits and product else "add"


def _lies_within(body: Graph, position: int, outer: TensorMeta) -> bool:
    """Whether the body's result, all of its storage, is laid out as a slice of the whole."""
    value = body.values[body.outputs[position]]
    nbytes = body.storages[value.storage].nbytes
    strides = zip(value.meta.shape, value.meta.stride, outer.stride, strict=True)
    same = value.meta.dtype == outer.dtype and all(
        size == 1 or ours == theirs for size, ours, theirs in strides
    )
    dense = (
        value.offset == 0 and value.meta.numel * value.meta.dtype.itemsize == value.meta.span_bytes == nbytes
    )
    alone = sum(body.values[other].storage == value.storage for other in body.outputs) == 1
    return same and dense and alone


def _is_product(body: Graph, value: int) -> bool:
    maker = body.producer.get(value)
    op = None if maker is None else body.node[maker].op
    return isinstance(op, Aten) and op.overload == _PRODUCT and not body.readers[value]


def body_as_run(body: Graph, ways: Sequence[Delivery]) -> Graph:
    """`body` with the outputs as results that need no memory of the body, the others as temporaries."""
    outputs = tuple(
        value for value, way in zip(body.outputs, ways, strict=True) if way in ("direct", "accumulate")
    )
    placed = {body.values[value].storage for value in outputs}
    storages = {
        key: Storage(key, storage.nbytes, Role.TEMP)
        if storage.role is Role.OUTPUT and key not in placed
        else storage
        for key, storage in body.storages.items()
    }
    return replace(body, storages=storages, outputs=outputs)
