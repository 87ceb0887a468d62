"""Scales and normalisations that follow a product by weights go into the weights (inference).

rewrite:    BatchNorm(conv(x, w) + b)   becomes   conv(x, w * s) + (b - mean) * s + beta,
                                                  s = gamma / sqrt(var + eps)
            (x @ w + b) * number        becomes   x @ (w * number) + b * number;   the number may come after
                                                  views, copies and a product with something else
legal when: BatchNorm uses its running statistics; the weights are parameters that nothing writes; what lies
            between has no other reader.
effect:     a pass over the result less.  The weights are derived (`derived.py`).  Numerics: reassociates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Ref
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict
from lowtide.transforms.rewriting.merge import is_weight, weight_of
from lowtide.transforms.rewriting.record import Applied, Rewritten, then
from lowtide.transforms.rewriting.replay import Emit, Unfit, replay

__all__ = ["Takes", "every_convolution", "fold_weights"]

_BATCH_NORM = "aten.native_batch_norm.default"
_CONVOLUTION = "aten.convolution.default"
_SCALES = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_PASSED = ("aten.bmm.default", "aten.clone.default")
"""Linear in their first operand."""


Takes = Callable[[Graph, Node], bool]
"""Whether a convolution takes factors into its weights."""


def every_convolution(graph: Graph, node: Node) -> bool:
    """All do."""
    return True


def fold_weights(graph: Graph, takes: Takes = every_convolution) -> Rewritten:
    """`graph` with every number folded that may be, and BatchNorms behind convolutions that `takes` names."""
    done = Rewritten(graph)
    for number in [node.id for node in graph.nodes]:
        if number not in done.graph.node:
            continue
        folded = _folded(done.graph, done.graph.node[number], takes)
        if folded is not None:
            done = then(done, folded)
    return done


def _folded(graph: Graph, node: Node, takes: Takes) -> Rewritten | None:
    found = _batch_norm(graph, node, takes) or _scale(graph, node)
    if found is None:
        return None
    name, instead = found
    size = graph.values[node.outputs[0]].meta.numel
    try:
        return replay(graph, instead, (Applied(name, node.outputs[0], size, 2 * size),))
    except Unfit:
        return None


def _only_reader(graph: Graph, value: int) -> bool:
    return len(graph.readers[value]) == 1 and value not in graph.outputs


def _batch_norm(graph: Graph, node: Node, takes: Takes) -> tuple[str, dict[int, Emit]] | None:
    """A BatchNorm with running statistics right behind a convolution."""
    op = node.op
    if not isinstance(op, Aten) or op.overload != _BATCH_NORM or op.args[5] is not False or op.kwargs:
        return None
    if any(graph.readers[out] or out in graph.outputs for out in node.outputs[1:]):
        return None
    operands = [node.inputs[arg.index] if isinstance(arg, Ref) else None for arg in op.args[:5]]
    made = graph.producer.get(operands[0] if operands[0] is not None else -1)
    if made is None or operands[3] is None or operands[4] is None:
        return None
    if not all(value is None or is_weight(graph, value) for value in operands[1:]):
        return None
    before = graph.node[made]
    if not _plain_convolution(graph, before) or not _only_reader(graph, before.outputs[0]):
        return None
    if not takes(graph, before):
        return None

    def emit(draft: Draft, own: Node) -> Mapping[int, int]:
        return _emit_normed(graph, draft, before, node)

    return "folded-norm", {before.id: _nothing, node.id: emit}


def _nothing(draft: Draft, node: Node) -> None:
    """Emitted at the node that this one is folded with."""


def _plain_convolution(graph: Graph, node: Node) -> bool:
    op = node.op
    if not isinstance(op, Aten) or op.overload != _CONVOLUTION or not isinstance(op.args[1], Ref):
        return False
    weights = [node.inputs[arg.index] for arg in op.args[1:3] if isinstance(arg, Ref)]
    transposed, groups = op.args[6], op.args[8]
    return all(is_weight(graph, value) for value in weights) and (not transposed or groups == 1)


def _emit_normed(graph: Graph, draft: Draft, conv: Node, norm: Node) -> dict[int, int]:
    """The convolution with folded weights; gives what took the place of the result, if it lies elsewhere."""
    assert isinstance(conv.op, Aten) and isinstance(norm.op, Aten)
    at = conv.origin

    def one(overload: str, *operands: int | float) -> int:
        values = [each for each in operands if isinstance(each, int)]
        args, k = [], 0
        for each in operands:
            args.append(Ref(k) if isinstance(each, int) else each)
            k += isinstance(each, int)
        return draft.emit(Aten(overload, tuple(args)), values, at)[0]

    gamma, beta, mean, variance = (
        norm.inputs[arg.index] if isinstance(arg, Ref) else None for arg in norm.op.args[1:5]
    )
    assert mean is not None and variance is not None and isinstance(norm.op.args[7], float)
    scale = one("aten.rsqrt.default", one("aten.add.Tensor", variance, norm.op.args[7]))
    if gamma is not None:
        scale = one("aten.mul.Tensor", gamma, scale)
    old_bias = conv.inputs[conv.op.args[2].index] if isinstance(conv.op.args[2], Ref) else None
    shift = one("aten.sub.Tensor", old_bias, mean) if old_bias is not None else one("aten.neg.default", mean)
    bias = one("aten.mul.Tensor", shift, scale)
    if beta is not None:
        bias = one("aten.add.Tensor", bias, beta)
    assert isinstance(conv.op.args[0], Ref) and isinstance(conv.op.args[1], Ref)
    weight = conv.inputs[conv.op.args[1].index]
    spread = [1] * len(graph.values[weight].meta.shape)
    spread[1 if conv.op.args[6] else 0] = -1
    (shaped,) = draft.emit(Aten("aten.view.default", (Ref(0), tuple(spread))), (scale,), at)
    folded = one("aten.mul.Tensor", weight, shaped)
    op = Aten(conv.op.overload, (Ref(0), Ref(1), Ref(2), *conv.op.args[3:]))
    operands = (conv.inputs[conv.op.args[0].index], folded, bias)
    result = norm.outputs[0]
    (found,) = predict(op, tuple(draft.values[value].meta for value in operands))
    if found.meta == graph.values[result].meta:
        draft.emit(op, operands, at, (result,))
        return {}
    return {result: draft.emit(op, operands, at)[0]}


def _scale(graph: Graph, node: Node) -> tuple[str, dict[int, Emit]] | None:
    """A number times something that a product by weights makes, views and one more product between."""
    op = node.op
    if not isinstance(op, Aten) or op.overload not in _SCALES or len(op.args) != 2 or op.kwargs:
        return None
    number = op.args[1]
    if not isinstance(op.args[0], Ref) or not isinstance(number, int | float) or isinstance(number, bool):
        return None
    if op.overload.startswith("aten.div"):
        if number == 0:
            return None
        number = 1.0 / number
    source = _product_above(graph, node.inputs[0])
    if source is None:
        return None

    def emit(draft: Draft, own: Node) -> None:
        _emit_scaled(graph, draft, own, float(number))

    return "folded-scale", {source.id: emit, node.id: _forward}


def _forward(draft: Draft, node: Node) -> Mapping[int, int]:
    """Readers of a scale read what it read, which is scaled already."""
    return {node.outputs[0]: node.inputs[0]}


def _product_above(graph: Graph, value: int) -> Node | None:
    """The product by weights that `value` comes from, through single readers; None if there is none."""
    for _ in range(12):
        made = graph.producer.get(value)
        if made is None or not _only_reader(graph, value):
            return None
        node = graph.node[made]
        if not isinstance(node.op, Aten):
            return None
        if node.op.overload in _PRODUCTS and _by_weights(graph, node):
            return node
        whole = len(node.outputs) == 1 and graph.values[node.inputs[0]].meta.numel == _size(graph, value)
        if not (graph.is_view(node) and whole) and node.op.overload not in _PASSED:
            return None  # a part of a product: the rest must not be scaled
        value = node.inputs[0]
    return None


def _size(graph: Graph, value: int) -> int:
    return graph.values[value].meta.numel


def _by_weights(graph: Graph, node: Node) -> bool:
    assert isinstance(node.op, Aten)
    count = len(node.op.args)
    plain = node.op.args == tuple(Ref(k) for k in range(count)) and not node.op.kwargs
    bias = count == 2 or is_weight(graph, node.inputs[0])
    return plain and bias and weight_of(graph, node.inputs[-1]) is not None


def _emit_scaled(graph: Graph, draft: Draft, node: Node, number: float) -> None:
    assert isinstance(node.op, Aten)
    times = Aten("aten.mul.Tensor", (Ref(0), number))
    weight = weight_of(graph, node.inputs[-1])
    assert weight is not None
    (scaled,) = draft.emit(times, (weight,), node.origin)
    (turned,) = draft.emit(Aten("aten.t.default", (Ref(0),)), (scaled,), node.origin)
    bias = [draft.emit(times, (node.inputs[0],), node.origin)[0]] if len(node.inputs) == 3 else []
    draft.emit(node.op, (*bias, node.inputs[-2], turned), node.origin, node.outputs, node=node.id)
