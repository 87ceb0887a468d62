"""How reductions accumulate: identities, combining statements, accumulator types, OpenMP clauses.

Method.  Data keyed by the kind of reduction.  A float maximum drops NaN in the lanes (one instruction) and
remembers in a flag that there was one.  float32 sums and products total in float64.
"""

from __future__ import annotations

import torch

from lowtide.fusion.codegen.ctext import compute_type
from lowtide.fusion.codegen.stage import Placed
from lowtide.fusion.codegen.tensor import Reduction

__all__ = [
    "COMBINE", "as_lane", "clause", "flags_nan", "identity", "is_float_sum", "lane_type",
    "result_dtype", "total_type",
]  # fmt: skip

IDENTITY = {"sum": "0", "prod": "1", "any": "0", "all": "1"}
COMBINE = {
    "sum": "{0} += {1};",
    "prod": "{0} *= {1};",
    "any": "{0} |= {1};",
    "all": "{0} &= {1};",
    "max": "{0} = lt_max({0}, {1});",
    "min": "{0} = lt_min({0}, {1});",
}
CLAUSE = {"sum": "+", "prod": "*", "any": "|", "all": "&"}


def identity(reduction: Reduction) -> str:
    """The neutral element, as C text."""
    if reduction.kind in IDENTITY:
        return IDENTITY[reduction.kind]
    if reduction.dtype.is_floating_point:
        return f"{'-' if reduction.kind == 'max' else ''}__builtin_inf()"
    if reduction.dtype == torch.bool:
        return "0" if reduction.kind == "max" else "1"
    info = torch.iinfo(reduction.dtype)
    bound = info.min if reduction.kind == "max" else info.max
    return "INT64_MIN" if bound == -(2**63) else f"INT64_C({bound})"


def lane_type(reduction: Reduction, dtype: torch.dtype) -> str:
    return "int" if dtype == torch.bool else compute_type(dtype)


def flags_nan(placed: Placed) -> bool:
    reduction = placed.item.reduction
    return reduction is not None and reduction.kind in ("max", "min") and placed.value.dtype.is_floating_point


def as_lane(placed: Placed, value: str | None) -> str:
    """The value in the accumulator's type (bool accumulates as int)."""
    return f"(int){value}" if placed.value.dtype == torch.bool else f"{value}"


def is_float_sum(placed: Placed) -> bool:
    reduction = placed.item.reduction
    return reduction is not None and reduction.kind == "sum" and placed.value.dtype == torch.float32


def total_type(reduction: Reduction, dtype: torch.dtype) -> str:
    if reduction.kind in ("sum", "prod") and dtype == torch.float32:
        return "double"
    return lane_type(reduction, dtype)


def result_dtype(reduction: Reduction) -> torch.dtype:
    return torch.float32 if reduction.dtype == torch.bfloat16 else reduction.dtype


def clause(placed: Placed) -> str:
    assert placed.item.reduction is not None
    kind = placed.item.reduction.kind
    if kind in ("max", "min"):
        flag = f" reduction(| : {placed.item.name}_nan)" if flags_nan(placed) else ""
        return f" reduction({kind} : {placed.item.name}_part)" + flag
    return f" reduction({CLAUSE[kind]} : {placed.item.name}_part)"
