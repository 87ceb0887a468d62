"""Measured seconds of a graph's nodes, for the machine that runs the plan.

Not done here: measuring (`lowtide.run.timing`) and its disk cache.
"""

from __future__ import annotations

from lowtide.ir import Graph
from lowtide.run.timing import time_nodes

__all__ = ["profiled_costs"]


def profiled_costs(graph: Graph) -> dict[int, float]:
    """Seconds by node id, each distinct node measured once; views and host numbers are free."""
    return time_nodes(graph)
