"""Swap: a value waits for its late readers on another tier.

rewrite:    v is made, read, and read again much later   ->   a Store of v behind node `after`, a Load
            before node `before`; the readers from `before` on read what was loaded.
legal when: v owns its storage, is the only value on it that is read from `before` on, nobody writes it, it is
            neither the caller's nor an output of the graph, and `after` comes before `before`.
effect:     v dies with its last reader before `before` and its Store; the loaded copy lives from the Load
            to its last reader.  Two copies over the bus, which hide behind work where the engines are two.
            Bit-equal.

Not done.  When the copies run (`lowtide.search.residence` plans them on two clocks), partial swaps, views
that late readers take (the views would have to be made again on the copy).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from lowtide.ir import Edit, Graph, Node
from lowtide.ir.graph import Role
from lowtide.ir.ops import Load, Store
from lowtide.transforms.draft import Draft

__all__ = ["SwapCandidate", "apply", "candidates", "faults"]


@dataclass(frozen=True)
class SwapCandidate:
    """A value, the node behind which it is stored, the node before which it is loaded."""

    value: int
    after: int
    before: int
    tier: str = "host"


def faults(graph: Graph, candidate: SwapCandidate) -> list[str]:
    """Why the swap is not legal, one sentence each."""
    place = {node.id: k for k, node in enumerate(graph.nodes)}
    after, before = place[candidate.after], place[candidate.before]
    storage = graph.storage_of(candidate.value)
    siblings = [v for v in graph.views_of[storage.id] if v != candidate.value]
    late = [v for v in siblings if any(place[r] >= before for r in graph.readers[v])]
    maker = graph.producer.get(candidate.value)
    found = []
    if maker is None or storage.role.resident or storage.role is Role.HOST:
        found.append(f"%{candidate.value} is the caller's")
    elif place[maker] > after or after >= before:
        found.append(f"%{candidate.value} has to be made, stored and loaded in this order")
    elif graph.is_view(graph.node[maker]):
        found.append(f"%{candidate.value} is a view of another value's storage")
    if late:
        found.append(f"late readers take views {late} of %{candidate.value}")
    if any(graph.values[v].storage == storage.id for node in graph.nodes for v in node.writes):
        found.append(f"%{candidate.value} is written in place")
    if storage.role is Role.OUTPUT or any(graph.values[v].storage == storage.id for v in graph.outputs):
        found.append(f"%{candidate.value} is a result")
    return found


def candidates(graph: Graph, least_bytes: int = 1) -> Iterator[SwapCandidate]:
    """Each value of at least so many bytes at the longest gap between two of its readers."""
    place = {node.id: k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for value in node.outputs:
            readers = [node.id, *graph.readers[value]]
            if len(readers) < 2 or graph.storage_of(value).nbytes < least_bytes:
                continue
            gaps = [(place[b] - place[a], a, b) for a, b in pairwise(readers)]
            _, after, before = max(gaps, key=lambda gap: gap[0])
            candidate = SwapCandidate(value, after, before)
            if place[before] - place[after] > 1 and not faults(graph, candidate):
                yield candidate


def apply(graph: Graph, candidate: SwapCandidate) -> Edit:
    """The graph with the pair of copies; raises ValueError where that is not legal."""
    if reasons := faults(graph, candidate):
        raise ValueError("; ".join(reasons))
    draft = Draft(graph)
    meta = graph.values[candidate.value].meta
    nbytes = graph.storage_of(candidate.value).nbytes
    away, back = (draft.value(meta, draft.storage(nbytes, Role.TEMP)) for _ in range(2))
    late = False
    for node in graph.nodes:
        if node.id == candidate.before:
            draft.nodes.append(
                Node(draft.node_id(), Load(candidate.tier), (away,), (back,), origin=node.origin)
            )
            late = True
        inputs = tuple(back if late and value == candidate.value else value for value in node.inputs)
        draft.nodes.append(replace(node, inputs=inputs))
        if node.id == candidate.after:
            store = Node(
                draft.node_id(), Store(candidate.tier), (candidate.value,), (away,), origin=node.origin
            )
            draft.nodes.append(store)
    return Edit(draft.graph(graph.inputs, graph.outputs))
