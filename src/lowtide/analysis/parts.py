"""How the parts of a Fission deliver their outputs, and what a body holds beside them.

Problem.  The outputs of a Fission exist as wholes before the first part runs.  A part that can put its
result there needs no memory for it; one that cannot needs a place for it until it is merged.

Method.  Six ways, decided per output from its layout and its producer:

    direct       the result is exactly the slice of the whole: written in place
    copy         the slice has other strides: kept like any value, copied once made
    accumulate   a sum of matrix products: the first part writes, later ones run ``addmm_``
    add          any other sum: the first part writes, later ones make a temporary and add it
    terms        a sum of sums (a tied weight's gradients): the additions vanish, each term is delivered to
                 the whole, a product by accumulating, another by adding
    combine      log-sum-exp and moments: the first part writes, later ones are combined with what is there
                 (`lowtide.analysis.merging`)

`body_as_run` is the body in which only values are outputs that lie in the whole; everything else in it
takes memory of the body's own, for as long as its readers say (an `add` result: one step).

Invariants.  A direct slice is one block of memory that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from lowtide.analysis.dims import is_plain_addition
from lowtide.ir.graph import Graph, Node, Role, Storage, TensorMeta
from lowtide.ir.ops import Aten, Fission, Merge

__all__ = ["Delivery", "body_as_run", "deliveries", "is_product", "terms_of"]

Delivery = Literal["direct", "copy", "accumulate", "add", "terms", "combine"]

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
    if op.merges[position] is not Merge.ADD:
        return "combine"
    if not fits:
        return "add"
    if all(len(terms_of(body, body.outputs[position])) > 1 for body in op.bodies):
        return "terms"
    return "accumulate" if all(is_product(body, body.outputs[position]) for body in op.bodies) else "add"


def terms_of(body: Graph, value: int) -> tuple[int, ...]:
    """The values whose sum `value` is, through plain additions of temporaries that nothing else reads."""
    maker = body.producer.get(value)
    if maker is None or not is_plain_addition(body, body.node[maker]):
        return (value,)
    inputs = body.node[maker].inputs
    if any(body.readers[each] != (maker,) or each in body.outputs or each in body.inputs for each in inputs):
        return (value,)
    return tuple(term for each in inputs for term in terms_of(body, each))


def _lies_within(body: Graph, position: int, outer: TensorMeta) -> bool:
    """Whether the body's result, all of its storage, is laid out as a slice of the whole."""
    value = body.values[body.outputs[position]]
    nbytes = body.storages[value.storage].nbytes
    strides = zip(value.meta.shape, value.meta.stride, outer.stride, strict=True)
    same = value.meta.dtype == outer.dtype and all(
        size == 1 or ours == theirs for size, ours, theirs in strides
    )
    dense = value.offset == 0 and value.meta.nbytes == value.meta.span_bytes == nbytes
    alone = sum(body.values[other].storage == value.storage for other in body.outputs) == 1
    return same and dense and alone


def is_product(body: Graph, value: int) -> bool:
    """Whether a term of a sum is a matrix product, alone on its storage: then it can be accumulated."""
    maker = body.producer.get(value)
    op = None if maker is None else body.node[maker].op
    whole = body.values[value].meta.span_bytes == body.storage_of(value).nbytes
    return isinstance(op, Aten) and op.overload == _PRODUCT and whole


def body_as_run(body: Graph, ways: Sequence[Delivery]) -> Graph:
    """`body` with those results as outputs that need no memory of the body; the others are temporaries.

    Additions of terms are gone: each term is a result of its own.
    """
    outputs: list[int] = []
    gone: set[int] = set()
    for value, way in zip(body.outputs, ways, strict=True):
        if way == "terms":
            outputs.extend(term for term in terms_of(body, value) if is_product(body, term))
            gone |= _sums_above(body, value)
        elif way in ("direct", "accumulate"):
            outputs.append(value)
    placed = {body.values[value].storage for value in outputs}
    nodes = tuple(node for node in body.nodes if gone.isdisjoint(node.outputs))
    values = {key: value for key, value in body.values.items() if key not in gone}
    used = {value.storage for value in values.values()}
    storages = {
        key: Storage(key, storage.nbytes, _role(storage, key in placed))
        for key, storage in body.storages.items()
        if key in used
    }
    return replace(body, nodes=nodes, values=values, storages=storages, outputs=tuple(outputs))


def _role(storage: Storage, placed: bool) -> Role:
    if placed:
        return Role.OUTPUT
    return Role.TEMP if storage.role is Role.OUTPUT else storage.role


def _sums_above(body: Graph, value: int) -> set[int]:
    """`value` and the sums between it and its terms."""
    if terms_of(body, value) == (value,):
        return set()
    inputs = body.node[body.producer[value]].inputs
    return {value}.union(*(_sums_above(body, each) for each in inputs))
