"""Between ATen calls and the operators of terms: `read_call` and `spell_call`.

Problem.  ATen writes ``a * 0.5``, ``a * b`` and ``b / a`` in many overloads; rules know one name each.

Method.  `read_call` gives (operator, operands, attribute) for calls whose meaning is exactly that of a
term's operator, and None for all others (`alpha`, rounding modes, another accumulation type): those are
where the graph is cut.  `spell_call` is the way back.  An operand is an input position or a number.

Invariant.  ``spell_call(read_call(x))`` computes what x computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Arg, Aten, Ref
from lowtide.transforms.rewriting.term import REDUCTIONS

__all__ = ["Axes", "Call", "Operand", "read_call", "spell_call"]

Operand = Ref | float
"""An input of the node, or a number."""


@dataclass(frozen=True, slots=True)
class Axes:
    """What a reduction runs over: sorted axes of an operand of `rank`, with their sizes."""

    axes: tuple[int, ...]
    keepdim: bool
    rank: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A term's operator on operands; `attribute` is the Axes of a reduction, the amount of a shift."""

    op: str
    operands: tuple[Operand, ...]
    attribute: Axes | int | None = None


_UNARY = {
    "aten.neg.default": "neg",
    "aten.abs.default": "abs",
    "aten.reciprocal.default": "recip",
    "aten.sqrt.default": "sqrt",
    "aten.rsqrt.default": "rsqrt",
    "aten.exp.default": "exp",
    "aten.log.default": "log",
    "aten.relu.default": "relu",
    "aten.square.default": "square",
}
_BINARY = {
    **{f"aten.add.{form}": "add" for form in ("Tensor", "Scalar")},
    **{f"aten.sub.{form}": "sub" for form in ("Tensor", "Scalar")},
    **{f"aten.mul.{form}": "mul" for form in ("Tensor", "Scalar")},
    **{f"aten.div.{form}": "div" for form in ("Tensor", "Scalar")},
    "aten.maximum.default": "maximum",
    "aten.minimum.default": "minimum",
}
_SHIFTS = ("aten.__lshift__.Scalar", "aten.bitwise_left_shift.Tensor_Scalar")
_POWERS = {2.0: "square", 0.5: "sqrt", -1.0: "recip", -0.5: "rsqrt"}
_REDUCTIONS = {
    "aten.sum.default": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.mean.default": "mean",
    "aten.mean.dim": "mean",
    "aten.prod.default": "prod",
    "aten.prod.dim_int": "prod",
    "aten.amax.default": "amax",
    "aten.amin.default": "amin",
}


def read_call(op: Aten, metas: Sequence[TensorMeta]) -> Call | None:
    """What `op` on inputs of `metas` is as a term's operator; None if it is none."""
    if op.kwargs:
        return None
    if op.overload in _UNARY and len(op.args) == 1:
        return Call(_UNARY[op.overload], (Ref(0),))
    if op.overload in _BINARY and len(op.args) == 2:
        return _binary(_BINARY[op.overload], op.args[0], op.args[1])
    if op.overload in ("aten.rsub.Scalar", "aten.rsub.Tensor") and len(op.args) == 2:
        return _binary("sub", op.args[1], op.args[0])
    if op.overload == "aten.pow.Tensor_Scalar":
        return _power(op.args[1])
    if op.overload in _SHIFTS and isinstance(op.args[1], int):
        return Call("shl", (Ref(0),), op.args[1])
    if op.overload in _REDUCTIONS:
        return _reduction(_REDUCTIONS[op.overload], op.args, metas[0].shape)
    return None


def _binary(name: str, left: Arg, right: Arg) -> Call | None:
    operands = (_operand(left), _operand(right))
    if operands[0] is None or operands[1] is None:
        return None
    return Call(name, (operands[0], operands[1]))


def _operand(arg: Arg) -> Operand | None:
    if isinstance(arg, Ref):
        return arg
    return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else None


def _power(exponent: Arg) -> Call | None:
    if not isinstance(exponent, int | float) or float(exponent) not in _POWERS:
        return None
    return Call(_POWERS[float(exponent)], (Ref(0),))


def _reduction(name: str, args: Sequence[Arg], shape: tuple[int, ...]) -> Call | None:
    """A reduction with its axes; no axes means all of them."""
    given = args[1] if len(args) > 1 else ()
    listed = given if isinstance(given, tuple) else (given,)
    rank = len(shape)
    axes = tuple(sorted({axis % rank for axis in listed if isinstance(axis, int)})) if rank else ()
    keepdim = args[2] if len(args) > 2 else False
    if len(args) > 3 or not isinstance(keepdim, bool) or any(not isinstance(a, int) for a in listed if a):
        return None
    if not rank or any(each is None for each in listed):
        return None
    axes = axes or tuple(range(rank))
    return Call(name, (Ref(0),), Axes(axes, keepdim, rank, tuple(shape[a] for a in axes)))


_SPELLED_UNARY = {name: overload for overload, name in _UNARY.items() if name != "square"}
_NUMBER_FORMS = {"add", "sub", "mul", "div"}


def spell_call(call: Call) -> Aten | None:
    """The ATen call; None if there is none (two numbers, a product over several axes)."""
    if call.op == "shl":
        assert isinstance(call.attribute, int)
        return Aten("aten.__lshift__.Scalar", (Ref(0), call.attribute))
    if call.op in REDUCTIONS:
        assert isinstance(call.attribute, Axes)
        return _spell_reduction(call.op, call.attribute)
    if call.op == "square":
        return Aten("aten.pow.Tensor_Scalar", (Ref(0), 2))
    if call.op in _SPELLED_UNARY:
        return Aten(_SPELLED_UNARY[call.op], call.operands)
    return _spell_binary(call.op, *call.operands)


def _spell_binary(name: str, left: Operand, right: Operand) -> Aten | None:
    if name in ("maximum", "minimum"):
        pair = isinstance(left, Ref) and isinstance(right, Ref)
        return Aten(f"aten.{name}.default", (left, right)) if pair else None
    if isinstance(left, Ref):
        return Aten(f"aten.{name}.Tensor", (left, right))
    if not isinstance(right, Ref):
        return None
    if name in ("add", "mul"):
        return Aten(f"aten.{name}.Tensor", (right, left))
    return Aten("aten.rsub.Scalar", (right, left)) if name == "sub" else None


def _spell_reduction(name: str, over: Axes) -> Aten | None:
    if name == "prod":
        if len(over.axes) != 1:
            return None
        return Aten("aten.prod.dim_int", (Ref(0), over.axes[0], over.keepdim))
    overload = {"sum": "aten.sum.dim_IntList", "mean": "aten.mean.dim"}.get(name, f"aten.{name}.default")
    return Aten(overload, (Ref(0), over.axes, over.keepdim))
