"""The table of element-wise operators: what each computes, in ATen's own order of rounding.

Problem.  A fused element-wise kernel should give eager's bits, so each entry has to know how ATen's CPU
kernel computes: in which type (promotion), in which order, and where it contracts a multiply and an add.

Method.  Data: overload -> `Pointwise(kind, operands, params, emit)`.  `kind` is the promotion: *default*
(compute in the result's type), *float* (integers become floating point; the result's type says which),
*compare* (promote the operands, result bool), *logic* (operands as bool), *mixed* (operands keep their
own types).  Measured on torch 2.13: ``add(alpha=)``, ``sub(alpha=)``, ``lerp`` and ``addcmul`` (it is
``fma(v*a, b, x)``) end in one FMA; ``addcdiv`` is ``x + (v*a)/b`` without.

Not done here: complex numbers, float16, operators that draw random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.fusion.codegen import activations as act
from lowtide.fusion.codegen.activations import number
from lowtide.fusion.codegen.expr import Builder, Expr

__all__ = ["POINTWISE", "Pointwise"]

B = Builder


@dataclass(frozen=True)
class Pointwise:
    """How an element of the result follows from elements of the operands.

    `operands` names the schema arguments that become expressions, `params` those passed as they are.
    """

    kind: str
    operands: tuple[str, ...]
    emit: Callable[..., Expr]
    params: tuple[str, ...] = ()


def _unary(op: str, kind: str = "float") -> Pointwise:
    return Pointwise(kind, ("self",), lambda b, x: b.apply(op, x))


def _binary(op: str, kind: str = "default", other: str = "other") -> Pointwise:
    return Pointwise(kind, ("self", other), lambda b, x, y: b.apply(op, x, y))


def _compare(op: str) -> Pointwise:
    return Pointwise("compare", ("self", "other"), lambda b, x, y: b.compare(op, x, y))


def _logic(op: str) -> Pointwise:
    return Pointwise("logic", ("self", "other"), lambda b, x, y: b.apply(op, x, y))


def _scaled(op: str, x: Expr, y: Expr, alpha: Any, b: B) -> Expr:
    """``x + alpha * y`` as ATen rounds it: one FMA for floating point."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return b.apply("or" if x.dtype == torch.bool else op, x, y)
    factor = b.cast(alpha, x.dtype) if isinstance(alpha, Expr) else number(b, x, alpha)
    if not x.dtype.is_floating_point:
        return b.apply(op, x, b.apply("mul", factor, y))
    return b.apply("fma", b.apply("neg", factor) if op == "sub" else factor, y, x)


def _add(b: B, x: Expr, y: Expr, alpha: Any) -> Expr:
    return _scaled("add", x, y, alpha, b)


def _sub(b: B, x: Expr, y: Expr, alpha: Any) -> Expr:
    return _scaled("sub", x, y, alpha, b)


def _rsub(b: B, x: Expr, y: Expr, alpha: Any) -> Expr:
    return _scaled("sub", y, x, alpha, b)


def _mul(b: B, x: Expr, y: Expr) -> Expr:
    return b.apply("and" if x.dtype == torch.bool else "mul", x, y)


def _div_mode(b: B, x: Expr, y: Expr, rounding_mode: str | None) -> Expr:
    if rounding_mode is None:
        return b.apply("div", x, y)
    if rounding_mode == "floor":
        return b.apply("floordiv", x, y)
    if x.dtype.is_floating_point:
        return b.apply("trunc", b.apply("div", x, y))
    return b.apply("truncdiv", x, y)


def _relu(b: B, x: Expr) -> Expr:
    return b.apply("max", x, number(b, x, 0))


def _clamp(b: B, x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    if low is not None:
        x = b.apply("max", x, b.cast(low, x.dtype))
    return x if high is None else b.apply("min", x, b.cast(high, x.dtype))


def _clamp_number(b: B, x: Expr, min: Any = None, max: Any = None) -> Expr:
    low = None if min is None else b.const(min, x.dtype)
    return _clamp(b, x, low, None if max is None else b.const(max, x.dtype))


def _hardtanh(b: B, x: Expr, min_val: float, max_val: float) -> Expr:
    return _clamp_number(b, x, min_val, max_val)


def _hardtanh_backward(b: B, grad: Expr, x: Expr, min_val: float, max_val: float) -> Expr:
    return act.inside(b, grad, x, min_val, max_val)


def _lerp(b: B, x: Expr, end: Expr, weight: Expr) -> Expr:
    """ATen's two-sided formula, each side one FMA."""
    weight = b.cast(weight, x.dtype)
    gap = b.apply("sub", end, x)
    near = b.apply("fma", weight, gap, x)
    far = b.apply("fma", b.apply("sub", weight, number(b, x, 1)), gap, end)
    small = b.compare("lt", b.apply("abs", weight), number(b, x, 0.5))
    return b.where(small, near, far)


def _addcmul(b: B, x: Expr, one: Expr, two: Expr, value: Any) -> Expr:
    if x.dtype.is_floating_point:
        return b.apply("fma", _times(b, one, value), two, x)
    return b.apply("add", x, b.apply("mul", _times(b, one, value), two))


def _addcdiv(b: B, x: Expr, one: Expr, two: Expr, value: Any) -> Expr:
    return b.apply("add", x, b.apply("div", _times(b, one, value), two))


def _times(b: B, x: Expr, value: Any) -> Expr:
    factor = b.cast(value, x.dtype) if isinstance(value, Expr) else number(b, x, value)
    return b.apply("mul", factor, x)


def _pow_number(b: B, x: Expr, exponent: Any) -> Expr:
    if isinstance(exponent, Expr) or not isinstance(exponent, (int, float)):
        return b.apply("pow", x, b.cast(exponent, x.dtype))
    if exponent == 2:
        return b.apply("mul", x, x)
    if exponent == 3:
        return b.apply("mul", b.apply("mul", x, x), x)
    if x.dtype.is_floating_point:
        reciprocal = {-1: x, -2: b.apply("mul", x, x), -0.5: b.apply("sqrt", x)}.get(exponent)
        if reciprocal is not None:
            return b.apply("div", number(b, x, 1), reciprocal)
        if exponent == 0.5:
            return b.apply("sqrt", x)
    return b.apply("pow", x, number(b, x, exponent))


def _reciprocal(b: B, x: Expr) -> Expr:
    return b.apply("div", number(b, x, 1), x)


def _rsqrt(b: B, x: Expr) -> Expr:
    return b.apply("div", number(b, x, 1), b.apply("sqrt", x))


def _sign(b: B, x: Expr) -> Expr:
    return b.apply("sign", x)


def _not_zero(b: B, x: Expr) -> Expr:
    return b.apply("not", b.cast(x, torch.bool))


def _bitwise_not(b: B, x: Expr) -> Expr:
    return b.apply("not" if x.dtype == torch.bool else "bitnot", x)


def _bitwise(op: str) -> Pointwise:
    def emit(b: B, x: Expr, y: Expr) -> Expr:
        return b.apply(op if x.dtype == torch.bool else f"bit{op}", x, y)

    return Pointwise("default", ("self", "other"), emit)


def _dropout_backward(b: B, grad: Expr, mask: Expr, scale: float) -> Expr:
    kept = b.apply("mul", b.cast(mask, grad.dtype), grad)
    return b.apply("mul", kept, number(b, grad, scale))


def _masked(b: B, x: Expr, mask: Expr, value: Expr) -> Expr:
    return b.where(b.cast(mask, torch.bool), b.cast(value, x.dtype), x)


def _where(b: B, condition: Expr, x: Expr, y: Expr) -> Expr:
    return b.where(b.cast(condition, torch.bool), x, y)


def _isinf(b: B, x: Expr) -> Expr:
    if not x.dtype.is_floating_point:
        return b.const(False, torch.bool)
    return b.compare("eq", b.apply("abs", x), number(b, x, math.inf))


def _isnan(b: B, x: Expr) -> Expr:
    return b.compare("ne", x, x)


def _identity(b: B, x: Expr) -> Expr:
    return x


def _second(b: B, x: Expr, y: Expr) -> Expr:
    return y


SELF, PAIR = ("self",), ("self", "other")
_ALPHA = ("alpha",)
_BACK = ("grad_output", "self")
_SOFT = ("beta", "threshold")

POINTWISE: dict[str, Pointwise] = {
    "aten.add.Tensor": Pointwise("default", PAIR, _add, _ALPHA),
    "aten.add.Scalar": Pointwise("default", PAIR, _add, _ALPHA),
    "aten.sub.Tensor": Pointwise("default", PAIR, _sub, _ALPHA),
    "aten.sub.Scalar": Pointwise("default", PAIR, _sub, _ALPHA),
    "aten.rsub.Tensor": Pointwise("default", PAIR, _rsub, _ALPHA),
    "aten.rsub.Scalar": Pointwise("default", PAIR, _rsub, _ALPHA),
    "aten.mul.Tensor": Pointwise("default", PAIR, _mul),
    "aten.mul.Scalar": Pointwise("default", PAIR, _mul),
    "aten.div.Tensor": _binary("div", "float"),
    "aten.div.Scalar": _binary("div", "float"),
    "aten.div.Tensor_mode": Pointwise("default", PAIR, _div_mode, ("rounding_mode",)),
    "aten.div.Scalar_mode": Pointwise("default", PAIR, _div_mode, ("rounding_mode",)),
    "aten.floor_divide.default": _binary("floordiv"),
    "aten.remainder.Tensor": _binary("remainder"),
    "aten.remainder.Scalar": _binary("remainder"),
    "aten.fmod.Tensor": _binary("fmod"),
    "aten.fmod.Scalar": _binary("fmod"),
    "aten.maximum.default": _binary("max"),
    "aten.minimum.default": _binary("min"),
    "aten.fmax.default": _binary("fmax"),
    "aten.fmin.default": _binary("fmin"),
    "aten.atan2.default": _binary("atan2", "float"),
    "aten.copysign.Tensor": _binary("copysign", "float"),
    "aten.pow.Tensor_Tensor": _binary("pow", other="exponent"),
    "aten.pow.Tensor_Scalar": Pointwise("default", SELF, _pow_number, ("exponent",)),
    "aten.pow.Scalar": _binary("pow", other="exponent"),
    "aten.eq.Tensor": _compare("eq"),
    "aten.eq.Scalar": _compare("eq"),
    "aten.ne.Tensor": _compare("ne"),
    "aten.ne.Scalar": _compare("ne"),
    "aten.lt.Tensor": _compare("lt"),
    "aten.lt.Scalar": _compare("lt"),
    "aten.le.Tensor": _compare("le"),
    "aten.le.Scalar": _compare("le"),
    "aten.gt.Tensor": _compare("gt"),
    "aten.gt.Scalar": _compare("gt"),
    "aten.ge.Tensor": _compare("ge"),
    "aten.ge.Scalar": _compare("ge"),
    "aten.logical_and.default": _logic("and"),
    "aten.logical_or.default": _logic("or"),
    "aten.logical_xor.default": _logic("xor"),
    "aten.logical_not.default": Pointwise("mixed", SELF, _not_zero),
    "aten.bitwise_and.Tensor": _bitwise("and"),
    "aten.bitwise_and.Scalar": _bitwise("and"),
    "aten.bitwise_or.Tensor": _bitwise("or"),
    "aten.bitwise_or.Scalar": _bitwise("or"),
    "aten.bitwise_xor.Tensor": _bitwise("xor"),
    "aten.bitwise_xor.Scalar": _bitwise("xor"),
    "aten.bitwise_not.default": Pointwise("default", SELF, _bitwise_not),
    "aten.isnan.default": Pointwise("mixed", SELF, _isnan),
    "aten.isinf.default": Pointwise("mixed", SELF, _isinf),
    "aten.abs.default": _unary("abs", "default"),
    "aten.neg.default": _unary("neg", "default"),
    "aten.sign.default": Pointwise("default", SELF, _sign),
    "aten.sgn.default": Pointwise("default", SELF, _sign),
    "aten.floor.default": _unary("floor", "default"),
    "aten.ceil.default": _unary("ceil", "default"),
    "aten.trunc.default": _unary("trunc", "default"),
    "aten.round.default": _unary("round", "default"),
    "aten.reciprocal.default": Pointwise("float", SELF, _reciprocal),
    "aten.rsqrt.default": Pointwise("float", SELF, _rsqrt),
    "aten.square.default": Pointwise("default", SELF, lambda b, x: b.apply("mul", x, x)),
    "aten.relu.default": Pointwise("default", SELF, _relu),
    "aten.relu6.default": Pointwise("default", SELF, lambda b, x: _clamp_number(b, x, 0, 6)),
    "aten.hardtanh.default": Pointwise(
        "default", SELF, _hardtanh, ("min_val", "max_val")
    ),
    "aten.clamp.default": Pointwise("default", SELF, _clamp_number, ("min", "max")),
    "aten.clamp.Tensor": Pointwise("default", ("self", "min", "max"), _clamp),
    "aten.clamp_min.default": Pointwise("default", SELF, _clamp_number, ("min",)),
    "aten.clamp_max.default": Pointwise("default", SELF, _clamp_number, ("max",)),
    "aten.gelu.default": Pointwise("default", SELF, act.gelu, ("approximate",)),
    "aten.silu.default": Pointwise("default", SELF, act.silu),
    "aten.softplus.default": Pointwise("default", SELF, act.softplus, _SOFT),
    "aten.leaky_relu.default": Pointwise("default", SELF, act.leaky, ("negative_slope",)),
    "aten.elu.default": Pointwise("default", SELF, act.elu, ("alpha", "scale", "input_scale")),
    "aten.hardsigmoid.default": Pointwise("default", SELF, act.hardsigmoid),
    "aten.hardswish.default": Pointwise("default", SELF, act.hardswish),
    "aten.threshold.default": Pointwise("default", SELF, act.threshold, ("threshold", "value")),
    "aten.gelu_backward.default": Pointwise("default", _BACK, act.gelu_backward, ("approximate",)),
    "aten.silu_backward.default": Pointwise("default", _BACK, act.silu_backward),
    "aten.softplus_backward.default": Pointwise("default", _BACK, act.softplus_backward, _SOFT),
    "aten.leaky_relu_backward.default": Pointwise("default", _BACK, act.leaky_backward, ("negative_slope",)),
    "aten.hardswish_backward.default": Pointwise("default", _BACK, act.hardswish_backward),
    "aten.hardsigmoid_backward.default": Pointwise("default", _BACK, act.hardsigmoid_backward),
    "aten.hardtanh_backward.default": Pointwise(
        "default", _BACK, _hardtanh_backward, ("min_val", "max_val")
    ),
    "aten.threshold_backward.default": Pointwise("default", _BACK, act.threshold_backward, ("threshold",)),
    "aten.sigmoid_backward.default": Pointwise("default", ("grad_output", "output"), act.sigmoid_backward),
    "aten.tanh_backward.default": Pointwise("default", ("grad_output", "output"), act.tanh_backward),
    "aten.native_dropout_backward.default": Pointwise(
        "mixed", ("grad_output", "mask"), _dropout_backward, ("scale",)
    ),
    "aten.where.self": Pointwise("default", ("condition", "self", "other"), _where),
    "aten.where.ScalarSelf": Pointwise("default", ("condition", "self", "other"), _where),
    "aten.where.ScalarOther": Pointwise("default", ("condition", "self", "other"), _where),
    "aten.masked_fill.Scalar": Pointwise("default", ("self", "mask", "value"), _masked),
    "aten.masked_fill.Tensor": Pointwise("default", ("self", "mask", "value"), _masked),
    "aten.lerp.Scalar": Pointwise("default", ("self", "end", "weight"), _lerp),
    "aten.lerp.Tensor": Pointwise("default", ("self", "end", "weight"), _lerp),
    "aten.addcmul.default": Pointwise("default", ("self", "tensor1", "tensor2"), _addcmul, ("value",)),
    "aten.addcdiv.default": Pointwise("default", ("self", "tensor1", "tensor2"), _addcdiv, ("value",)),
    "aten.clone.default": Pointwise("default", SELF, _identity),
    "aten._to_copy.default": Pointwise("default", SELF, _identity),
    "aten.lift_fresh_copy.default": Pointwise("default", SELF, _identity),
    "aten.contiguous.default": Pointwise("default", SELF, _identity),
    "prims.convert_element_type.default": Pointwise("default", ("a",), _identity),
    "aten.copy.default": Pointwise("default", ("self", "src"), _second),
    **{
        f"aten.{name}.default": _unary(name)
        for name in (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "tanh", "sigmoid", "erf", "erfc",
            "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
        )
    },
}  # fmt: skip
