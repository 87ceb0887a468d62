"""What operators take beside the arena and a plan's results.

Problem.  With the hook, only threads inside an operator ask elsewhere; without it every operator does that
has no out= variant.  Both belong in the predicted peak.

Not done here: what libraries take below the allocator (`OperatorFacts.hidden_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.analysis.facts import Facts, OperatorFacts
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten
from lowtide.run.allocator import Hook
from lowtide.run.derived import Derivation
from lowtide.run.probe import FactsTree, probe, variant_of
from lowtide.run.store import ProfileStore

__all__ = ["unplaced_bytes"]


def unplaced_bytes(
    graph: Graph,
    tree: FactsTree,
    derivation: Derivation | None,
    hook: Hook | None,
    store: ProfileStore | None,
) -> int:
    """The most that one operator takes beside arena and results, those that derive weights included."""
    ahead = (derivation.graph, derivation.facts) if derivation else None
    pairs = [(graph, tree), *([ahead] if ahead else [])]
    if hook:
        return max(_foreign_bytes(facts) for _, facts in pairs)
    return max(_unplaced_bytes(each, facts[()], store) for each, facts in pairs)


def _foreign_bytes(tree: FactsTree) -> int:
    """What threads inside one operator take: the hook serves the calling thread only."""
    return max((one.foreign_bytes for facts in tree.values() for one in facts.values()), default=0)


def _unplaced_bytes(graph: Graph, facts: Facts, store: ProfileStore | None) -> int:
    """Without a hook: the most that one operator takes beside the arena, its result to be copied included."""
    reference = probe(graph, "reference", store=store)
    return max((_beside(graph, node_id, facts, reference) for node_id in facts), default=0)


def _beside(graph: Graph, node_id: int, facts: Facts, reference: Mapping[int, OperatorFacts]) -> int:
    op = graph.node[node_id].op
    given = sum(facts[node_id].output_bytes)
    if isinstance(op, Aten) and variant_of(op, facts[node_id]) == "out":
        return max(0, reference[node_id].transient_bytes - given)
    return reference[node_id].transient_bytes
