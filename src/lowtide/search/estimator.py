"""One estimator judges everything: facts and seconds of a graph's nodes, measured or analytic.

Problem.  Limits have to be judged with the estimator that judges candidates, and edited graphs ask for
the same operators again and again.

Method.  Where the target device is here, facts and times are measured once per distinct node and kept
on disk and in memory; for a device that is not here, facts are assumed and times come from the roofline.
Fission nodes are priced from their bodies.

Fusing comes last, on the graph as it will run, but what it will save has to be known when it is decided what
to recompute: `prices` are costs with each operator's share of the kernel that it was fused into when nothing
was split or recomputed (`Fuser.shares`).

Not done here: what a plan as a whole costs beyond its nodes (`promise.py` corrects that after measuring).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType

from lowtide.analysis.facts import Facts, OperatorFacts, assumed_facts
from lowtide.analysis.lifetime import lifetimes
from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.cost.devices import Device
from lowtide.cost.profiled import merging_s, profiled_costs
from lowtide.cost.roofline import roofline_costs
from lowtide.cost.siblings import Siblings
from lowtide.ir import Fission, Fused, Graph, Node
from lowtide.run.kernels import Kernels
from lowtide.run.probe import FactsTree, Path, probe
from lowtide.run.store import ProfileStore

__all__ = ["Estimator", "assumed_tree"]

NOTHING: Mapping[int, float] = MappingProxyType({})


@dataclass
class Estimator:
    """Facts and seconds by node id; `device` None means: measure on this machine.

    Fused nodes are judged as `kernels` where there is one, so these come first.
    """

    device: Device | None = None
    store: ProfileStore = field(default_factory=ProfileStore.default)
    kernels: Kernels = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)
    siblings: Siblings = field(default_factory=Siblings)

    def facts(self, graph: Graph) -> Facts:
        """What each node allocates as the arena executor runs it; kept with the graph."""
        found = graph.memo.get(("facts", id(self)))
        if found is None:
            found = _assumed(graph) if self.device else self._probe(graph)
            graph.memo[("facts", id(self))] = found
        return found  # type: ignore[return-value]

    def _probe(self, graph: Graph) -> Facts:
        return probe(graph, "arena", store=self.store, kernels=self.kernels)

    def costs(self, graph: Graph, rows: bool = False) -> Mapping[int, float]:
        """Seconds of each node; kept with the graph.

        With `rows`, for the body of a region along rows, what was measured on other rows is not measured
        again: good enough to choose by.  What is chosen is asked for without.
        """
        found = graph.memo.get(("costs", id(self), rows))
        if found is None:
            found = graph.memo["costs", id(self), rows] = self._costs(graph, rows)
        return found  # type: ignore[return-value]

    def _costs(self, graph: Graph, rows: bool) -> Mapping[int, float]:
        if self.device is not None:
            return roofline_costs(graph, self.device)
        return profiled_costs(graph, self.store, self.kernels, self.siblings if rows else None)

    def prices(
        self, graph: Graph, rows: bool = False, known: Mapping[int, float] = NOTHING
    ) -> dict[int, float]:
        """Expected seconds of each node once its graph is fused; parts of a node have its share.

        `rows` as in `costs`; nodes whose seconds are `known` are not asked for.
        """
        rest = tuple(node for node in graph.nodes if node.id not in known)
        asked = replace(graph, nodes=rest) if known else graph
        costs = self.costs(asked, rows)
        return {**{node: seconds * self.shares.get(node, 1.0) for node, seconds in costs.items()}, **known}

    def merging_s(self, graph: Graph, node: Node) -> float:
        """Seconds of adding up the sums of a Fission's parts; on a device they are in its nodes' costs."""
        return 0.0 if self.device is not None else merging_s(graph, node)


def _assumed(graph: Graph) -> dict[int, OperatorFacts]:
    """Assumed facts, with the bodies of Fissions as the arena executor runs them."""
    facts = dict(assumed_facts(graph))
    for node in graph.nodes:
        if isinstance(node.op, Fission):
            ways = deliveries(graph, node)
            inside = max(_peak_inside(body_as_run(body, ways)) for body in node.op.bodies)
            known = facts[node.id]
            facts[node.id] = replace(known, transient_bytes=sum(known.output_bytes) + inside)
    return facts


def assumed_tree(graph: Graph) -> FactsTree:
    """Assumed facts of `graph` and of every body in it, for a device that cannot be asked."""
    found: dict[Path, Facts] = {}
    _assume_into(found, graph, ())
    return found


def _assume_into(found: dict[Path, Facts], graph: Graph, path: Path) -> None:
    found[path] = _assumed(graph)
    for node in graph.nodes:
        if isinstance(node.op, Fused) and node.op.kind == "update":
            _assume_into(found, node.op.body, (*path, node.id))
        elif isinstance(node.op, Fission):
            for number, body in enumerate(node.op.bodies):
                _assume_into(found, body, (*path, node.id, number))


def _peak_inside(body: Graph) -> int:
    """The most bytes of a body that are its own, in-place reuse included."""
    order = [node.id for node in body.nodes]
    change = [0] * (len(order) + 1)
    for buffer in lifetimes(body, order, _assumed(body), inplace=True):
        if buffer.kind != "output":
            change[buffer.start] += buffer.nbytes
            change[buffer.stop] -= buffer.nbytes
    return max(accumulate(change))
