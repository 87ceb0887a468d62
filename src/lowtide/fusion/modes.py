"""The planners, by name: all take (graph, pricing, limits, banned) and give groups of node ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.fusion.exact import exact_blocks
from lowtide.fusion.listing import list_blocks
from lowtide.fusion.planner import plan_blocks

__all__ = ["MODES"]

MODES: Mapping[str, Callable[..., tuple[frozenset[int], ...]]] = {
    "extended": plan_blocks,
    "dnnfusion": list_blocks,
    "exact": exact_blocks,
}
"""extended: this package's default; dnnfusion: the paper's Listing 1 as printed; exact: the best partition of
small pieces."""
