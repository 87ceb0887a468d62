"""Copies that only change a layout go, where products take the old one: a transpose is a flag of theirs.

rewrite:    matmul(clone(x.transpose()))      becomes      matmul(x.transpose())       (a flag of the product)
legal when: every reader is a product that walks one of its last two axes step by step, and every view of
            the copy can be made of the original.
effect:     a copy less.  Numerics: reassociates (a product on another layout may add in another order).

Chains of views need no rewriting, they cost nothing; inside a kernel all layout operators are index
arithmetic (`fusion.codegen.index`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten
from lowtide.transforms.draft import Draft
from lowtide.transforms.rewriting.record import Applied, Rewritten, then
from lowtide.transforms.rewriting.replay import Unfit, replay

__all__ = ["absorb_copies"]

_COPIES = ("aten.clone.default", "aten.contiguous.default")
_PRODUCTS = ("aten.mm.default", "aten.bmm.default", "aten.addmm.default", "aten.baddbmm.default")


def absorb_copies(graph: Graph) -> Rewritten:
    """`graph` without the copies that its products do not need."""
    done = Rewritten(graph)
    for number in [node.id for node in graph.nodes if _is_copy(node)]:
        if number not in done.graph.node or not _read_by_products(done.graph, done.graph.node[number]):
            continue
        node = done.graph.node[number]
        size = graph.values[node.outputs[0]].meta.span_bytes
        try:
            edit = replay(
                done.graph, {number: _drop}, (Applied("absorbed-copy", node.inputs[0], 0, 2 * size),)
            )
        except Unfit:
            continue
        if _walks(edit.graph, number, done.graph):
            done = then(done, edit)
    return done


def _is_copy(node: Node) -> bool:
    return isinstance(node.op, Aten) and node.op.overload in _COPIES


def _drop(draft: Draft, node: Node) -> Mapping[int, int]:
    return {node.outputs[0]: node.inputs[0]}


def _readers(graph: Graph, node: Node) -> list[tuple[Node, int]]:
    """(reader that is no view, the value it reads) of what a node makes, through views."""
    found = []
    stack = list(node.outputs)
    while stack:
        value = stack.pop()
        for number in graph.readers[value]:
            reader = graph.node[number]
            if graph.is_view(reader):
                stack.extend(reader.outputs)
            else:
                found.append((reader, value))
    return found


def _read_by_products(graph: Graph, node: Node) -> bool:
    storage = graph.values[node.outputs[0]].storage
    if any(each in graph.outputs for each in graph.views_of[storage]):
        return False
    readers = _readers(graph, node)
    return bool(readers) and all(
        isinstance(reader.op, Aten) and reader.op.overload in _PRODUCTS for reader, _ in readers
    )


def _walks(graph: Graph, number: int, before: Graph) -> bool:
    """Whether the products that read the dropped copy now have operands with a unit step and no overlap."""
    for reader, _ in _readers(before, before.node[number]):
        for value in graph.node[reader.id].inputs:
            meta = graph.values[value].meta
            if len(meta.shape) >= 2 and 1 not in meta.stride[-2:]:
                return False
            if 0 in meta.stride:
                return False
    return True
