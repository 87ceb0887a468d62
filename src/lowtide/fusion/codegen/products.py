"""Matrix products: which operands they contract.

Not done here: scaled products (``addmm`` with alpha or beta), types other than float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.fusion.codegen.expr import Builder
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.reductions import (
    Metas,
    Outputs,
    combine,
)  # fmt: skip
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


PRODUCTS: dict[str, Callable[..., Outputs]] = {
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.linear.default": _linear,
}
