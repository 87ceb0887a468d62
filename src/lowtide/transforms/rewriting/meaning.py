"""What a term means: its value on tensors, as ATen computes it.

The search for rules (`bench/rule_search.py`) and the tests of rules judge by this, not by the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lowtide.transforms.rewriting.term import Number, Term, Var

__all__ = ["evaluate"]


def evaluate(
    term: Term, operands: Mapping[str, Tensor], axes: tuple[int, ...] = (-1,), amount: int = 3
) -> Tensor:
    """The value of `term`; reductions run over `axes` and keep them, shifts go by `amount`."""
    known: dict[Term, Tensor | float] = {}

    def value(each: Term) -> Tensor | float:
        if each not in known:
            known[each] = _value(each)
        return known[each]

    def _value(each: Term) -> Tensor | float:
        if isinstance(each, Var):
            return operands[each.name]
        if isinstance(each, Number):
            return each.value
        args = [value(arg) for arg in each.args]
        if each.op == "shl":
            assert isinstance(args[0], Tensor)
            return torch.bitwise_left_shift(args[0], amount)
        if each.op in _REDUCTIONS:
            assert isinstance(args[0], Tensor)
            return _REDUCTIONS[each.op](args[0], axes)
        return _OPERATORS[each.op](*args)

    found = value(term)
    return found if isinstance(found, Tensor) else torch.tensor(found, dtype=_dtype(operands))


def _dtype(operands: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(operands.values())).dtype if operands else torch.float64


def _product(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "sum": lambda x, axes: x.sum(axes, keepdim=True),
    "mean": lambda x, axes: x.mean(axes, keepdim=True),
    "prod": _product,
    "amax": lambda x, axes: x.amax(axes, keepdim=True),
    "amin": lambda x, axes: x.amin(axes, keepdim=True),
}
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "neg": lambda a: -a,
    "abs": torch.abs,
    "recip": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
    "exp": torch.exp,
    "log": torch.log,
    "relu": torch.relu,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
