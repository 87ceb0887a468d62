"""Is an order allowed, and what does it need?  Slow, plain, and sharing nothing with the schedulers.

Problem.  A scheduler's own arrays may be wrong in the same way as its result.

Method.  Everything is read off the graph again: a value must exist before it is read, a write must stand
on the same side of every other toucher of its storage as in program order, random nodes must keep
their order.  The peak is counted step by step from sets of storages.

Invariants.  An empty list of complaints means that running the order gives the program's results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.analysis.facts import Facts
from lowtide.ir.graph import Graph, Role
from lowtide.ir.random import is_random

__all__ = ["check_order", "judged_peak_bytes"]


def check_order(graph: Graph, order: Sequence[int]) -> list[str]:
    """Complaints about `order` (ids of all nodes), each naming the nodes; empty if it is allowed."""
    wrong = [f"node {node} is not in the graph" for node in order if node not in graph.node]
    wrong += [f"node {node} runs {order.count(node)} times" for node in set(order) if order.count(node) > 1]
    wrong += [f"node {node} never runs" for node in graph.node if node not in set(order)]
    if wrong:
        return wrong
    step = {node: k for k, node in enumerate(order)}
    return [*_unmade(graph, step), *_hazards(graph, step), *_shuffled(graph, step)]


def _unmade(graph: Graph, step: dict[int, int]) -> Iterator[str]:
    """Reads of values that do not exist yet."""
    made_by = {out: node.id for node in graph.nodes for out in node.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            if value in made_by and step[made_by[value]] >= step[node.id]:
                yield f"node {node.id} reads value {value} before node {made_by[value]} makes it"


def _hazards(graph: Graph, step: dict[int, int]) -> Iterator[str]:
    """Writes that changed sides with another node that touches the same storage."""
    touched: dict[int, list[tuple[int, bool]]] = {}
    for node in graph.nodes:
        written = {graph.values[value].storage for value in node.writes}
        for storage in {graph.values[value].storage for value in (*node.inputs, *node.outputs)}:
            touched.setdefault(storage, []).append((node.id, storage in written))
    for storage, nodes in touched.items():
        for i, (earlier, first_writes) in enumerate(nodes):
            for later, second_writes in nodes[i + 1 :]:
                if (first_writes or second_writes) and step[earlier] > step[later]:
                    yield f"nodes {earlier} and {later} changed sides, one of them writes storage {storage}"


def _shuffled(graph: Graph, step: dict[int, int]) -> Iterator[str]:
    """Random nodes out of program order."""
    randoms = [node.id for node in graph.nodes if is_random(node.op)]
    for i, earlier in enumerate(randoms):
        for later in randoms[i + 1 :]:
            if step[earlier] > step[later]:
                yield f"random nodes {earlier} and {later} changed their order"


def judged_peak_bytes(graph: Graph, order: Sequence[int], facts: Facts) -> int:
    """Most live bytes above the resident ones, without in-place reuse, counted step by step."""
    handed_out = {graph.values[value].storage for value in graph.outputs}
    given = {graph.values[value].storage for value in graph.inputs}
    peak = 0
    made: dict[int, int] = {}
    for k, name in enumerate(order):
        node = graph.node[name]
        fact = facts.get(name)
        fresh = 0
        for position, out in enumerate(node.outputs):
            storage = graph.values[out].storage
            owned = graph.storages[storage].role.resident or storage in given
            if fact is not None and fact.output_bytes[position] and not owned:
                made[storage] = max(made.get(storage, 0), fact.output_bytes[position])
                fresh += fact.output_bytes[position]
        ahead = {
            graph.values[value].storage
            for later in order[k:]
            for value in (*graph.node[later].inputs, *graph.node[later].outputs)
        }
        kept = {s for s in made if s in handed_out or graph.storages[s].role is Role.OUTPUT}
        workspace = max(0, fact.transient_bytes - fresh) if fact is not None else 0
        peak = max(peak, workspace + sum(made[s] for s in made if s in ahead or s in kept))
    return peak
