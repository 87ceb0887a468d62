"""Reductions and softmax, forward and backward, as reductions and element-wise maps.

Method.  Data: overload -> function from virtual tensors to virtual tensors; each is the textbook formula.
Sums of bfloat16 inputs are float32, as in ATen.  `moments`, `widen` and `as_stored` are shared with `norms`,
`losses` and `products`.

Not done here: scans, sorts, argmax, quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lowtide.fusion.codegen.expr import Builder, Expr, compute_dtype
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, reshape
from lowtide.ir.graph import TensorMeta

__all__ = [
    "REDUCTIONS", "Metas", "Outputs", "as_stored", "axes_of", "combine", "count_of", "mean_of",
    "moments", "widen", "with_number",
]  # fmt: skip

Metas = Sequence[TensorMeta]
Outputs = tuple[Tensor | None, ...]
B = Builder


def widen(kernel: Kernel, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` in the type in which it is computed, unrounded."""
    target = compute_dtype(dtype or x.dtype)
    return x if x.dtype == target else kernel.map(lambda b, v: v, x, dtype=target)


def as_stored(kernel: Kernel, x: Tensor, meta: TensorMeta) -> Tensor:
    """`x` as the operator returns it: its type and its shape."""
    x = reshape(x, meta.shape) if x.shape != meta.shape else x
    return x if x.dtype == meta.dtype else kernel.map(lambda b, v: v, x, dtype=meta.dtype)


def axes_of(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(len(x.shape)))
    return tuple(d % max(len(x.shape), 1) for d in ((dim,) if isinstance(dim, int) else dim))


def count_of(x: Tensor, axes: Sequence[int]) -> int:
    return prod(x.shape[a] for a in axes) if x.shape else 1


def combine(kernel: Kernel, op: str, *tensors: Tensor) -> Tensor:
    return kernel.map(lambda b, *v: b.apply(op, *v), *tensors)


def with_number(kernel: Kernel, op: str, x: Tensor, value: float) -> Tensor:
    return kernel.map(lambda b, v: b.apply(op, v, b.const(value, v.dtype)), x)


def _sum(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    wide = widen(kernel, x, metas[0].dtype)
    return (as_stored(kernel, kernel.reduce("sum", wide, axes_of(x, dim)), metas[0]),)


def _sum_all(kernel: Kernel, metas: Metas, x: Tensor, dtype: Any = None) -> Outputs:
    return _sum(kernel, metas, x)


def mean_of(kernel: Kernel, x: Tensor, axes: Sequence[int]) -> Tensor:
    return with_number(kernel, "div", kernel.reduce("sum", x, axes), count_of(x, axes))


def _mean(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    return (as_stored(kernel, mean_of(kernel, widen(kernel, x, metas[0].dtype), axes_of(x, dim)), metas[0]),)


def _extreme(kind: str) -> Callable[..., Outputs]:
    def lower(kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False) -> Outputs:
        if x.numel == 0:
            raise Unfusable(f"{kind} of an empty tensor has no value")
        return (as_stored(kernel, kernel.reduce(kind, x, axes_of(x, dim)), metas[0]),)

    return lower


def _logical(kind: str) -> Callable[..., Outputs]:
    def lower(kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False) -> Outputs:
        flags = kernel.map(lambda b, v: b.cast(v, torch.bool), x, dtype=torch.bool)
        return (as_stored(kernel, kernel.reduce(kind, flags, axes_of(x, dim)), metas[0]),)

    return lower


def _prod(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outputs:
    wide = widen(kernel, x, metas[0].dtype)
    return (as_stored(kernel, kernel.reduce("prod", wide, axes_of(x, dim)), metas[0]),)


def _prod_all(kernel: Kernel, metas: Metas, x: Tensor, dtype: Any = None) -> Outputs:
    return _prod(kernel, metas, x)


def moments(kernel: Kernel, x: Tensor, axes: Sequence[int], correction: float = 0) -> tuple[Tensor, Tensor]:
    """(mean, variance) over `axes`, in two passes over a row that stays in cache.

    The mean is taken relative to the row's first element: exact for constant rows, and accurate where
    the mean is large against the deviation.
    """
    if x.numel == 0:
        raise Unfusable("moments of an empty tensor")
    lead = tuple(1 if k in axes else size for k, size in enumerate(x.shape))
    first = Tensor(lead, x.dtype, x.at)
    mean = combine(kernel, "add", mean_of(kernel, combine(kernel, "sub", x, first), axes), first)
    gap = combine(kernel, "sub", x, mean)
    total = kernel.reduce("sum", combine(kernel, "mul", gap, gap), axes)
    count = count_of(x, axes) - correction
    return mean, with_number(kernel, "div", total, max(count, 0))


def _var(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Outputs:
    _, var = moments(kernel, widen(kernel, x), axes_of(x, dim), 1 if correction is None else correction)
    return (as_stored(kernel, var, metas[0]),)


def _var_mean(
    kernel: Kernel, metas: Metas, x: Tensor, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Outputs:
    mean, var = moments(kernel, widen(kernel, x), axes_of(x, dim), 1 if correction is None else correction)
    return as_stored(kernel, var, metas[0]), as_stored(kernel, mean, metas[1])


def _shifted(kernel: Kernel, x: Tensor, dim: int) -> tuple[Tensor, tuple[int, ...]]:
    """(x minus its maximum along `dim`, the axes)."""
    axes = axes_of(x, dim)
    return combine(kernel, "sub", x, kernel.reduce("max", x, axes)), axes


def _softmax(kernel: Kernel, metas: Metas, x: Tensor, dim: int, half_to_float: bool = False) -> Outputs:
    shifted, axes = _shifted(kernel, widen(kernel, x, metas[0].dtype), dim)
    power = combine(kernel, "exp", shifted)
    share = kernel.map(_divide_by_row, power, kernel.reduce("sum", power, axes))
    return (as_stored(kernel, share, metas[0]),)


def _divide_by_row(b: B, x: Expr, total: Expr) -> Expr:
    """One division a row instead of one an element (ATen does the same)."""
    return b.apply("mul", x, b.apply("div", b.const(1, total.dtype), total))


def _log_softmax(kernel: Kernel, metas: Metas, x: Tensor, dim: int, half_to_float: bool = False) -> Outputs:
    shifted, axes = _shifted(kernel, widen(kernel, x, metas[0].dtype), dim)
    total = kernel.reduce("sum", combine(kernel, "exp", shifted), axes)
    return (as_stored(kernel, combine(kernel, "sub", shifted, combine(kernel, "log", total)), metas[0]),)


def _logsumexp(kernel: Kernel, metas: Metas, x: Tensor, dim: Any, keepdim: bool = False) -> Outputs:
    axes, wide = axes_of(x, dim), widen(kernel, x, metas[0].dtype)
    top = kernel.reduce("max", wide, axes)
    safe = kernel.map(_finite_or_zero, top)
    total = kernel.reduce("sum", combine(kernel, "exp", combine(kernel, "sub", wide, safe)), axes)
    return (as_stored(kernel, combine(kernel, "add", combine(kernel, "log", total), safe), metas[0]),)


def _finite_or_zero(b: B, x: Expr) -> Expr:
    infinite = b.compare("eq", b.apply("abs", x), b.const(float("inf"), x.dtype))
    return b.where(infinite, b.const(0, x.dtype), x)


def _softmax_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, out: Tensor, dim: int, input_dtype: Any
) -> Outputs:
    grad, out = widen(kernel, grad), widen(kernel, out)
    product = combine(kernel, "mul", grad, out)
    total = kernel.reduce("sum", product, axes_of(out, dim))
    result = kernel.map(lambda b, g, o, t: b.apply("mul", b.apply("sub", g, t), o), grad, out, total)
    return (as_stored(kernel, result, metas[0]),)


def _log_softmax_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, out: Tensor, dim: int, input_dtype: Any
) -> Outputs:
    grad, out = widen(kernel, grad), widen(kernel, out)
    total = kernel.reduce("sum", grad, axes_of(out, dim))
    result = kernel.map(
        lambda b, g, o, t: b.apply("sub", g, b.apply("mul", b.apply("exp", o), t)), grad, out, total
    )
    return (as_stored(kernel, result, metas[0]),)


REDUCTIONS: dict[str, Callable[..., Outputs]] = {
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
}
