"""Operators that are several passes over their input: one table from five.

Problem.  A softmax or a layer norm is one operator in ATen and several passes over a row in a kernel; to
fuse what surrounds it, the passes have to be visible.

Method.  See `reductions`, `norms`, `losses`, `products`, `windows`.
"""

from __future__ import annotations

from lowtide.fusion.codegen.losses import LOSSES
from lowtide.fusion.codegen.norms import NORMS
from lowtide.fusion.codegen.products import PRODUCTS
from lowtide.fusion.codegen.reductions import REDUCTIONS
from lowtide.fusion.codegen.windows import WINDOWS

__all__ = ["COMPOSITES"]

COMPOSITES = {**REDUCTIONS, **NORMS, **LOSSES, **PRODUCTS, **WINDOWS}
