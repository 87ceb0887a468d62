"""Measured seconds of a graph's nodes, for the machine that runs the plan.

Method.  Single nodes are timed once each (`lowtide.run.timing`); a Fission costs its parts and the
accumulation of its sums, which is traffic: read, read, write.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.ir import Fission, Graph, Merge, Node
from lowtide.run.kernels import NO_KERNELS, Kernels
from lowtide.run.store import ProfileStore
from lowtide.run.timing import time_nodes

__all__ = ["profiled_costs"]

ACCUMULATE_BANDWIDTH = 1.0e10
"""Bytes per second of ``whole += part`` on one CPU core, conservative."""


def profiled_costs(
    graph: Graph, store: ProfileStore | None = None, kernels: Kernels = NO_KERNELS
) -> dict[int, float]:
    """Seconds by node id, each distinct node measured once; views and host numbers are free.

    Fused nodes are measured as `kernels` where there is one, else call by call.
    """
    store = store or ProfileStore.default()
    costs = time_nodes(graph, store=store, kernels=kernels)
    for node in graph.nodes:
        if isinstance(node.op, Fission):
            bodies = [sum(profiled_costs(body, store, kernels).values()) for body in node.op.bodies]
            costs[node.id] = _fission_s(graph, node, node.op, bodies)
    return costs


def _fission_s(graph: Graph, node: Node, op: Fission, bodies: Sequence[float]) -> float:
    parts = [bodies[part.body] for part in op.parts]
    return sum(parts) + (len(parts) - 1) * _accumulate_s(graph, node, op)


def _accumulate_s(graph: Graph, node: Node, op: Fission) -> float:
    """Seconds of adding one part's sums to the whole's."""
    sums = [value for value, merge in zip(node.outputs, op.merges, strict=True) if merge is Merge.ADD]
    moved = sum(
        3 * graph.values[value].meta.numel * graph.values[value].meta.dtype.itemsize for value in sums
    )
    return moved / ACCUMULATE_BANDWIDTH
