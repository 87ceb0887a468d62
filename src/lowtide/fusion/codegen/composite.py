"""Reductions, softmax, norms and their backward, written as reductions and element-wise maps.

Problem.  A softmax or a layer norm is one operator in ATen and several passes over a row in a kernel; to
fuse what surrounds it, the passes have to be visible.

Method.  Data: overload -> function from virtual tensors to virtual tensors.  Each is the textbook formula;
the planner of loops (`nest`) finds out that all passes of a row can run while the row is in cache.
Statistics and sums of bfloat16 inputs are float32, as in ATen.

Not done here: scans, sorts, argmax, quantiles; batch norm's running statistics are the body's own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lowtide.fusion.codegen.expr import Builder, Expr, compute_dtype
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, reshape
from lowtide.ir.graph import TensorMeta

__all__ = ["COMPOSITES"]

Metas = Sequence[TensorMeta]
Outputs = tuple[Tensor | None, ...]
B = Builder
_ZERO = Index()


def _wide(kernel: Kernel, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` in the type in which it is computed, unrounded."""
    target = compute_dtype(dtype or x.dtype)
    return x if x.dtype == target else kernel.map(lambda b, v: v, x, dtype=target)


def _stored(kernel: Kernel, x: Tensor, meta: TensorMeta) -> Tensor:
    """`x` as the operator returns it: its type and its shape."""
    x = reshape(x, meta.shape) if x.shape != meta.shape else x
    return x if x.dtype == meta.dtype else kernel.map(lambda b, v: v, x, dtype=meta.dtype)


def _axes(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(len(x.shape)))
    return tuple(d % max(len(x.shape), 1) for d in ((dim,) if isinstance(dim, int) else dim))


def _count(x: Tensor, axes: Sequence[int]) -> int:
    return prod(x.shape[a] for a in axes) if x.shape else 1


def _op(kernel: Kernel, op: str, *tensors: Tensor) -> Tensor:
    return kernel.map(lambda b, *v: b.apply(op, *v), *tensors)


def _number(kernel: Kernel, op: str, x: Tensor, value: float) -> Tensor:
    return kernel.map(lambda b, v: b.apply(op, v, b.const(value, v.dtype)), x)


def _sum(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    wide = _wide(kernel, x, metas[0].dtype)
    return (_stored(kernel, kernel.reduce("sum", wide, _axes(x, dim)), metas[0]),)


def _sum_all(kernel: Kernel, metas: Metas, x: Tensor, dtype: Any = None) -> Outputs:
    return _sum(kernel, metas, x)


def _mean_of(kernel: Kernel, x: Tensor, axes: Sequence[int]) -> Tensor:
    return _number(kernel, "div", kernel.reduce("sum", x, axes), _count(x, axes))


def _mean(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    return (_stored(kernel, _mean_of(kernel, _wide(kernel, x, metas[0].dtype), _axes(x, dim)), metas[0]),)


def _extreme(kind: str) -> Callable[..., Outputs]:
    def lower(kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False) -> Outputs:
        if x.numel == 0:
            raise Unfusable(f"{kind} of an empty tensor has no value")
        return (_stored(kernel, kernel.reduce(kind, x, _axes(x, dim)), metas[0]),)

    return lower


def _logical(kind: str) -> Callable[..., Outputs]:
    def lower(kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False) -> Outputs:
        flags = kernel.map(lambda b, v: b.cast(v, torch.bool), x, dtype=torch.bool)
        return (_stored(kernel, kernel.reduce(kind, flags, _axes(x, dim)), metas[0]),)

    return lower


def _prod(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    wide = _wide(kernel, x, metas[0].dtype)
    return (_stored(kernel, kernel.reduce("prod", wide, _axes(x, dim)), metas[0]),)


def _prod_all(kernel: Kernel, metas: Metas, x: Tensor, dtype: Any = None) -> Outputs:
    return _prod(kernel, metas, x)


def _moments(kernel: Kernel, x: Tensor, axes: Sequence[int], correction: float = 0) -> tuple[Tensor, Tensor]:
    """(mean, variance) over `axes`, in two passes over a row that stays in cache.

    The mean is taken relative to the row's first element: exact for constant rows, and accurate where
    the mean is large against the deviation.
    """
    if x.numel == 0:
        raise Unfusable("moments of an empty tensor")
    lead = tuple(1 if k in axes else size for k, size in enumerate(x.shape))
    first = Tensor(lead, x.dtype, x.at)
    mean = _op(kernel, "add", _mean_of(kernel, _op(kernel, "sub", x, first), axes), first)
    gap = _op(kernel, "sub", x, mean)
    total = kernel.reduce("sum", _op(kernel, "mul", gap, gap), axes)
    count = _count(x, axes) - correction
    return mean, _number(kernel, "div", total, max(count, 0))


def _var(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Outputs:
    _, var = _moments(kernel, _wide(kernel, x), _axes(x, dim), 1 if correction is None else correction)
    return (_stored(kernel, var, metas[0]),)


def _var_mean(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Outputs:
    mean, var = _moments(kernel, _wide(kernel, x), _axes(x, dim), 1 if correction is None else correction)
    return _stored(kernel, var, metas[0]), _stored(kernel, mean, metas[1])


def _shifted(kernel: Kernel, x: Tensor, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """(x minus its maximum along `dim`, the axes)."""
    axes = _axes(x, dim)
    return _op(kernel, "sub", x, kernel.reduce("max", x, axes)), axes


def _softmax(kernel: Kernel, metas: Metas, x: Tensor, dim: int, half_to_float: bool = False) -> Outputs:
    shifted, axes = _shifted(kernel, _wide(kernel, x, metas[0].dtype), dim)
    power = _op(kernel, "exp", shifted)
    share = kernel.map(_divide_by_row, power, kernel.reduce("sum", power, axes))
    return (_stored(kernel, share, metas[0]),)


def _divide_by_row(b: B, x: Expr, total: Expr) -> Expr:
    """One division a row instead of one an element (ATen does the same)."""
    return b.apply("mul", x, b.apply("div", b.const(1, total.dtype), total))


def _log_softmax(kernel: Kernel, metas: Metas, x: Tensor, dim: int, half_to_float: bool = False) -> Outputs:
    shifted, axes = _shifted(kernel, _wide(kernel, x, metas[0].dtype), dim)
    total = kernel.reduce("sum", _op(kernel, "exp", shifted), axes)
    return (_stored(kernel, _op(kernel, "sub", shifted, _op(kernel, "log", total)), metas[0]),)


def _logsumexp(kernel: Kernel, metas: Metas, x: Tensor, dim: Any, keepdim: bool = False) -> Outputs:
    axes, wide = _axes(x, dim), _wide(kernel, x, metas[0].dtype)
    top = kernel.reduce("max", wide, axes)
    safe = kernel.map(_finite_or_zero, top)
    total = kernel.reduce("sum", _op(kernel, "exp", _op(kernel, "sub", wide, safe)), axes)
    return (_stored(kernel, _op(kernel, "add", _op(kernel, "log", total), safe), metas[0]),)


def _finite_or_zero(b: B, x: Expr) -> Expr:
    infinite = b.compare("eq", b.apply("abs", x), b.const(float("inf"), x.dtype))
    return b.where(infinite, b.const(0, x.dtype), x)


def _softmax_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, out: Tensor, dim: int, input_dtype: Any
) -> Outputs:
    grad, out = _wide(kernel, grad), _wide(kernel, out)
    product = _op(kernel, "mul", grad, out)
    total = kernel.reduce("sum", product, _axes(out, dim))
    result = kernel.map(lambda b, g, o, t: b.apply("mul", b.apply("sub", g, t), o), grad, out, total)
    return (_stored(kernel, result, metas[0]),)


def _log_softmax_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, out: Tensor, dim: int, input_dtype: Any
) -> Outputs:
    grad, out = _wide(kernel, grad), _wide(kernel, out)
    total = kernel.reduce("sum", grad, _axes(out, dim))
    result = kernel.map(
        lambda b, g, o, t: b.apply("sub", g, b.apply("mul", b.apply("exp", o), t)), grad, out, total
    )
    return (_stored(kernel, result, metas[0]),)


def _rstd(kernel: Kernel, var: Tensor, eps: float) -> Tensor:
    def emit(b: B, v: Expr) -> Expr:
        shifted = b.apply("add", v, b.const(eps, v.dtype))
        return b.apply("div", b.const(1, v.dtype), b.apply("sqrt", shifted))

    return kernel.map(emit, var)


def _normalised(b: B, x: Expr, mean: Expr, rstd: Expr) -> Expr:
    return b.apply("mul", b.apply("sub", x, mean), rstd)


def _affine(kernel: Kernel, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None and bias is not None:
        return kernel.map(
            lambda b, v, w, s: b.apply("fma", v, b.cast(w, v.dtype), b.cast(s, v.dtype)), x, weight, bias
        )
    if weight is not None:
        return kernel.map(lambda b, v, w: b.apply("mul", v, b.cast(w, v.dtype)), x, weight)
    if bias is not None:
        return kernel.map(lambda b, v, s: b.apply("add", v, b.cast(s, v.dtype)), x, bias)
    return x


def _layer_norm(
    kernel: Kernel, metas: Metas, x: Tensor, normalized_shape: Sequence[int],
    weight: Tensor | None, bias: Tensor | None, eps: float,
) -> Outputs:  # fmt: skip
    wide = _wide(kernel, x)
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    mean, var = _moments(kernel, wide, axes)
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), weight, bias)
    stats = (_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False))
    return (_stored(kernel, out, metas[0]), *stats)


def _layer_norm_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, normalized_shape: Sequence[int],
    mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool],
) -> Outputs:  # fmt: skip
    lead = len(x.shape) - len(normalized_shape)
    axes, rows = tuple(range(lead, len(x.shape))), tuple(range(lead))
    grad, x = _wide(kernel, grad), _wide(kernel, x)
    xhat = kernel.map(_normalised, x, _wide(kernel, mean), _wide(kernel, rstd))
    results = []
    if output_mask[0]:
        scaled = _affine(kernel, grad, weight, None)
        results.append(_norm_input_grad(kernel, scaled, xhat, _wide(kernel, rstd), axes))
    if output_mask[1]:
        results.append(kernel.reduce("sum", _op(kernel, "mul", grad, xhat), rows))
    if output_mask[2]:
        results.append(kernel.reduce("sum", grad, rows))
    return tuple(_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


def _norm_input_grad(kernel: Kernel, grad: Tensor, xhat: Tensor, rstd: Tensor, axes: Sequence[int]) -> Tensor:
    count = _count(xhat, axes)
    along = _number(kernel, "div", kernel.reduce("sum", _op(kernel, "mul", grad, xhat), axes), count)
    level = _number(kernel, "div", kernel.reduce("sum", grad, axes), count)

    def emit(b: B, g: Expr, h: Expr, a: Expr, c: Expr, r: Expr) -> Expr:
        return b.apply("mul", b.apply("sub", b.apply("sub", g, c), b.apply("mul", h, a)), r)

    return kernel.map(emit, grad, xhat, along, level, rstd)


def _channels(x: Tensor, tensor: Tensor | None) -> Tensor | None:
    """A per-channel vector shaped to broadcast over ``[N, C, ...]``."""
    return None if tensor is None else reshape(tensor, (x.shape[1],) + (1,) * (len(x.shape) - 2))


def _batch_axes(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


def _batch_norm_train(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    if not training:
        raise Unfusable("batch norm in evaluation without running statistics")
    wide = _wide(kernel, x)
    mean, var = _moments(kernel, wide, _batch_axes(x))
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), _channels(x, weight), _channels(x, bias))
    stats = (_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False))
    return (_stored(kernel, out, metas[0]), *stats)


def _batch_norm_eval(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor, running_var: Tensor, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    mean = _channels(x, _wide(kernel, running_mean))
    rstd = _channels(x, _rstd(kernel, _wide(kernel, running_var), eps))
    assert mean is not None and rstd is not None
    normal = kernel.map(_normalised, _wide(kernel, x), mean, rstd)
    out = _stored(kernel, _affine(kernel, normal, _channels(x, weight), _channels(x, bias)), metas[0])
    return (out, *(kernel.constant(0, meta.shape, meta.dtype) for meta in metas[1:]))  # statistics: empty


def _batch_norm_functional(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor, running_var: Tensor, training: bool, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    """(result, mean, 1/deviation, new running mean, new running variance)."""
    if not training:
        raise Unfusable("functional batch norm in evaluation mode")
    wide = _wide(kernel, x)
    mean, var = _moments(kernel, wide, _batch_axes(x))
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), _channels(x, weight), _channels(x, bias))
    count = _count(x, _batch_axes(x))
    unbiased = _number(kernel, "mul", reshape(var, running_var.shape), count / max(count - 1, 1))

    def moved(b: B, old: Expr, new: Expr) -> Expr:
        kept = b.apply("mul", old, b.const(1 - momentum, old.dtype))
        return b.apply("fma", b.const(momentum, old.dtype), b.cast(new, old.dtype), kept)

    new_mean = kernel.map(moved, running_mean, reshape(mean, running_mean.shape))
    results = (out, mean, rstd, new_mean, kernel.map(moved, running_var, unbiased))
    return tuple(_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


def _batch_norm(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor | None, running_var: Tensor | None, training: bool, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    if training:
        if running_mean is not None:
            raise Unfusable("batch norm that updates its running statistics in place")
        return _batch_norm_train(kernel, metas, x, weight, bias, training, momentum, eps)
    if running_mean is None or running_var is None:
        raise Unfusable("batch norm in evaluation without running statistics")
    return _batch_norm_eval(kernel, metas, x, weight, bias, running_mean, running_var, momentum, eps)


def _batch_norm_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Any,
    running_var: Any, save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float,
    output_mask: Sequence[bool],
) -> Outputs:  # fmt: skip
    if not train or save_mean is None or save_invstd is None:
        raise Unfusable("batch norm backward in evaluation mode")
    axes = _batch_axes(x)
    grad, x = _wide(kernel, grad), _wide(kernel, x)
    mean, rstd = _channels(x, _wide(kernel, save_mean)), _channels(x, _wide(kernel, save_invstd))
    assert mean is not None and rstd is not None
    xhat = kernel.map(_normalised, x, mean, rstd)
    results: list[Tensor] = []
    if output_mask[0]:
        plain = _norm_input_grad(kernel, grad, xhat, rstd, axes)
        results.append(_affine(kernel, plain, _channels(x, weight), None))
    if output_mask[1]:
        results.append(kernel.reduce("sum", _op(kernel, "mul", grad, xhat), axes))
    if output_mask[2]:
        results.append(kernel.reduce("sum", grad, axes))
    return tuple(_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


def _group_norm(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    n: int, c: int, hw: int, group: int, eps: float,
) -> Outputs:  # fmt: skip
    wide = reshape(_wide(kernel, x), (n, group, (c // group) * hw))
    mean, var = _moments(kernel, wide, (2,))
    rstd = _rstd(kernel, var, eps)
    normal = reshape(kernel.map(_normalised, wide, mean, rstd), x.shape)
    out = _affine(kernel, normal, _channels(x, weight), _channels(x, bias))
    return (
        _stored(kernel, out, metas[0]),
        *(_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False)),
    )


def _mse(kernel: Kernel, metas: Metas, x: Tensor, target: Tensor, reduction: int = 1) -> Outputs:
    gap = _op(kernel, "sub", _wide(kernel, x), _wide(kernel, target))
    square = _op(kernel, "mul", gap, gap)
    axes = tuple(range(len(square.shape)))
    if reduction == 1:
        square = _mean_of(kernel, square, axes)
    elif reduction == 2:
        square = kernel.reduce("sum", square, axes)
    return (_stored(kernel, square, metas[0]),)


def _mse_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, target: Tensor, reduction: int
) -> Outputs:
    norm = 2.0 / x.numel if reduction == 1 else 2.0

    def emit(b: B, g: Expr, v: Expr, t: Expr) -> Expr:
        return b.apply("mul", b.apply("mul", b.const(norm, v.dtype), b.apply("sub", v, t)), g)

    return (
        _stored(
            kernel, kernel.map(emit, _wide(kernel, grad), _wide(kernel, x), _wide(kernel, target)), metas[0]
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
        loss = _op(kernel, "div", loss, count)
    return tuple(_stored(kernel, r, m) for r, m in zip((loss, count), metas, strict=False))


def _at_target(kernel: Kernel, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    axis = 1 if len(x.shape) > 1 else 0
    wide = _wide(kernel, x)
    b = kernel.builder
    inside = reshape(target, (*target.shape[:axis], 1, *target.shape[axis:]))

    def rule(indices: Any) -> Expr:
        wanted = inside.at((*indices[:axis], _ZERO, *indices[axis + 1 :]))
        keep = b.compare("eq", wanted, b.index(indices[axis]))
        keep = b.apply("and", keep, b.apply("not", _ignored(b, wanted, ignore_index)))
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
    scale = kernel.map(lambda b, g: b.apply("neg", g), _wide(kernel, reshape(grad, ())))
    if reduction == 1:
        scale = _op(kernel, "div", scale, _wide(kernel, reshape(total_weight, ())))

    def rule(indices: Any) -> Expr:
        wanted = inside.at((*indices[:axis], _ZERO, *indices[axis + 1 :]))
        keep = b.compare("eq", wanted, b.index(indices[axis]))
        keep = b.apply("and", keep, b.apply("not", _ignored(b, wanted, ignore_index)))
        return b.where(keep, scale.at(()), b.const(0, scale.dtype))

    return (_stored(kernel, Tensor(x.shape, scale.dtype, rule), metas[0]),)


def _mm(kernel: Kernel, metas: Metas, x: Tensor, y: Tensor) -> Outputs:
    product = kernel.contract(reshape(x, (1, *x.shape)), reshape(y, (1, *y.shape)))
    return (reshape(product, metas[0].shape),)


def _bmm(kernel: Kernel, metas: Metas, x: Tensor, y: Tensor) -> Outputs:
    return (kernel.contract(x, y),)


def _plus_product(kernel: Kernel, bias: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise Unfusable("a scaled matrix product")
    return _op(kernel, "add", product, bias)


def _addmm(
    kernel: Kernel, metas: Metas, bias: Tensor, x: Tensor, y: Tensor, beta: Any = 1, alpha: Any = 1
) -> Outputs:
    (product,) = _mm(kernel, metas, x, y)
    assert product is not None
    return (_plus_product(kernel, bias, product, beta, alpha),)


def _baddbmm(
    kernel: Kernel, metas: Metas, bias: Tensor, x: Tensor, y: Tensor, beta: Any = 1, alpha: Any = 1
) -> Outputs:
    return (_plus_product(kernel, bias, kernel.contract(x, y), beta, alpha),)


def _linear(kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outputs:
    rows = reshape(x, (1, x.numel // max(x.shape[-1], 1), x.shape[-1]))
    turned = Tensor((1, weight.shape[1], weight.shape[0]), weight.dtype, lambda ix: weight.at((ix[2], ix[1])))
    product = reshape(kernel.contract(rows, turned), metas[0].shape)
    return (product if bias is None else _op(kernel, "add", product, bias),)


COMPOSITES: dict[str, Callable[..., Outputs]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.linear.default": _linear,
    "aten.sum.default": _sum_all,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": lambda kernel, metas, x, dtype=None: _mean(kernel, metas, x),
    "aten.mean.dim": _mean,
    "aten.amax.default": _extreme("max"),
    "aten.amin.default": _extreme("min"),
    "aten.max.default": _extreme("max"),
    "aten.min.default": _extreme("min"),
    "aten.any.default": _logical("any"),
    "aten.any.dim": _logical("any"),
    "aten.any.dims": _logical("any"),
    "aten.all.default": _logical("all"),
    "aten.all.dim": _logical("all"),
    "aten.all.dims": _logical("all"),
    "aten.prod.default": _prod_all,
    "aten.prod.dim_int": _prod,
    "aten.var.correction": _var,
    "aten.var_mean.correction": _var_mean,
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _log_softmax,
    "aten.logsumexp.default": _logsumexp,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_train,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_eval,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
    "aten.nll_loss_forward.default": _nll_forward,
    "aten.nll_loss2d_forward.default": _nll_forward,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss2d_backward.default": _nll_backward,
}
