"""One estimator judges everything: facts and seconds of a graph's nodes, measured or analytic.

Problem.  Limits have to be judged with the estimator that judges candidates, and edited graphs ask for
the same operators again and again.

Method.  Where the target device is here, facts and times are measured once per distinct node and kept
on disk; for a device that is not here, facts are assumed and times come from the roofline.  Fission
nodes are priced from their bodies.

Not done here: what a plan as a whole costs beyond its nodes (`scale` corrects that after measuring).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.analysis.facts import Facts, assumed_facts
from lowtide.cost.devices import Device
from lowtide.cost.profiled import profiled_costs
from lowtide.cost.roofline import roofline_costs
from lowtide.ir import Graph
from lowtide.run.probe import probe

__all__ = ["Estimator"]


@dataclass
class Estimator:
    """Facts and seconds by node id, cached by graph; `device` None means: measure on this machine."""

    device: Device | None = None
    _facts: dict[Graph, Facts] = field(default_factory=dict)
    _costs: dict[Graph, Mapping[int, float]] = field(default_factory=dict)

    def facts(self, graph: Graph) -> Facts:
        """What each node allocates as the arena executor runs it."""
        if graph not in self._facts:
            self._facts[graph] = assumed_facts(graph) if self.device else probe(graph, "arena")
        return self._facts[graph]

    def costs(self, graph: Graph) -> Mapping[int, float]:
        """Seconds of each node."""
        if graph not in self._costs:
            known = roofline_costs(graph, self.device) if self.device else profiled_costs(graph)
            self._costs[graph] = known
        return self._costs[graph]
