"""C text of types, indices and single scalar operations.

Problem.  Everything that the generated code says about one element, separate from how it loops.

Method.  Data: a template per operation and class of type (float, integer, bool).  Comparisons against a
constant use the two-operand forms that become one instruction.

Not done here: loops, scopes, scratch memory (`c`).
"""

from __future__ import annotations

import math

import torch

from lowtide.fusion.codegen.expr import Expr
from lowtide.fusion.codegen.index import Index, Quotient, Var
from lowtide.fusion.codegen.tensor import Unfusable

__all__ = ["compute_type", "index_text", "load_text", "memory_type", "operation_text", "store_text"]

_MEMORY = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "uint16_t",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "uint8_t",
}

_ANY = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "neg": "(-{0})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})",
    "le": "({0} <= {1})", "gt": "({0} > {1})", "ge": "({0} >= {1})",
    "where": "({0} ? {1} : {2})", "max": "lt_max({0}, {1})", "min": "lt_min({0}, {1})",
    "fmax": "lt_fmax({0}, {1})", "fmin": "lt_fmin({0}, {1})", "sign": "lt_sign({0})",
    "round_bf16": "lt_round({0})", "fma": "lt_fma({0}, {1}, {2})",
    "exp": "lt_exp({0})", "log": "lt_log({0})", "tanh": "lt_tanh({0})", "erf": "lt_erf({0})",
    "sigmoid": "lt_sigmoid({0})", "div": "({0} / {1})",
}  # fmt: skip
_FLOAT = {
    "abs": "std::fabs({0})", "floor": "std::floor({0})", "ceil": "std::ceil({0})", "trunc": "std::trunc({0})",
    "round": "std::nearbyint({0})", "copysign": "std::copysign({0}, {1})", "sqrt": "std::sqrt({0})",
    "floordiv": "lt_floordiv_f({0}, {1})", "remainder": "lt_rem_f({0}, {1})", "fmod": "std::fmod({0}, {1})",
    "pow": "std::pow({0}, {1})", "atan2": "std::atan2({0}, {1})",
    **{
        name: f"std::{name}({{0}})"
        for name in ("exp2", "expm1", "log2", "log10", "log1p", "erfc", "sin", "cos", "tan",
                     "asin", "acos", "atan", "sinh", "cosh")
    },
}  # fmt: skip
_INTEGER = {
    "abs": "({0} < 0 ? -{0} : {0})", "floor": "{0}", "ceil": "{0}", "trunc": "{0}", "round": "{0}",
    "floordiv": "lt_floordiv_i({0}, {1})", "truncdiv": "({0} / {1})",
    "remainder": "lt_rem_i({0}, {1})", "fmod": "({0} % {1})",
    "bitand": "({0} & {1})", "bitor": "({0} | {1})", "bitxor": "({0} ^ {1})", "bitnot": "(~{0})",
    "pow": "lt_ipow({0}, {1})", "checked": "lt_row({0}, {1}, bad)",
}  # fmt: skip
_BOOL = {"and": "({0} & {1})", "or": "({0} | {1})", "xor": "({0} != {1})", "not": "(!{0})"}
_DIVIDES = frozenset({"floordiv", "truncdiv", "remainder", "fmod"})
_CONSTANT_SIDE = {"max": "lt_floor_c({0}, {1})", "min": "lt_ceil_c({0}, {1})"}


def memory_type(dtype: torch.dtype) -> str:
    """The C type of one stored element."""
    return _MEMORY[dtype]


def compute_type(dtype: torch.dtype) -> str:
    """The C type of an expression."""
    return "bool" if dtype == torch.bool else _MEMORY[dtype]


def index_text(index: Index) -> str:
    """An index as a C expression over its variables' names."""
    parts = [_term(atom, c) for atom, c in index.terms]
    if index.constant or not parts:
        parts.append(str(index.constant))
    return " + ".join(parts)


def _term(atom: object, coefficient: int) -> str:
    if isinstance(atom, Var):
        text = atom.name
    else:
        sign = "/" if isinstance(atom, Quotient) else "%"
        text = f"(({index_text(atom.index)}) {sign} {atom.divisor})"  # type: ignore[attr-defined]
    return text if coefficient == 1 else f"{text} * {coefficient}"


def load_text(node: Expr, row: str) -> str:
    """``buffer[index]`` widened; `row` is the name of a data-dependent position, if it has one."""
    leaf = node.leaf
    assert leaf is not None and leaf.stored is not None
    place = index_text(leaf.index)
    if node.args:
        place += f" + lt_row({row}, {leaf.bound}, bad) * {leaf.stride}"
    text = f"{leaf.source}[{place}]"
    if leaf.stored == torch.bfloat16:
        return f"lt_wide({text})"
    return f"({text} != 0)" if leaf.stored == torch.bool else text


def store_text(value: str, dtype: torch.dtype) -> str:
    """An expression's value as it is stored."""
    return f"lt_narrow({value})" if dtype == torch.bfloat16 else value


def const_text(value: float | int | bool, dtype: torch.dtype) -> str:
    """A constant of the compute type `dtype`."""
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        number = int(value)
        text = f"INT64_C({number})" if number != -(2**63) else "INT64_MIN"
        return text if dtype == torch.int64 else f"({_MEMORY[dtype]}){text}"
    return _float_text(float(value), dtype)


def _float_text(number: float, dtype: torch.dtype) -> str:
    suffix = "f" if dtype == torch.float32 else ""
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    if dtype == torch.float32:
        return _float32_text(number)
    return f"({number.hex()})" if number < 0 else number.hex()


def _float32_text(number: float) -> str:
    rounded = float(torch.tensor(number, dtype=torch.float64).float().item())
    if math.isinf(rounded):
        return f"{'-' if rounded < 0 else ''}__builtin_inff()"
    text = f"{rounded.hex()}f"
    return f"({text})" if text.startswith("-") else text


def operation_text(node: Expr, args: list[str]) -> str:
    """One operation applied to the names of its arguments."""
    leaf = node.leaf
    if node.op == "const":
        assert leaf is not None
        return const_text(leaf.value, node.dtype)
    if node.op == "scalar":
        assert leaf is not None
        return f"sc[{leaf.value}]"
    if node.op == "index":
        assert leaf is not None
        return f"(int64_t)({index_text(leaf.index)})"
    if node.op == "cast":
        return f"({compute_type(node.dtype)}){args[0]}"
    text = _template(node).format(*args)
    narrow = node.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)
    return f"({_MEMORY[node.dtype]}){text}" if narrow else text


def _template(node: Expr) -> str:
    inner = node.args[0].dtype
    if node.op in _CONSTANT_SIDE and node.dtype.is_floating_point and _plain_constant(node.args[1]):
        return _CONSTANT_SIDE[node.op]
    if inner == torch.bool and node.op in _BOOL:
        return _BOOL[node.op]
    if inner.is_floating_point and node.op in _FLOAT:
        return _FLOAT[node.op]
    if not inner.is_floating_point and node.op in _INTEGER:
        if node.op in _DIVIDES and not _nonzero_constant(node.args[1]):
            raise Unfusable("an integer division whose divisor may be zero")
        return _INTEGER[node.op]
    if node.op in _ANY and (inner.is_floating_point or node.op not in ("div", "exp", "log", "tanh", "erf")):
        return _ANY[node.op]
    raise Unfusable(f"{node.op} of {inner} has no C template")


def _plain_constant(node: Expr) -> bool:
    return node.leaf is not None and node.leaf.kind == "const" and not math.isnan(node.leaf.value)


def _nonzero_constant(node: Expr) -> bool:
    return node.leaf is not None and node.leaf.kind == "const" and node.leaf.value not in (0, -1)
