"""Terms: what a rule says, as data, and their one written form.

Problem.  A rule has to be readable as the law that it is, checked when it is defined, matched on graphs and
evaluated on numbers by tests.

Method.  A term is a variable, a number or an operator on terms; equal terms are one value, so a term that
occurs twice is computed once.  The written form is arithmetic:

    a*c + a*b                 recip(a) * recip(a*b)                 exp(sum(a))

Reductions run over whatever axes the matched operator runs over, with its `keepdim`; all reductions of
one rule share them.  `shl` (bit shift to the left) likewise shares its amount.

Not done here: shapes, costs, graphs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "ADDITIVE",
    "COMMUTATIVE",
    "OPERATORS",
    "REDUCTIONS",
    "Apply",
    "Number",
    "Term",
    "Var",
    "parse_term",
    "print_term",
    "subterms",
    "variables",
]

REDUCTIONS = frozenset({"sum", "mean", "prod", "amax", "amin"})
UNARY = frozenset(
    {"neg", "abs", "recip", "sqrt", "rsqrt", "square", "exp", "log", "relu", "shl", *REDUCTIONS}
)
BINARY = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})
OPERATORS = UNARY | BINARY
COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum"})
"""Operators that are commutative and associative: their chains are matched as multisets."""
ADDITIVE = frozenset({"add", "sub", "neg", "sum", "mean"})

_INFIX = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_SIGN = {"add": " + ", "sub": " - ", "mul": "*", "div": "/"}
_LEVEL = {"add": 1, "sub": 1, "mul": 2, "div": 2}


@dataclass(frozen=True, slots=True)
class Var:
    """Any value; every occurrence is the same one."""

    name: str


@dataclass(frozen=True, slots=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator of `OPERATORS` on terms."""

    op: str
    args: tuple[Term, ...]


Term = Var | Number | Apply


def parse_term(text: str) -> Term:
    """The term that `text` writes; raises ValueError for what is no term."""
    try:
        return _parsed(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no term") from error


def _parsed(node: ast.expr) -> Term:
    match node:
        case ast.Name(id=name):
            return Var(name)
        case ast.Constant(value=int() | float() as value):
            return Number(float(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return Apply("neg", (_parsed(operand),))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _INFIX:
            return Apply(_INFIX[type(op)], (_parsed(left), _parsed(right)))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _applied(name, tuple(_parsed(arg) for arg in args))
    raise ValueError(f"{ast.unparse(node)!r} is no term")


def _applied(op: str, args: tuple[Term, ...]) -> Term:
    need = 1 if op in UNARY else 2
    if op not in OPERATORS or len(args) != need:
        raise ValueError(f"no operator {op!r} takes {len(args)} operands")
    return Apply(op, args)


def print_term(term: Term) -> str:
    """The written form; `parse_term` reads it back."""
    return _printed(term, 0)


def _printed(term: Term, level: int) -> str:
    if isinstance(term, Var):
        return term.name
    if isinstance(term, Number):
        return f"{term.value:g}"
    if term.op in _SIGN:
        own = _LEVEL[term.op]
        text = _printed(term.args[0], own) + _SIGN[term.op] + _printed(term.args[1], own + 1)
        return f"({text})" if own < level else text
    if term.op == "neg":
        return "-" + _printed(term.args[0], 3)
    return f"{term.op}({', '.join(_printed(arg, 0) for arg in term.args)})"


def subterms(term: Term) -> Iterator[Term]:
    """Every distinct subterm, operands first."""
    seen: set[Term] = set()
    stack = [(term, False)]
    while stack:
        top, ready = stack.pop()
        if top in seen:
            continue
        if ready or not isinstance(top, Apply):
            seen.add(top)
            yield top
        else:
            stack.append((top, True))
            stack.extend((arg, False) for arg in reversed(top.args))


def variables(term: Term) -> tuple[str, ...]:
    """Names of the variables, in the order of their first occurrence."""
    return tuple(each.name for each in subterms(term) if isinstance(each, Var))
