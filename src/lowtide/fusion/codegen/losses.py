"""Losses and their backward: mean squared error, negative log-likelihood.

Method.  The likelihood of the target class is a masked sum over the classes, so that it fuses with the
log-softmax before it and its backward after it; ignored targets count for nothing, and those that are no
class are told as eager tells them (in the forward, which always comes first).

Not done here: class weights, losses without reduction over classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.fusion.codegen.expr import Builder, Expr
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.reductions import (
    Metas,
    Outputs,
    as_stored,
    combine,
    mean_of,
    widen,
)  # fmt: skip
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, reshape

__all__ = ["LOSSES"]

B = Builder
_ZERO = Index()


def _mse(kernel: Kernel, metas: Metas, x: Tensor, target: Tensor, reduction: int = 1) -> Outputs:
    gap = combine(kernel, "sub", widen(kernel, x), widen(kernel, target))
    square = combine(kernel, "mul", gap, gap)
    axes = tuple(range(len(square.shape)))
    if reduction == 1:
        square = mean_of(kernel, square, axes)
    elif reduction == 2:
        square = kernel.reduce("sum", square, axes)
    return (as_stored(kernel, square, metas[0]),)


def _mse_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, target: Tensor, reduction: int
) -> Outputs:
    norm = 2.0 / x.numel if reduction == 1 else 2.0

    def emit(b: B, g: Expr, v: Expr, t: Expr) -> Expr:
        return b.apply("mul", b.apply("mul", b.const(norm, v.dtype), b.apply("sub", v, t)), g)

    return (
        as_stored(
            kernel, kernel.map(emit, widen(kernel, grad), widen(kernel, x), widen(kernel, target)), metas[0]
        ),
    )


def _ignored(b: B, target: Expr, ignore_index: int) -> Expr:
    return b.compare("eq", target, b.const(ignore_index, torch.int64))


def _nll_forward(
    kernel: Kernel,
    metas: Metas,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Outputs:
    """Negative log-likelihood, reading log-probabilities at the target (as a masked sum over classes)."""
    picked = _at_target(kernel, x, target, ignore_index)
    if weight is not None or reduction == 0:
        raise Unfusable("nll_loss with class weights or without reduction")
    valid = kernel.map(
        lambda b, t: b.cast(b.apply("not", _ignored(b, t, ignore_index)), x.dtype), target, dtype=x.dtype
    )
    axes = tuple(range(len(target.shape)))
    count, total = kernel.reduce("sum", valid, axes), kernel.reduce("sum", picked, axes)
    loss = kernel.map(lambda b, s: b.apply("neg", s), total)
    if reduction == 1:
        loss = combine(kernel, "div", loss, count)
    return tuple(as_stored(kernel, r, m) for r, m in zip((loss, count), metas, strict=False))


def _at_target(kernel: Kernel, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    axis = 1 if len(x.shape) > 1 else 0
    wide = widen(kernel, x)
    b = kernel.builder
    inside = reshape(target, (*target.shape[:axis], 1, *target.shape[axis:]))

    def rule(indices: Any) -> Expr:
        wanted = inside.at((*indices[:axis], _ZERO, *indices[axis + 1 :]))
        ignored = _ignored(b, wanted, ignore_index)
        wanted = b.checked(b.where(ignored, b.const(0, wanted.dtype), wanted), x.shape[axis])
        keep = b.compare("eq", wanted, b.index(indices[axis]))
        keep = b.apply("and", keep, b.apply("not", ignored))
        return b.where(keep, wide.at(indices), b.const(0, wide.dtype))

    chosen = Tensor(x.shape, wide.dtype, rule)
    return reshape(kernel.reduce("sum", chosen, (axis,)), target.shape)


def _nll_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None,
    reduction: int, ignore_index: int, total_weight: Tensor,
) -> Outputs:  # fmt: skip
    if weight is not None or reduction == 0:
        raise Unfusable("nll_loss with class weights or without reduction")
    axis = 1 if len(x.shape) > 1 else 0
    b = kernel.builder
    inside = reshape(target, (*target.shape[:axis], 1, *target.shape[axis:]))
    scale = kernel.map(lambda b, g: b.apply("neg", g), widen(kernel, reshape(grad, ())))
    if reduction == 1:
        scale = combine(kernel, "div", scale, widen(kernel, reshape(total_weight, ())))

    def rule(indices: Any) -> Expr:
        wanted = inside.at((*indices[:axis], _ZERO, *indices[axis + 1 :]))
        keep = b.compare("eq", wanted, b.index(indices[axis]))
        keep = b.apply("and", keep, b.apply("not", _ignored(b, wanted, ignore_index)))
        return b.where(keep, scale.at(()), b.const(0, scale.dtype))

    return (as_stored(kernel, Tensor(x.shape, scale.dtype, rule), metas[0]),)


LOSSES: dict[str, Callable[..., Outputs]] = {
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
    "aten.nll_loss_forward.default": _nll_forward,
    "aten.nll_loss2d_forward.default": _nll_forward,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
}
