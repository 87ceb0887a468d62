"""Live bytes per step: the curve whose maximum a limit is about.

Problem.  One number (the peak) is what plans are judged by, one step (where it is reached) is what
transformations look at, and the Buffers alive there are what a report shows.

Method.  Lifetimes are half-open intervals; a running sum over their ends gives every step.

    above_bytes
        ^        __
        |     __|  |__          peak_step is the first step that reaches the peak
        |____|        |____
        +------------------> step

Invariants.  ``peak_bytes == graph.resident_bytes + peak_above_bytes``.  With the facts of the
reference executor this is what that executor measures, to the byte.

Not done.  Fragmentation and alignment: they belong to a Placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lowtide.analysis.facts import Facts
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir.graph import Graph

__all__ = ["Timeline", "timeline"]


@dataclass(frozen=True)
class Timeline:
    """Live bytes per step, resident storages left out of `above_bytes` and added in `peak_bytes`."""

    above_bytes: tuple[int, ...]
    peak_above_bytes: int
    peak_step: int
    peak_bytes: int
    buffers: tuple[Buffer, ...] = field(repr=False, default=())

    def alive(self, step: int) -> tuple[Buffer, ...]:
        """The Buffers that are taken at `step`, in order of their start."""
        return tuple(buffer for buffer in self.buffers if buffer.start <= step < buffer.stop)


def timeline(graph: Graph, order: Sequence[int], facts: Facts, inplace: bool = False) -> Timeline:
    """The live bytes of `graph` when its nodes run in `order`; see `lifetimes` for the arguments.

    A graph without nodes has an empty curve and its peak at step 0.
    """
    buffers = lifetimes(graph, order, facts, inplace)
    change = [0] * (len(order) + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.nbytes
        change[buffer.stop] -= buffer.nbytes
    above = tuple(accumulate(change[:-1]))
    peak = max(above, default=0)
    return Timeline(
        above_bytes=above,
        peak_above_bytes=peak,
        peak_step=above.index(peak) if above else 0,
        peak_bytes=graph.resident_bytes + peak,
        buffers=buffers,
    )
