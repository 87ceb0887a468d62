"""Matrix products: which operands they contract.

Not done here: scaled products (``addmm`` with alpha or beta), types other than float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.fusion.codegen.expr import Builder, Expr
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.reductions import Metas, Outputs, combine, with_number
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, reshape

__all__ = ["PRODUCTS"]

B = Builder
_ZERO = Index()


def _mm(kernel: Kernel, metas: Metas, x: Tensor, y: Tensor) -> Outputs:
    product = kernel.contract(reshape(x, (1, *x.shape)), reshape(y, (1, *y.shape)))
    return (reshape(product, metas[0].shape),)


def _bmm(kernel: Kernel, metas: Metas, x: Tensor, y: Tensor) -> Outputs:
    return (kernel.contract(x, y),)


def _plus_product(kernel: Kernel, bias: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise Unfusable("a scaled matrix product")
    return combine(kernel, "add", product, bias)


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
    return (product if bias is None else combine(kernel, "add", product, bias),)


def _attention(
    kernel: Kernel, metas: Metas, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, attn_mask: Tensor | None = None, scale: float | None = None,
) -> Outputs:  # fmt: skip
    """(result, log-sum-exp): scaled dot products, mask, softmax, weighted sum, written out."""
    if dropout_p or k.shape[:2] != q.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise Unfusable("attention with dropout or grouped heads")
    (batch, heads, length, width), keys = q.shape, k.shape[2]
    left = reshape(q, (batch * heads, length, width))
    turned = reshape(k, (batch * heads, keys, width))
    right = Tensor((batch * heads, width, keys), k.dtype, lambda ix: turned.at((ix[0], ix[2], ix[1])))
    factor = width**-0.5 if scale is None else scale
    scores = reshape(
        with_number(kernel, "mul", kernel.contract(left, right), factor), (batch, heads, length, keys)
    )
    if attn_mask is not None:
        scores = kernel.map(_masked_score, scores, attn_mask)
    if is_causal:
        scores = _causal(kernel, scores)
    top = kernel.reduce("max", scores, (3,))
    power = kernel.map(lambda b, s, t: b.apply("exp", b.apply("sub", s, t)), scores, top)
    total = kernel.reduce("sum", power, (3,))
    share = kernel.map(
        lambda b, p, t: b.apply("mul", p, b.apply("div", b.const(1, t.dtype), t)), power, total
    )
    result = kernel.contract(
        reshape(share, (batch * heads, length, keys)), reshape(v, (batch * heads, keys, v.shape[3]))
    )
    outputs = [reshape(result, metas[0].shape)]
    if len(metas) > 1:
        outputs.append(reshape(combine(kernel, "add", combine(kernel, "log", total), top), metas[1].shape))
    return tuple(outputs)


def _masked_score(b: B, score: Expr, mask: Expr) -> Expr:
    if mask.dtype == torch.bool:
        return b.where(mask, score, b.const(float("-inf"), score.dtype))
    return b.apply("add", score, mask)


def _causal(kernel: Kernel, scores: Tensor) -> Tensor:
    b = kernel.builder

    def rule(indices: tuple[Index, ...]) -> Expr:
        allowed = b.compare("le", b.index(indices[3]), b.index(indices[2]))
        return b.where(allowed, scores.at(indices), b.const(float("-inf"), scores.dtype))

    return Tensor(scores.shape, scores.dtype, rule)


PRODUCTS: dict[str, Callable[..., Outputs]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.linear.default": _linear,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
}
