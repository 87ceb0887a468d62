"""Layer, batch and group norm, forward and backward.

Method.  Statistics relative to a row's first element (`reductions.moments`), then an affine map; the planner
of loops finds that all passes of a row can run while it is in cache.

Not done here: batch norm that updates running statistics in place (the functional form returns them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowtide.fusion.codegen.expr import Builder, Expr
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.reductions import (
    Metas,
    Outputs,
    as_stored,
    combine,
    count_of,
    moments,
    widen,
    with_number,
)  # fmt: skip
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, reshape

__all__ = ["NORMS"]

B = Builder
_ZERO = Index()


def _rstd(kernel: Kernel, var: Tensor, eps: float) -> Tensor:
    def emit(b: B, v: Expr) -> Expr:
        shifted = b.apply("add", v, b.const(eps, v.dtype))
        return b.apply("div", b.const(1, v.dtype), b.apply("sqrt", shifted))

    return kernel.map(emit, var)


def _normalised(b: B, x: Expr, mean: Expr, rstd: Expr) -> Expr:
    return b.apply("mul", b.apply("sub", x, mean), rstd)


def _scaled(b: B, x: Expr, scale: Expr, shift: Expr) -> Expr:
    return b.apply("fma", x, scale, shift)


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
    wide = widen(kernel, x)
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    mean, var = moments(kernel, wide, axes)
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), weight, bias)
    stats = (as_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False))
    return (as_stored(kernel, out, metas[0]), *stats)


def _layer_norm_backward(
    kernel: Kernel, metas: Metas, grad: Tensor, x: Tensor, normalized_shape: Sequence[int],
    mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool],
) -> Outputs:  # fmt: skip
    lead = len(x.shape) - len(normalized_shape)
    axes, rows = tuple(range(lead, len(x.shape))), tuple(range(lead))
    grad, x = widen(kernel, grad), widen(kernel, x)
    xhat = kernel.map(_normalised, x, widen(kernel, mean), widen(kernel, rstd))
    results = []
    if output_mask[0]:
        scaled = _affine(kernel, grad, weight, None)
        results.append(_norm_input_grad(kernel, scaled, xhat, widen(kernel, rstd), axes))
    if output_mask[1]:
        results.append(kernel.reduce("sum", combine(kernel, "mul", grad, xhat), rows))
    if output_mask[2]:
        results.append(kernel.reduce("sum", grad, rows))
    return tuple(as_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


def _norm_input_grad(kernel: Kernel, grad: Tensor, xhat: Tensor, rstd: Tensor, axes: Sequence[int]) -> Tensor:
    count = count_of(xhat, axes)
    along = with_number(kernel, "div", kernel.reduce("sum", combine(kernel, "mul", grad, xhat), axes), count)
    level = with_number(kernel, "div", kernel.reduce("sum", grad, axes), count)

    def emit(b: B, g: Expr, h: Expr, a: Expr, c: Expr, r: Expr) -> Expr:
        return b.apply("mul", b.apply("sub", b.apply("sub", g, c), b.apply("mul", h, a)), r)

    return kernel.map(emit, grad, xhat, along, level, rstd)


def _per_channel(x: Tensor, tensor: Tensor) -> Tensor:
    """A per-channel vector shaped to broadcast over ``[N, C, ...]``."""
    return reshape(tensor, (x.shape[1],) + (1,) * (len(x.shape) - 2))


def _channels(x: Tensor, tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _per_channel(x, tensor)


def _batch_axes(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


def _batch_norm_train(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    if not training:
        raise Unfusable("batch norm in evaluation without running statistics")
    wide = widen(kernel, x)
    mean, var = moments(kernel, wide, _batch_axes(x))
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), _channels(x, weight), _channels(x, bias))
    stats = (as_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False))
    return (as_stored(kernel, out, metas[0]), *stats)


def _batch_norm_eval(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor, running_var: Tensor, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    scale = _rstd(kernel, widen(kernel, running_var), eps)
    if weight is not None:
        scale = combine(kernel, "mul", scale, widen(kernel, weight))
    shift = combine(kernel, "mul", widen(kernel, running_mean), scale)
    if bias is not None:
        shift = combine(kernel, "sub", widen(kernel, bias), shift)
    else:
        shift = kernel.map(lambda b, v: b.apply("neg", v), shift)
    factors = [kernel.prepare(_per_channel(x, each)) for each in (scale, shift)]
    out = as_stored(kernel, kernel.map(_scaled, widen(kernel, x), *factors), metas[0])
    return (out, *(kernel.constant(0, meta.shape, meta.dtype) for meta in metas[1:]))  # statistics: empty


def _batch_norm_functional(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    running_mean: Tensor, running_var: Tensor, training: bool, momentum: float, eps: float,
) -> Outputs:  # fmt: skip
    """(result, mean, 1/deviation, new running mean, new running variance)."""
    if not training:
        raise Unfusable("functional batch norm in evaluation mode")
    wide = widen(kernel, x)
    mean, var = moments(kernel, wide, _batch_axes(x))
    rstd = _rstd(kernel, var, eps)
    out = _affine(kernel, kernel.map(_normalised, wide, mean, rstd), _channels(x, weight), _channels(x, bias))
    count = count_of(x, _batch_axes(x))
    unbiased = with_number(kernel, "mul", reshape(var, running_var.shape), count / max(count - 1, 1))

    def moved(b: B, old: Expr, new: Expr) -> Expr:
        kept = b.apply("mul", old, b.const(1 - momentum, old.dtype))
        return b.apply("fma", b.const(momentum, old.dtype), b.cast(new, old.dtype), kept)

    new_mean = kernel.map(moved, running_mean, reshape(mean, running_mean.shape))
    results = (out, mean, rstd, new_mean, kernel.map(moved, running_var, unbiased))
    return tuple(as_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


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
    grad, x = widen(kernel, grad), widen(kernel, x)
    mean, rstd = _channels(x, widen(kernel, save_mean)), _channels(x, widen(kernel, save_invstd))
    assert mean is not None and rstd is not None
    xhat = kernel.map(_normalised, x, mean, rstd)
    results: list[Tensor] = []
    if output_mask[0]:
        plain = _norm_input_grad(kernel, grad, xhat, rstd, axes)
        results.append(_affine(kernel, plain, _channels(x, weight), None))
    if output_mask[1]:
        results.append(kernel.reduce("sum", combine(kernel, "mul", grad, xhat), axes))
    if output_mask[2]:
        results.append(kernel.reduce("sum", grad, axes))
    return tuple(as_stored(kernel, r, m) for r, m in zip(results, metas, strict=True))


def _group_norm(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    n: int, c: int, hw: int, group: int, eps: float,
) -> Outputs:  # fmt: skip
    wide = reshape(widen(kernel, x), (n, group, (c // group) * hw))
    mean, var = moments(kernel, wide, (2,))
    rstd = _rstd(kernel, var, eps)
    normal = reshape(kernel.map(_normalised, wide, mean, rstd), x.shape)
    out = _affine(kernel, normal, _channels(x, weight), _channels(x, bias))
    return (
        as_stored(kernel, out, metas[0]),
        *(as_stored(kernel, s, m) for s, m in zip((mean, rstd), metas[1:], strict=False)),
    )


NORMS: dict[str, Callable[..., Outputs]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_train,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_eval,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_group_norm.default": _group_norm,
}
