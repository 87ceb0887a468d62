"""Lowtide: an unmodified PyTorch step within a memory or latency limit, with eager's numbers."""

from typing import TYPE_CHECKING, Any

from lowtide.capture import Program, capture
from lowtide.errors import (
    CaptureError,
    Infeasible,
    LowtideError,
    PlanFileError,
    ShapeMismatch,
    Stale,
    UsageError,
)
from lowtide.workload import Workload

if TYPE_CHECKING:
    from lowtide.door import Frontier, Plan, PlanCache, explore, load, optimize

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Frontier",
    "Infeasible",
    "LowtideError",
    "Plan",
    "PlanCache",
    "PlanFileError",
    "Program",
    "ShapeMismatch",
    "Stale",
    "UsageError",
    "Workload",
    "__version__",
    "capture",
    "explore",
    "load",
    "optimize",
]

_BEHIND_THE_DOOR = frozenset({"Frontier", "Plan", "PlanCache", "explore", "load", "optimize"})


def __getattr__(name: str) -> Any:
    """The search and the report are imported when they are first asked for: they bring compilers along."""
    if name not in _BEHIND_THE_DOOR:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    from lowtide import door

    return getattr(door, name)
