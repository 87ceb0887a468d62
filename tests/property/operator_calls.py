"""One generator of real calls per operator with an axis rule."""

from __future__ import annotations

from hypothesis import strategies as st
from tests.property.calls_products import PRODUCT_CALLS
from tests.property.calls_rows import ROW_CALLS
from tests.property.calls_views import VIEW_CALLS
from tests.property.drawing import Build, Draw
from torch import Tensor

from lowtide.ir.ops import Arg, Aten

CALLS: dict[str, Build] = {**VIEW_CALLS, **PRODUCT_CALLS, **ROW_CALLS}

KEYWORDS: dict[str, tuple[tuple[str, Arg], ...]] = {"aten.var_mean.correction": (("correction", 0),)}
"""Arguments that are passed by name: only without correction has a variance parts."""


def make_call(overload: str, data: st.DataObject) -> tuple[Aten, list[Tensor]]:
    """A random call of `overload` and its tensors."""
    draw = Draw(data)
    args = CALLS[overload](draw)
    return Aten(overload, args, KEYWORDS.get(overload, ())), draw.tensors
