"""Lowtide: an unmodified PyTorch step within a memory or latency limit, with eager's numbers."""

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

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Infeasible",
    "LowtideError",
    "PlanFileError",
    "ShapeMismatch",
    "Stale",
    "UsageError",
    "Workload",
    "__version__",
]
