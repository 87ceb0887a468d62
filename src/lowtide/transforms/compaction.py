"""Slices that outlive the rest of their storage, kept as copies of their own.

Problem.  The gradient of a concatenation is one storage, and its parts are slices of it.  A U-Net reads one
part at once and the other when the backward reaches the skip's maker, at the very end: until then both are
held, at every level of the network.

rewrite:    v = slice(s), read long after anything else of s  ->  c = clone(v); the late readers read c
legal when: nothing writes s, s is no result, the readers make what they made (layouts included).
effect:     s is free once the rest of it was read; the slice's bytes are copied once.  Exact.

    live bytes   [ s: both parts ==========================)        before
                 [ s ====)[ c: one part ===================)        after

Not done.  Several generations of copies; slices that are viewed again before they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.ir import Aten, Graph, Node, Ref
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict

__all__ = ["compacted"]

LEAST_BYTES = 1 << 18
"""Of a storage without the slice: less is not worth a copy."""

LEAST_STEPS = 10
"""Nodes between the last use of the rest and that of the slice."""

_CLONE = Aten("aten.clone.default", (Ref(0),))


@dataclass(frozen=True)
class _Slice:
    """A view to copy behind node `after`, for the nodes in `readers`."""

    value: int
    after: int
    readers: frozenset[int]


def compacted(graph: Graph) -> Graph:
    """`graph` with every such slice copied; the same object if there is none."""
    place = {node.id: step for step, node in enumerate(graph.nodes)}
    written = {graph.values[value].storage for node in graph.nodes for value in node.writes}
    written |= {graph.values[value].storage for value in graph.outputs}
    found = [
        each
        for storage in graph.storages.values()
        if not storage.role.resident and storage.id not in written
        if (each := _late_slice(graph, place, storage.id)) is not None
    ]
    return _copied(graph, found) if found else graph


def _late_slice(graph: Graph, place: Mapping[int, int], storage: int) -> _Slice | None:
    """The slice of one storage that is read last, if it outlives the rest."""
    uses = {
        value: [reader for reader in graph.readers[value] if not graph.is_view(graph.node[reader])]
        for value in graph.views_of[storage]
    }
    ends = {value: max(place[reader] for reader in readers) for value, readers in uses.items() if readers}
    if len(ends) < 2:
        return None
    *_, second, last = sorted(ends, key=ends.__getitem__)
    spared = graph.storages[storage].nbytes - graph.values[last].meta.nbytes
    if spared < LEAST_BYTES or ends[last] - ends[second] < LEAST_STEPS:
        return None
    late = frozenset(reader for reader in uses[last] if place[reader] > ends[second])
    return _Slice(last, graph.nodes[ends[second]].id, late)


def _copied(graph: Graph, slices: list[_Slice]) -> Graph:
    draft = Draft(graph)
    behind: dict[int, list[_Slice]] = {}
    for each in slices:
        behind.setdefault(each.after, []).append(each)
    instead: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        inputs = tuple(instead.get((node.id, value), value) for value in node.inputs)
        draft.nodes.append(replace(node, inputs=inputs))
        for each in behind.get(node.id, ()):
            (copy,) = draft.emit(_CLONE, (each.value,), graph.node[graph.producer[each.value]].origin)
            kept = [
                number for number in each.readers if _same(graph, draft, graph.node[number], each.value, copy)
            ]
            if len(kept) < len(each.readers):  # a reader would lay its result out otherwise
                draft.nodes.pop()
                continue
            instead.update({(number, each.value): copy for number in kept})
    return draft.graph(graph.inputs, graph.outputs) if instead else graph


def _same(graph: Graph, draft: Draft, node: Node, value: int, copy: int) -> bool:
    """Whether `node` makes what it made when it reads `copy` in place of `value`."""
    if not isinstance(node.op, Aten):
        return False
    metas = tuple(draft.values[copy if each == value else each].meta for each in node.inputs)
    made = [result.meta for result in predict(node.op, metas)]
    return made[: len(node.outputs)] == [graph.values[out].meta for out in node.outputs]
