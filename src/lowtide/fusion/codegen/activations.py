"""Activation functions and their backward, as ATen's CPU kernels compute them.

Method.  One function per operator, from element expressions to an element expression; `pointwise` names them
in its table.
"""

from __future__ import annotations

import math

from lowtide.fusion.codegen.expr import Builder, Expr

__all__ = [
    "elu", "gelu", "gelu_backward", "hardsigmoid", "hardsigmoid_backward", "hardswish",
    "hardswish_backward", "inside", "leaky", "leaky_backward", "sigmoid_backward", "silu",
    "silu_backward", "softplus", "softplus_backward", "softplus_core", "tanh_backward",
    "threshold", "threshold_backward",
]  # fmt: skip

B = Builder


def number(b: B, like: Expr, value: float | int) -> Expr:
    """A constant of the type of `like`."""
    return b.const(value, like.dtype)


def gelu(b: B, x: Expr, approximate: str) -> Expr:
    half = b.apply("mul", x, number(b, x, 0.5))
    one = number(b, x, 1)
    if approximate == "none":
        inner = b.apply("erf", b.apply("mul", x, number(b, x, math.sqrt(0.5))))
    else:
        cube = b.apply("mul", b.apply("mul", x, x), x)
        argument = b.apply("fma", number(b, x, 0.044715), cube, x)
        inner = b.apply("tanh", b.apply("mul", number(b, x, math.sqrt(2 / math.pi)), argument))
    return b.apply("mul", half, b.apply("add", one, inner))


def gelu_backward(b: B, grad: Expr, x: Expr, approximate: str) -> Expr:
    half, one = number(b, x, 0.5), number(b, x, 1)
    square = b.apply("mul", x, x)
    if approximate == "none":
        cdf = b.apply(
            "mul", half, b.apply("add", one, b.apply("erf", b.apply("mul", x, number(b, x, math.sqrt(0.5)))))
        )
        density = b.apply("exp", b.apply("mul", square, number(b, x, -0.5)))
        density = b.apply("mul", density, number(b, x, 1 / math.sqrt(2 * math.pi)))
        return b.apply("mul", grad, b.apply("fma", x, density, cdf))
    beta, kappa = number(b, x, math.sqrt(2 / math.pi)), 0.044715
    argument = b.apply("mul", beta, b.apply("fma", number(b, x, kappa), b.apply("mul", square, x), x))
    tanh = b.apply("tanh", argument)
    left = b.apply("mul", half, b.apply("add", one, tanh))
    slope = b.apply("mul", beta, b.apply("fma", number(b, x, 3 * kappa), square, one))
    bend = b.apply("sub", one, b.apply("mul", tanh, tanh))
    right = b.apply("mul", b.apply("mul", b.apply("mul", half, x), bend), slope)
    return b.apply("mul", grad, b.apply("add", left, right))


def silu(b: B, x: Expr) -> Expr:
    return b.apply("div", x, b.apply("add", number(b, x, 1), b.apply("exp", b.apply("neg", x))))


def silu_backward(b: B, grad: Expr, x: Expr) -> Expr:
    one, s = number(b, x, 1), b.apply("sigmoid", x)
    inner = b.apply("add", one, b.apply("mul", x, b.apply("sub", one, s)))
    return b.apply("mul", b.apply("mul", grad, s), inner)


def softplus_core(b: B, x: Expr) -> Expr:
    return b.apply("log1p", b.apply("exp", x))


def softplus(b: B, x: Expr, beta: float, threshold: float) -> Expr:
    scaled = b.apply("mul", x, number(b, x, beta))
    soft = b.apply("div", softplus_core(b, scaled), number(b, x, beta))
    return b.where(b.compare("gt", scaled, number(b, x, threshold)), x, soft)


def softplus_backward(b: B, grad: Expr, x: Expr, beta: float, threshold: float) -> Expr:
    scaled = b.apply("mul", x, number(b, x, beta))
    soft = b.apply("mul", grad, b.apply("sigmoid", scaled))
    return b.where(b.compare("gt", scaled, number(b, x, threshold)), grad, soft)


def leaky(b: B, x: Expr, negative_slope: float) -> Expr:
    zero = number(b, x, 0)
    return b.where(b.compare("gt", x, zero), x, b.apply("mul", x, number(b, x, negative_slope)))


def leaky_backward(b: B, grad: Expr, x: Expr, negative_slope: float) -> Expr:
    scaled = b.apply("mul", grad, number(b, x, negative_slope))
    return b.where(b.compare("gt", x, number(b, x, 0)), grad, scaled)


def elu(b: B, x: Expr, alpha: float, scale: float, input_scale: float) -> Expr:
    bent = b.apply("expm1", b.apply("mul", x, number(b, x, input_scale)))
    low = b.apply("mul", bent, number(b, x, alpha * scale))
    return b.where(b.compare("le", x, number(b, x, 0)), low, b.apply("mul", x, number(b, x, scale)))


def hardsigmoid(b: B, x: Expr) -> Expr:
    shifted = b.apply("add", x, number(b, x, 3))
    return b.apply(
        "div", b.apply("min", b.apply("max", shifted, number(b, x, 0)), number(b, x, 6)), number(b, x, 6)
    )


def hardswish(b: B, x: Expr) -> Expr:
    capped = b.apply(
        "min", b.apply("max", b.apply("add", x, number(b, x, 3)), number(b, x, 0)), number(b, x, 6)
    )
    return b.apply("div", b.apply("mul", x, capped), number(b, x, 6))


def hardswish_backward(b: B, grad: Expr, x: Expr) -> Expr:
    ramp = b.apply("mul", grad, b.apply("add", b.apply("div", x, number(b, x, 3)), number(b, x, 0.5)))
    inner = b.where(b.compare("ge", x, number(b, x, 3)), grad, ramp)
    return b.where(b.compare("le", x, number(b, x, -3)), number(b, x, 0), inner)


def inside(b: B, grad: Expr, x: Expr, low: float, high: float) -> Expr:
    within = b.apply("and", b.compare("gt", x, number(b, x, low)), b.compare("lt", x, number(b, x, high)))
    return b.where(within, grad, number(b, grad, 0))


def hardsigmoid_backward(b: B, grad: Expr, x: Expr) -> Expr:
    inside = b.apply("and", b.compare("gt", x, number(b, x, -3)), b.compare("lt", x, number(b, x, 3)))
    return b.where(inside, b.apply("mul", grad, number(b, x, 1 / 6)), number(b, x, 0))


def threshold(b: B, x: Expr, threshold: float, value: float) -> Expr:
    return b.where(b.compare("le", x, number(b, x, threshold)), number(b, x, value), x)


def threshold_backward(b: B, grad: Expr, x: Expr, threshold: float) -> Expr:
    return b.where(b.compare("le", x, number(b, x, threshold)), number(b, grad, 0), grad)


def sigmoid_backward(b: B, grad: Expr, out: Expr) -> Expr:
    one = number(b, out, 1)
    return b.apply("mul", b.apply("mul", grad, b.apply("sub", one, out)), out)


def tanh_backward(b: B, grad: Expr, out: Expr) -> Expr:
    return b.apply("mul", grad, b.apply("sub", number(b, out, 1), b.apply("mul", out, out)))
