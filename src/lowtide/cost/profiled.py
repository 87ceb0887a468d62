"""Measured seconds of a graph's nodes, for the machine that runs the plan.

Method.  Single nodes are timed once each (`lowtide.run.timing`); a Fission costs its parts and what brings
their results to the wholes, which is traffic: a product that is added to what is there reads that, a part
made elsewhere is read, added and written, or copied (`lowtide.analysis.parts`).  Of its bodies the largest is
timed; the others have the same nodes on a few rows less (borders, what is left over), so their times follow
from its, node by node, in proportion to the bytes that are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lowtide.analysis.parts import Delivery, deliveries
from lowtide.cost.roofline import node_bytes
from lowtide.cost.siblings import Siblings
from lowtide.ir import Fission, Graph, Node
from lowtide.run.kernels import NO_KERNELS, Kernels
from lowtide.run.store import ProfileStore
from lowtide.run.timing import time_nodes

__all__ = ["bodies_s", "largest_body", "merging_s", "profiled_costs"]

MERGE_BANDWIDTH = 3.0e10
"""Bytes per second of ``whole += part``: between what memory and what the caches give."""

PASSES: Mapping[Delivery, int] = MappingProxyType(
    {"direct": 0, "copy": 2, "accumulate": 1, "terms": 1, "add": 3, "combine": 3}
)
"""How often an output's bytes are read or written to bring one part's result to the whole."""


def profiled_costs(
    graph: Graph,
    store: ProfileStore | None = None,
    kernels: Kernels = NO_KERNELS,
    siblings: Siblings | None = None,
) -> dict[int, float]:
    """Seconds by node id, each distinct node measured once; views and host numbers are free.

    Fused nodes are measured as `kernels` where there is one, else call by call.  With `siblings`, what was
    measured on other rows is not measured again.
    """
    store = store or ProfileStore.default()
    costs = _timed(graph, store, kernels, siblings)
    for node in graph.nodes:
        if isinstance(node.op, Fission):
            timed = profiled_costs(node.op.bodies[largest_body(node.op)], store, kernels, siblings)
            seconds = bodies_s(node.op, timed)
            parts = (seconds[part.body] for part in node.op.parts)
            costs[node.id] = sum(parts) + merging_s(graph, node)
    return costs


def _timed(
    graph: Graph, store: ProfileStore, kernels: Kernels, siblings: Siblings | None
) -> dict[int, float]:
    if siblings is None:
        return time_nodes(graph, store=store, kernels=kernels)
    guessed: set[int] = set()

    def guess(within: Graph, node: Node) -> float | None:
        found = siblings.guess(within, node)
        if found is not None:
            guessed.add(node.id)
        return found

    costs = time_nodes(graph, store=store, kernels=kernels, guess=guess)
    for node in graph.nodes:
        if node.id not in guessed:
            siblings.learn(graph, node, costs[node.id])
    return costs


def largest_body(op: Fission) -> int:
    """The number of the body that touches most bytes."""
    sizes = [sum(node_bytes(body, node) for node in body.nodes) for body in op.bodies]
    return sizes.index(max(sizes))


def bodies_s(op: Fission, costs: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds of each body of `op`; `costs` are those of the nodes of the largest."""
    known = op.bodies[largest_body(op)]
    whole_s, whole = sum(costs.values()), {node.id: max(1, node_bytes(known, node)) for node in known.nodes}
    found = []
    for body in op.bodies:
        touched = {node.id: node_bytes(body, node) for node in body.nodes}
        if touched.keys() == whole.keys():
            found.append(sum(costs.get(node, 0.0) * touched[node] / whole[node] for node in whole))
        else:  # kernels were chosen for each body by itself
            found.append(whole_s * sum(touched.values()) / sum(whole.values()))
    return tuple(found)


def merging_s(graph: Graph, node: Node) -> float:
    """Seconds of bringing the results of a Fission's parts to the wholes: slices once, sums part by part."""
    assert isinstance(node.op, Fission)
    moved = 0
    for value, way in zip(node.outputs, deliveries(graph, node), strict=True):
        meta = graph.values[value].meta
        times = 1 if way == "copy" else len(node.op.parts) - 1
        moved += PASSES[way] * times * meta.nbytes
    return moved / MERGE_BANDWIDTH
