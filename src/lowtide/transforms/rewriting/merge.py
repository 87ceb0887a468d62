"""Products that share their left operand become one: the projections of queries, keys and values.

rewrite:    x @ w1 + b1, x @ w2 + b2, ...   becomes   y = x @ cat(w1, w2, ...) + cat(b1, b2, ...), and slices
legal when: inference; the weights are transposed parameters that nothing writes; every reader takes the
            slice's strides.
effect:     one product with more columns instead of several: x is read once.  The weights are derived:
            worth it only if `split_derived` runs before.  Numerics: reassociates (another blocking).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten, Ref
from lowtide.transforms.draft import Draft
from lowtide.transforms.rewriting.record import Applied, Rewritten, then
from lowtide.transforms.rewriting.replay import Unfit, replay

__all__ = ["merge_siblings", "weight_of"]

_PRODUCTS = {"aten.addmm.default": 3, "aten.mm.default": 2}


def merge_siblings(graph: Graph) -> Rewritten:
    """`graph` with every legal group merged."""
    done = Rewritten(graph)
    for group in _groups(graph):
        try:
            done = then(done, _merged(done.graph, group))
        except Unfit:
            continue
    return done


def weight_of(graph: Graph, value: int) -> int | None:
    """The parameter of which `value` is the plain transpose; None if it is none, or something writes it."""
    made = graph.producer.get(value)
    if made is None:
        return None
    node = graph.node[made]
    if not isinstance(node.op, Aten) or node.op.overload != "aten.t.default":
        return None
    return node.inputs[0] if is_weight(graph, node.inputs[0]) else None


def is_weight(graph: Graph, value: int) -> bool:
    """Whether a value is a parameter, whole and in order, that nothing writes."""
    storage = graph.storage_of(value)
    written = any(graph.values[w].storage == storage.id for node in graph.nodes for w in node.writes)
    whole = value in graph.inputs and graph.values[value].meta.contiguous
    return storage.role in (Role.PARAM, Role.CONST, Role.BUFFER) and whole and not written


def _groups(graph: Graph) -> list[tuple[int, ...]]:
    """Node ids of products with the same left operand and form, in program order."""
    found: dict[tuple[object, ...], list[int]] = {}
    for node in graph.nodes:
        if not isinstance(node.op, Aten) or node.op.kwargs or node.op.overload not in _PRODUCTS:
            continue
        count = _PRODUCTS[node.op.overload]
        if len(node.inputs) != count or node.op.args != tuple(Ref(k) for k in range(count)):
            continue
        bias = node.inputs[0] if count == 3 else None
        plain = bias is None or (is_weight(graph, bias) and len(graph.values[bias].meta.shape) == 1)
        returned = node.outputs[0] in graph.outputs
        if plain and not returned and weight_of(graph, node.inputs[-1]) is not None:
            found.setdefault((node.op, node.inputs[-2], node.origin.phase), []).append(node.id)
    return [tuple(group) for group in found.values() if len(group) > 1]


def _merged(graph: Graph, group: Sequence[int]) -> Rewritten:
    nodes = [graph.node[number] for number in group]

    def emit(draft: Draft, first: Node) -> Mapping[int, int]:
        return _emit(graph, draft, nodes, first)

    size = 2 * sum(graph.values[node.outputs[0]].meta.numel for node in nodes)
    applied = Applied("merged-products", nodes[0].outputs[0], 0, size)
    gone = dict.fromkeys(group[1:], _nothing)
    return replay(graph, {group[0]: emit, **gone}, (applied,))


def _nothing(draft: Draft, node: Node) -> None:
    """The first of the group has made this one's result."""


def _emit(graph: Graph, draft: Draft, nodes: Sequence[Node], first: Node) -> dict[int, int]:
    def cat(values: Sequence[int]) -> int:
        distinct = tuple(dict.fromkeys(values))
        places = tuple(Ref(distinct.index(value)) for value in values)
        return draft.emit(Aten("aten.cat.default", (places,)), distinct, first.origin)[0]

    weights = [weight_of(graph, node.inputs[-1]) for node in nodes]
    whole = cat([weight for weight in weights if weight is not None])
    (turned,) = draft.emit(Aten("aten.t.default", (Ref(0),)), (whole,), first.origin)
    left = first.inputs[-2]
    bias = [cat([node.inputs[0] for node in nodes])] if len(first.inputs) == 3 else []
    assert isinstance(first.op, Aten)
    (result,) = draft.emit(first.op, (*bias, left, turned), first.origin, node=first.id)
    made, start = {}, 0
    for node in nodes:
        stop = start + graph.values[node.outputs[0]].meta.shape[1]
        op = Aten("aten.slice.Tensor", (Ref(0), 1, start, stop))
        made[node.outputs[0]] = draft.emit(op, (result,), node.origin)[0]
        start = stop
    return made
