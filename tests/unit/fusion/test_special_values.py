"""Kernels at NaN, infinity and the very thresholds of activations: holes and values are where eager's are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from tests.differential.fusion_bodies import trace
from torch import Tensor

from lowtide.fusion.codegen.library import compile_bodies

ATEN = torch.ops.aten
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1.0, -1.0, 3.0, -3.0, 6.0, 0.3, -0.7, 1e-8, 21.0)
ROWS = len(SPECIAL)
ONE = (
    "relu", "relu6", "hardtanh", "silu", "softplus", "leaky_relu", "elu", "hardsigmoid", "hardswish",
    "sigmoid", "tanh", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "abs", "sign", "round", "reciprocal",
    "erf", "sin", "atan", "isnan", "isinf",
)  # fmt: skip

Function = Callable[[Tensor, Tensor], Tensor]


def one(name: str) -> Function:
    return lambda x, _: getattr(ATEN, name)(x)


def table(x: Tensor) -> Tensor:
    return x.view(ROWS, ROWS)


FUNCTIONS: dict[str, Function] = {
    **{name: one(name) for name in ONE},
    "clamp": lambda x, _: ATEN.clamp(x, -1, 1),
    "threshold": lambda x, _: ATEN.threshold(x, 0.1, 20.0),
    "maximum": lambda x, y: ATEN.maximum(x, y),
    "minimum": lambda x, y: ATEN.minimum(x, y),
    "fmax": lambda x, y: ATEN.fmax(x, y),
    "pow": lambda x, y: ATEN.pow(x, y),
    "square": lambda x, _: ATEN.pow(x, 2),
    "root": lambda x, _: ATEN.pow(x, 0.5),
    "atan2": lambda x, y: ATEN.atan2(x, y),
    "floor_divide": lambda x, y: ATEN.floor_divide(x, y),
    "where": lambda x, y: ATEN.where(x > y, x, y),
    "lerp": lambda x, y: ATEN.lerp(x, y, 0.6),
    "addcdiv": lambda x, y: ATEN.addcdiv(x, x, y, value=0.5),
    "gelu_backward": lambda g, x: ATEN.gelu_backward(g, x),
    "silu_backward": lambda g, x: ATEN.silu_backward(g, x),
    "leaky_relu_backward": lambda g, x: ATEN.leaky_relu_backward(g, x, 0.1, False),
    "hardswish_backward": lambda g, x: ATEN.hardswish_backward(g, x),
    "hardsigmoid_backward": lambda g, x: ATEN.hardsigmoid_backward(g, x),
    "hardtanh_backward": lambda g, x: ATEN.hardtanh_backward(g, x, -1.0, 1.0),
    "threshold_backward": lambda g, x: ATEN.threshold_backward(g, x, 0.0),
    "sigmoid_backward": lambda g, x: ATEN.sigmoid_backward(g, x),
    "tanh_backward": lambda g, x: ATEN.tanh_backward(g, x),
    "softmax": lambda x, _: ATEN._softmax(table(x), 1, False),
    "log_softmax over rows": lambda _, x: ATEN._log_softmax(table(x), 0, False),
    "amax": lambda _, x: ATEN.amax(table(x), [1]),
    "amin over rows": lambda x, _: ATEN.amin(table(x), [0]),
    "sum": lambda _, x: ATEN.sum(table(x), [1]),
    "layer_norm": lambda x, _: ATEN.native_layer_norm(table(x), [ROWS], None, None, 1e-5)[0],
    "rows of minus infinity": lambda x, _: ATEN._softmax(
        ATEN.where(table(x) > 5, table(x), -math.inf), 1, False
    ),
    "max_pool": lambda x, _: ATEN.max_pool2d_with_indices(x.view(1, 1, ROWS, ROWS), [3, 3], [2, 2])[0],
}


def test_special_values() -> None:
    pairs = list(itertools.product(SPECIAL, SPECIAL))
    given = [torch.tensor(column) for column in zip(*pairs, strict=True)]
    library = compile_bodies([trace(function, given) for function in FUNCTIONS.values()])
    assert library is not None
    for (name, function), kernel in zip(FUNCTIONS.items(), library.kernels, strict=True):
        (ours, *_), eager = kernel.run(given, 1), function(*given)
        torch.testing.assert_close(
            ours, eager, rtol=1e-5, atol=1e-37, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
