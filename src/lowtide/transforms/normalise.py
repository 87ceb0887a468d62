"""Rewrites that make a graph divisible: means become sums, draws lose their false operands.

Problem.  ``nll_loss(mean)`` divides by the weight of the targets that it sees, so two halves do not
add up to the whole; ``bernoulli(x)`` reads nothing of x but its shape, yet stands between two halves
of a region.

rewrite:    nll_loss_forward(x, t, w, mean)  ->  total = sum(w[t] where t != ignored), sum loss / total
            mse_loss(mean), smooth_l1, huber, binary_cross_entropy  ->  sum loss / number of elements
            their backward                   ->  backward of the sum, with the gradient / number
            mean(x), mean over dimension 0   ->  sum / number
            ones_like(x), full_like(x), ...  ->  full(shape)
            bernoulli(x), rand_like(x), ...  ->  the same draw shaped after an expanded scalar
legal when: always; what reads only a shape, if the stand-in gives the same layout, hence the same bits.
effect:     the loss and the mean differ in rounding (class `reassociates`); the rest is exact.  The total
            weight depends on the targets alone, so it is known before any part runs.

Invariants.  Values keep their ids and storages; the backward of nll already takes the total weight.
Normalising twice changes nothing.
"""

from __future__ import annotations

import math

import torch

from lowtide.analysis.axis import arguments_of, with_argument
from lowtide.ir import Aten, Edit, Graph, Node, Ref, TensorMeta
from lowtide.ir.ops import Arg
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict

__all__ = ["normalise"]

_MEAN, _SUM = 1, 2
_NLL = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss",
        "mse_loss_backward",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "huber_loss",
        "huber_loss_backward",
        "soft_margin_loss",
        "soft_margin_loss_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
    )
)
"""Element-wise losses with a `reduction` argument, a mean by default."""

_SHAPED_AFTER = ("aten.bernoulli.p", "aten.rand_like.default", "aten.randn_like.default")
"""Draws that read only the shape of their first operand."""

_FILLED_LIKE: dict[str, float | None] = {
    "aten.ones_like.default": 1,
    "aten.zeros_like.default": 0,
    "aten.empty_like.default": 0,
    "aten.full_like.default": None,
}
"""Constants that read only the shape of their operand, with their value; None: it is an argument."""


def normalise(graph: Graph) -> Edit:
    """`graph` with every rewrite above applied where it matches; `graph` itself if none does."""
    found = graph.memo.get(normalise)
    if not isinstance(found, Edit):
        found = graph.memo[normalise] = _normalise(graph)
    return found


def _normalise(graph: Graph) -> Edit:
    draft = Draft(graph)
    changed = False
    for node in graph.nodes:
        if isinstance(node.op, Aten) and _rewrite(draft, node, node.op):
            changed = True
        else:
            draft.nodes.append(node)
    return Edit(draft.graph(graph.inputs, graph.outputs)) if changed else Edit(graph)


def _rewrite(draft: Draft, node: Node, op: Aten) -> bool:
    """Emit the replacement of `node`; False if no rule matches."""
    if op.overload in _NLL:
        return _rewrite_nll(draft, node, op)
    if op.overload in _LOSSES:
        return _rewrite_loss(draft, node, op)
    if op.overload in ("aten.mean.default", "aten.mean.dim"):
        return _rewrite_mean(draft, node, op)
    if op.overload in _FILLED_LIKE:
        return _rewrite_filled(draft, node, op)
    if op.overload in _SHAPED_AFTER:
        return _rewrite_draw(draft, node, op)
    return False


def _arg(op: Aten, position: int, default: Arg = None) -> Arg:
    return op.args[position] if position < len(op.args) else default


def _is_mean(op: Aten) -> bool:
    return arguments_of(op).get("reduction", _MEAN) == _MEAN


def _operand(node: Node, arg: Arg) -> int | None:
    return node.inputs[arg.index] if isinstance(arg, Ref) else None


def _rewrite_nll(draft: Draft, node: Node, op: Aten) -> bool:
    if not _is_mean(op):
        return False
    loss, total = node.outputs
    target, weight = _operand(node, _arg(op, 1)), _operand(node, _arg(op, 2))
    assert target is not None
    _emit_total_weight(draft, node, total, target, weight, _arg(op, 4))
    summed = with_argument(op, "reduction", _SUM)
    part_sum, _ = draft.emit(summed, node.inputs, node.origin)
    quotient = Aten("aten.div.Tensor", (Ref(0), Ref(1)))
    draft.emit(quotient, (part_sum, total), node.origin, outputs=(loss,), node=node.id)
    return True


def _emit_total_weight(
    draft: Draft, node: Node, total: int, target: int, weight: int | None, ignored: Arg
) -> None:
    """Define `total` as the sum of the weights of all targets that are not ignored."""
    dtype = draft.values[total].meta.dtype
    counts = Aten("aten.ne.Scalar", (Ref(0), ignored))
    (valid,) = draft.emit(counts, (target,), node.origin)
    summed = Aten("aten.sum.default", (Ref(0),), (("dtype", dtype),))
    if weight is not None:
        # An ignored target may be no class at all: look up class 0 and multiply by zero.
        (index,) = draft.emit(Aten("aten.mul.Tensor", (Ref(0), Ref(1))), (target, valid), node.origin)
        (found,) = draft.emit(Aten("aten.index.Tensor", (Ref(0), (Ref(1),))), (weight, index), node.origin)
        (valid,) = draft.emit(Aten("aten.mul.Tensor", (Ref(0), Ref(1))), (found, valid), node.origin)
    draft.emit(summed, (valid,), node.origin, outputs=(total,))


def _rewrite_loss(draft: Draft, node: Node, op: Aten) -> bool:
    if not _is_mean(op):
        return False
    summed = with_argument(op, "reduction", _SUM)
    if "backward" not in op.overload:
        count = draft.values[node.inputs[0]].meta.numel
        (whole,) = draft.emit(summed, node.inputs, node.origin)
        _emit_division(draft, node, whole, count)
        return True
    gradient = _operand(node, op.args[0])
    assert gradient is not None
    count = draft.values[node.outputs[0]].meta.numel
    (scaled,) = draft.emit(Aten("aten.div.Scalar", (Ref(0), count)), (gradient,), node.origin)
    inputs = tuple(scaled if value == gradient else value for value in node.inputs)
    draft.emit(summed, inputs, node.origin, outputs=node.outputs, node=node.id)
    return True


def _emit_division(draft: Draft, node: Node, value: int, count: int) -> None:
    division = Aten("aten.div.Scalar", (Ref(0), count))
    draft.emit(division, (value,), node.origin, outputs=node.outputs, node=node.id)


def _rewrite_mean(draft: Draft, node: Node, op: Aten) -> bool:
    """A mean over dimension 0 (in practice the batch); one over rows or planes stays as it is."""
    shape = draft.values[node.inputs[0]].meta.shape
    listed = _arg(op, 1) if op.overload == "aten.mean.dim" else ()
    dims = [dim % len(shape) for dim in listed if isinstance(dim, int)] if isinstance(listed, tuple) else []
    count = math.prod(shape[dim] for dim in dims or range(len(shape)))
    if (dims and 0 not in dims) or not shape or shape[0] < 2 or count == 0:
        return False
    name = "aten.sum.dim_IntList" if op.overload == "aten.mean.dim" else "aten.sum.default"
    (whole,) = draft.emit(Aten(name, op.args, op.kwargs), node.inputs, node.origin)
    _emit_division(draft, node, whole, count)
    return True


def _rewrite_filled(draft: Draft, node: Node, op: Aten) -> bool:
    meta = draft.values[node.outputs[0]].meta
    number = _FILLED_LIKE[op.overload]
    where: tuple[tuple[str, Arg], ...] = (("device", torch.device(meta.device)), ("dtype", meta.dtype))
    full = Aten("aten.full.default", (meta.shape, _arg(op, 1) if number is None else number), where)
    if predict(full, ())[0].meta != meta:
        return False
    draft.emit(full, (), node.origin, outputs=node.outputs, node=node.id)
    return True


def _rewrite_draw(draft: Draft, node: Node, op: Aten) -> bool:
    meta = draft.values[node.inputs[0]].meta
    stand_in = TensorMeta(meta.shape, (0,) * len(meta.shape), meta.dtype, meta.device)
    if meta == stand_in or len(node.inputs) != 1:
        return False
    if predict(op, (stand_in,))[0].meta != predict(op, (meta,))[0].meta:
        return False
    where: tuple[tuple[str, Arg], ...] = (("device", torch.device(meta.device)), ("dtype", meta.dtype))
    (empty,) = draft.emit(Aten("aten.full.default", ((), 0), where), (), node.origin)
    (wide,) = draft.emit(Aten("aten.expand.default", (Ref(0), meta.shape)), (empty,), node.origin)
    draft.emit(op, (wide,), node.origin, outputs=node.outputs, node=node.id)
    return True
