"""Scalar expressions: what one element of a fused kernel computes.

Problem.  DNNFusion builds a data-flow tree per block and has to find common sub-trees, so that a value
read by two consumers is computed once (section 4.4 there).

Method.  Expressions are hash-consed: a `Builder` interns every node, so equal sub-trees *are* the same
object and a tree is a DAG by construction.  Leaves are constants, host scalars, loop indices, loads
``buffer[index]`` and the results of reductions; everything else is an operation of `SCALAR_COST`.

Invariants.  bfloat16 exists only in memory: a load widens to float32, and `Builder.narrow` rounds where
ATen would have stored a bfloat16.  An expression's dtype is one of float32, float64, integers, bool.
Not done here: float16 and complex numbers (their operators are not fused).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from lowtide.fusion.codegen.index import ZERO, Index, Var

__all__ = ["SCALAR_COST", "STORABLE", "Builder", "Expr", "Leaf", "compute_dtype", "walk"]

STORABLE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)

# Relative cost of one evaluation, in units of an addition; decides between keeping and recomputing.
SCALAR_COST = {
    "add": 1, "sub": 1, "mul": 1, "neg": 1, "abs": 1, "fma": 1, "max": 1, "min": 1, "fmax": 1, "fmin": 1,
    "eq": 1, "ne": 1, "lt": 1, "le": 1, "gt": 1, "ge": 1, "and": 1, "or": 1, "xor": 1, "not": 1,
    "bitand": 1, "bitor": 1, "bitxor": 1, "bitnot": 1, "shl": 1, "shr": 1,
    "where": 1, "cast": 1, "round_bf16": 4, "isnan": 1, "isinf": 1, "sign": 2,
    "floor": 1, "ceil": 1, "trunc": 1, "round": 1, "copysign": 1,
    "div": 5, "floordiv": 8, "truncdiv": 8, "remainder": 10, "fmod": 10, "sqrt": 5,
    "exp": 12, "exp2": 30, "expm1": 30, "log": 13, "log2": 30, "log10": 30, "log1p": 30,
    "tanh": 16, "sigmoid": 15, "erf": 24, "erfc": 40, "sin": 40, "cos": 40, "tan": 40,
    "asin": 40, "acos": 40, "atan": 40, "sinh": 40, "cosh": 40, "atan2": 50, "pow": 50,
    "torch_sqrt": 8, "checked": 30,
}  # fmt: skip


@dataclass(frozen=True)
class Leaf:
    """What a leaf refers to.

    `kind` is const (value), scalar (number of the host scalar), index (the loop index itself), load
    (buffer and index) or reduced (reduction and index into its result).  A load's `bound` and the
    expression's single argument describe a data-dependent position: ``index + stride * argument`` with
    the argument checked against ``[0, bound)``.
    """

    kind: str
    value: float | int | bool = 0
    source: str = ""
    index: Index = ZERO
    stride: int = 0
    bound: int = 0
    stored: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class Expr:
    """One interned node; compare with ``is``."""

    op: str
    args: tuple[Expr, ...]
    dtype: torch.dtype
    leaf: Leaf | None = None

    @cached_property
    def variables(self) -> frozenset[Var]:
        """The loop variables on which it depends (through indices)."""
        own = self.leaf.index.variables if self.leaf is not None else frozenset()
        return own.union(*(arg.variables for arg in self.args))

    @cached_property
    def sources(self) -> frozenset[str]:
        """Names of the reductions below it."""
        own = {self.leaf.source} if self.leaf is not None and self.leaf.kind == "reduced" else set()
        return frozenset(own).union(*(arg.sources for arg in self.args))

    @cached_property
    def cost(self) -> int:
        """Cost of evaluating the tree once; loads are free (they are usually in cache)."""
        return SCALAR_COST.get(self.op, 0) + sum(arg.cost for arg in self.args)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a stored dtype are computed."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def walk(*roots: Expr) -> Iterator[Expr]:
    """Every node below `roots`, arguments first, once each."""
    seen: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


class Builder:
    """Makes interned expressions of one kernel.

    `exact_sqrt`: square roots are eager's own, bit for bit (ATen uses MKL's, which differs from IEEE's).
    """

    def __init__(self, exact_sqrt: bool = False) -> None:
        self._exact_sqrt = exact_sqrt
        self._nodes: dict[tuple[object, ...], Expr] = {}

    def _make(self, op: str, args: tuple[Expr, ...], dtype: torch.dtype, leaf: Leaf | None = None) -> Expr:
        # repr tells -0.0 from 0.0 and NaN from NaN; equality and hash of floats do not
        key = (op, tuple(id(arg) for arg in args), dtype, leaf, repr(leaf.value) if leaf else "")
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = Expr(op, args, dtype, leaf)
        return found

    def const(self, value: float | int | bool, dtype: torch.dtype) -> Expr:
        """A number; converted as C would (an integer type truncates)."""
        dtype = compute_dtype(dtype)
        if dtype == torch.bool:
            value = bool(value)
        elif not dtype.is_floating_point:
            value = int(value)
        else:
            value = float(value)
        return self._make("const", (), dtype, Leaf("const", value))

    def scalar(self, position: int) -> Expr:
        """The host scalar at `position`, float64."""
        return self._make("scalar", (), torch.float64, Leaf("scalar", position))

    def index(self, index: Index) -> Expr:
        """The value of a loop index, int64."""
        if not index.terms:
            return self.const(index.constant, torch.int64)
        return self._make("index", (), torch.int64, Leaf("index", index=index))

    def load(self, buffer: str, index: Index, dtype: torch.dtype) -> Expr:
        """``buffer[index]``, widened if it is bfloat16."""
        return self._make(
            "load", (), compute_dtype(dtype), Leaf("load", source=buffer, index=index, stored=dtype)
        )

    def gather(
        self, buffer: str, index: Index, row: Expr, stride: int, bound: int, dtype: torch.dtype
    ) -> Expr:
        """``buffer[index + stride * row]`` with `row` checked against ``[0, bound)`` when it runs."""
        leaf = Leaf("load", source=buffer, index=index, stride=stride, bound=bound, stored=dtype)
        return self._make("load", (row,), compute_dtype(dtype), leaf)

    def checked(self, row: Expr, bound: int) -> Expr:
        """`row`, checked against ``[0, bound)`` when it runs."""
        return self.apply("checked", row, self.const(bound, torch.int64))

    def reduced(self, reduction: str, index: Index, dtype: torch.dtype) -> Expr:
        """Element `index` (row-major over the kept axes) of a reduction's result."""
        return self._make("reduced", (), compute_dtype(dtype), Leaf("reduced", source=reduction, index=index))

    def apply(self, op: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
        """An operation; the result has the first argument's type unless `dtype` says otherwise."""
        if op == "sqrt" and self._exact_sqrt:
            op = "torch_sqrt"
        return self._make(op, args, dtype or args[0].dtype)

    def cast(self, value: Expr, dtype: torch.dtype) -> Expr:
        """Conversion to the compute type of `dtype`."""
        dtype = compute_dtype(dtype)
        if value.dtype == dtype:
            return value
        if value.leaf is not None and value.leaf.kind == "const":
            return self._cast_const(value, value.leaf.value, dtype)
        if dtype == torch.bool:
            return self.apply("ne", value, self.const(0, value.dtype), dtype=torch.bool)
        return self.apply("cast", value, dtype=dtype)

    def _cast_const(self, value: Expr, number: float | int | bool, dtype: torch.dtype) -> Expr:
        finite = number == number and abs(number) != float("inf")
        if dtype.is_floating_point or finite:
            return self.const(number, dtype)
        return self.apply("cast", value, dtype=dtype)

    def narrow(self, value: Expr, stored: torch.dtype) -> Expr:
        """`value` as it would be after a round trip through memory of type `stored`."""
        value = self.cast(value, stored)
        loaded = value.leaf is not None and value.leaf.stored == torch.bfloat16
        if stored != torch.bfloat16 or value.op == "round_bf16" or loaded:
            return value
        return self.apply("round_bf16", value)

    def compare(self, op: str, left: Expr, right: Expr) -> Expr:
        """A comparison, bool."""
        return self.apply(op, left, right, dtype=torch.bool)

    def where(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        """``condition ? yes : no``."""
        return self.apply("where", condition, yes, no, dtype=yes.dtype)


Emit = Callable[..., Expr]
