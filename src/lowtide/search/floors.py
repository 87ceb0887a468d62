"""Lower bounds: what no plan of these moves can go under, and the node that says so.

Method.  A node needs its inputs, its outputs and its workspace at the same time; the largest such sum
plus the resident bytes bounds every order and every recomputation.  In-place reuse may save one input.

Not done here: bounds for split nodes (a Fission lowers the node itself) and exact optima.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.analysis.facts import Facts, fresh_bytes, workspace_bytes
from lowtide.analysis.inplace import donors
from lowtide.ir import Aten, Graph, Node
from lowtide.run.plan import Plan
from lowtide.units import format_bytes

__all__ = ["Floor", "floor_of"]


@dataclass(frozen=True)
class Floor:
    """`total_bytes` includes the resident bytes; `node` is the culprit with its module path."""

    total_bytes: int
    resident_bytes: int
    node: str
    source: str

    @property
    def explanation(self) -> str:
        """``resident 2.1 GiB + largest step 1.3 GiB, at decoder.up.3 (aten.convolution)``."""
        step = self.total_bytes - self.resident_bytes
        resident = format_bytes(self.resident_bytes)
        return f"resident {resident} + largest step {format_bytes(step)}, at {self.node}"

    def reached_by(self, plan: Plan) -> Floor:
        """The least peak that a plan reached, at that plan's peak node: no smaller plan is known."""
        node = plan.graph.node[plan.schedule.order[plan.timeline.peak_step]]
        return replace(
            self, total_bytes=plan.predicted_peak_bytes, node=describe(node), source=node.origin.source
        )


def describe(node: Node) -> str:
    """Module path and operator of a node, for messages."""
    name = node.op.overload if isinstance(node.op, Aten) else type(node.op).__name__.lower()
    return f"{node.origin.module or node.origin.phase} ({name})"


def floor_of(graph: Graph, facts: Facts) -> Floor:
    """The largest node bound of `graph`."""
    takes = donors(graph)
    resident = graph.resident_bytes
    sizes = _storage_bytes(graph, facts)
    best, culprit = 0, None
    for node in graph.nodes:
        touched = {graph.values[value].storage for value in (*node.inputs, *node.outputs)}
        need = sum(sizes.get(storage, 0) for storage in touched) + workspace_bytes(graph, node, facts)
        need -= max((sizes.get(storage, 0) for storage in takes.get(node.id, ())), default=0)
        if not graph.is_view(node) and need > best:
            best, culprit = need, node
    where = describe(culprit) if culprit else "the arguments"
    return Floor(resident + best, resident, where, culprit.origin.source if culprit else "")


def _storage_bytes(graph: Graph, facts: Facts) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for node in graph.nodes:
        sizes.update(fresh_bytes(graph, node, facts))
    return sizes
