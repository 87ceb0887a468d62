"""What a step is predicted to take: the counterpart of a measurement, and never mistaken for one.

Method.  Bytes come from lifetimes in the given order, with nothing reused in place (as eager runs), seconds
are the sum of the nodes' costs.

Not done here: overlap of copies with computation; what processes take beside the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lowtide.analysis.facts import Facts
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph

__all__ = ["Estimate", "estimate_step"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted bytes (`peak_bytes` includes the resident ones) and seconds of one step."""

    resident_bytes: int
    peak_bytes: int
    latency_s: float
    rss_peak_bytes: None = None
    predicted: ClassVar[bool] = True

    @property
    def above_bytes(self) -> int:
        """The peak without what is resident."""
        return self.peak_bytes - self.resident_bytes


def estimate_step(graph: Graph, order: Sequence[int], facts: Facts, costs: Mapping[int, float]) -> Estimate:
    """The step that runs the nodes of `graph` in `order`, as eager does."""
    peak_bytes = timeline(graph, order, facts).peak_bytes
    return Estimate(graph.resident_bytes, peak_bytes, sum(costs.get(node, 0.0) for node in order))
