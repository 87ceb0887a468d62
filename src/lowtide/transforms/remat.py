"""Rematerialisation of segments: compute again what is cheaper to recompute than to keep.

rewrite:    a set of storages R and a set of *late* nodes.  Every late node that reads a storage of R
            reads a copy instead; the copy is made by a clone of the producer, placed right before the
            first late node that needs it.  Clones read copies of what is in R, originals of the rest,
            so a segment of any length is one edit (MAGIS clones one operator at a time: a chain of k
            needs k moves, each of which alone gains nothing).
legal when: the producer is neither random nor writes, is not late itself, its output is not an output
            of the graph, and no storage that it reads is overwritten before its copy is made (`apply`
            refuses that).
effect:     an original of R dies at its last early reader; a copy lives from its first to its last
            late reader; sources outside R live until the last clone that reads them; the clones' time
            is added.  Bit-equal: the same kernels on the same inputs.  A BatchNorm clone is the form
            without running statistics: they are updated once, by the original.

Not done here: choosing R (`lowtide.search.recompute`) and reordering.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from lowtide.ir import Aten, Edit, Graph, Node, Op, Ref, Storage, Value
from lowtide.ir.graph import Role
from lowtide.ir.ops import refs_in
from lowtide.ir.random import is_random

__all__ = ["RematCandidate", "apply", "clone_reads", "late_nodes", "owner_of", "recomputable", "segments"]

_LATE_PHASES = frozenset({"backward", "clip", "update"})


@dataclass(frozen=True)
class RematCandidate:
    """Storages to compute again for the late nodes, and who is late."""

    storages: frozenset[int]
    late: frozenset[int]


def late_nodes(graph: Graph) -> frozenset[int]:
    """The nodes that read copies by default: backward, clipping and update of a training step."""
    return frozenset(node.id for node in graph.nodes if node.origin.phase in _LATE_PHASES)


def owner_of(graph: Graph) -> dict[int, int]:
    """Storage id -> the node that allocates it (not a view, not a writer); resident ones are absent."""
    owner: dict[int, int] = {}
    for node in graph.nodes:
        for out in node.outputs:
            owner.setdefault(graph.values[out].storage, node.id)
    return owner


def recomputable(graph: Graph, late: frozenset[int]) -> frozenset[int]:
    """The storages that may be recomputed for the nodes in `late`."""
    owner = owner_of(graph)
    kept = {graph.values[value].storage for value in graph.outputs}
    overwritten = {graph.values[v].storage for n in graph.nodes if n.id not in late for v in n.writes}
    read_late = {graph.values[v].storage for n in graph.nodes if n.id in late for v in n.inputs}
    found: set[int] = set()
    for storage, producer in owner.items():
        node = graph.node[producer]
        if producer in late or storage in kept or node.writes or is_random(node.op):
            continue
        if graph.storages[storage].role.resident or graph.storages[storage].role is Role.HOST:
            continue
        if overwritten.intersection(clone_reads(graph, node)):
            continue  # the original reads the old content, a later copy would read the new one
        if storage not in _clone_makes(graph, node):
            continue  # new statistics of a BatchNorm: its clone has none
        found.add(storage)
    reach = _needed_by(graph, owner, read_late & found, found)
    return frozenset(reach)


_WITHOUT_STATISTICS = "aten._native_batch_norm_legit.no_stats"
_WITH_STATISTICS = "aten._native_batch_norm_legit_functional.default"


def _clone_of(node: Node) -> tuple[Op, tuple[int, ...], int]:
    """Operation, inputs and number of outputs of a node's clone.

    BatchNorm: (x, weight, bias, mean, var, training, momentum, eps) loses mean and var, and with them
    the outputs that would become the new running statistics.
    """
    op = node.op
    if isinstance(op, Aten) and op.overload == _WITH_STATISTICS and op.args[5] is True:
        args = (*op.args[:3], *op.args[5:])
        kept = sorted(set(refs_in(args)))
        renumbered = tuple(Ref(kept.index(a.index)) if isinstance(a, Ref) else a for a in args)
        return Aten(_WITHOUT_STATISTICS, renumbered), tuple(node.inputs[k] for k in kept), 3
    return op, node.inputs, len(node.outputs)


def clone_reads(graph: Graph, node: Node) -> frozenset[int]:
    """The storages that a clone of `node` would read."""
    return frozenset(graph.values[value].storage for value in _clone_of(node)[1])


def _clone_makes(graph: Graph, node: Node) -> frozenset[int]:
    """The storages that a clone of `node` would make again."""
    return frozenset(graph.values[value].storage for value in node.outputs[: _clone_of(node)[2]])


def _needed_by(graph: Graph, owner: Mapping[int, int], seeds: set[int], allowed: set[int]) -> set[int]:
    """The members of `allowed` that some chain of recomputation from `seeds` can use."""
    found = set(seeds)
    pending = list(seeds)
    while pending:
        for storage in clone_reads(graph, graph.node[owner[pending.pop()]]):
            if storage in allowed and storage not in found:
                found.add(storage)
                pending.append(storage)
    return found


def segments(graph: Graph, allowed: frozenset[int]) -> dict[str, frozenset[int]]:
    """Candidate segments by module path: the recomputable storages that stay inside each module.

    What early nodes outside a module read is kept, as a checkpoint of that module would.  The children of a
    list of modules (``layers.0``, ``layers.1``) also make one segment together, ``layers.*``.
    """
    owner = owner_of(graph)
    readers = _early_reader_modules(graph)
    found: dict[str, set[int]] = {}
    for storage in allowed:
        parts = graph.node[owner[storage]].origin.module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if all(_is_inside(module, path) for module in readers.get(storage, ())):
                found.setdefault(path, set()).add(storage)
                if parts[depth - 1].isdigit():
                    found.setdefault(".".join((*parts[: depth - 1], "*")), set()).add(storage)
    return {path: frozenset(members) for path, members in sorted(found.items())}


def _early_reader_modules(graph: Graph) -> dict[int, set[str]]:
    """Storage -> module paths of the forward nodes that read it."""
    found: dict[int, set[str]] = {}
    for node in graph.nodes:
        if node.origin.phase not in _LATE_PHASES:
            for value in node.inputs:
                found.setdefault(graph.values[value].storage, set()).add(node.origin.module)
    return found


def _is_inside(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


class _Rewriter:
    """One pass over the program order, emitting clones on demand."""

    def __init__(self, graph: Graph, chosen: Iterable[int]) -> None:
        self.graph = graph
        self.chosen = frozenset(chosen)
        self.owner = owner_of(graph)
        self.values: dict[int, Value] = dict(graph.values)
        self.storages: dict[int, Storage] = dict(graph.storages)
        self.nodes: list[Node] = []
        self.copies: dict[int, int] = {}
        self.written: set[int] = set()
        self.next_value = max(self.values, default=0) + 1
        self.next_storage = max(self.storages, default=0) + 1
        self.next_node = max((node.id for node in graph.nodes), default=0) + 1

    def is_chosen(self, value: int) -> bool:
        return self.graph.values[value].storage in self.chosen

    def read(self, value: int) -> int:
        """The id to read instead of `value`, emitting the clones that it needs."""
        pending = [value] if self.is_chosen(value) else []
        while pending:
            current = pending[-1]
            if current in self.copies:
                pending.pop()
                continue
            node = self.graph.node[self.graph.producer[current]]
            missing = [v for v in _clone_of(node)[1] if self.is_chosen(v) and v not in self.copies]
            if missing:
                pending.extend(missing)
            else:
                self.emit_clone(node)
                pending.pop()
        return self.copies.get(value, value)

    def emit_clone(self, node: Node) -> None:
        fresh: dict[int, int] = {}
        outputs: list[int] = []
        op, sources, count = _clone_of(node)
        for out in node.outputs[:count]:
            old = self.graph.values[out]
            storage = self.storage_of_copy(node, old, fresh)
            self.values[self.next_value] = Value(self.next_value, old.meta, storage, old.offset)
            if old.storage in self.chosen:
                self.copies[out] = self.next_value
            outputs.append(self.next_value)
            self.next_value += 1
        self.refuse_overwritten(node)
        inputs = tuple(self.copies.get(value, value) for value in sources)
        self.nodes.append(replace(node, id=self.next_node, op=op, inputs=inputs, outputs=tuple(outputs)))
        self.next_node += 1

    def refuse_overwritten(self, node: Node) -> None:
        late_reads = self.written & clone_reads(self.graph, node)
        if late_reads:
            raise ValueError(
                f"a copy of node {node.id} would read storages {sorted(late_reads)} after their update"
            )

    def storage_of_copy(self, node: Node, old: Value, fresh: dict[int, int]) -> int:
        for value in node.inputs:
            if self.graph.values[value].storage == old.storage:  # a view follows its copied base
                return self.values[self.copies[value]].storage
        if old.storage not in fresh:
            source = self.graph.storages[old.storage]
            self.storages[self.next_storage] = Storage(self.next_storage, source.nbytes, Role.TEMP)
            fresh[old.storage] = self.next_storage
            self.next_storage += 1
        return fresh[old.storage]

    def emit(self, node: Node, late: frozenset[int]) -> None:
        self.written.update(self.graph.values[value].storage for value in node.writes)
        if node.id not in late:
            self.nodes.append(node)
            return
        if self.graph.is_view(node) and any(self.is_chosen(value) for value in node.inputs):
            return  # its late readers clone it together with the storage that it views
        inputs = tuple(self.read(value) for value in node.inputs)
        self.nodes.append(replace(node, inputs=inputs))


def _without_dead(nodes: list[Node], outputs: tuple[int, ...]) -> tuple[Node, ...]:
    """Drop what nobody reads any more: originals whose only readers were late, and idle views."""
    live = set(outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.writes or is_random(node.op) or not node.outputs or live.intersection(node.outputs):
            kept.append(node)
            live.update(node.inputs)
    return tuple(reversed(kept))


def apply(graph: Graph, candidate: RematCandidate) -> Edit:
    """Recompute `candidate.storages` for the nodes in `candidate.late`; ids of old values are kept."""
    illegal = candidate.storages - recomputable(graph, candidate.late)
    if illegal:
        raise ValueError(f"storages {sorted(illegal)} cannot be recomputed for these late nodes")
    rewriter = _Rewriter(graph, candidate.storages)
    for node in graph.nodes:
        rewriter.emit(node, candidate.late)
    nodes = _without_dead(rewriter.nodes, graph.outputs)
    mentioned = {v for node in nodes for v in (*node.inputs, *node.outputs)}
    mentioned.update(graph.inputs, graph.outputs)
    values = {key: value for key, value in rewriter.values.items() if key in mentioned}
    used = {value.storage for value in values.values()}
    storages = {key: value for key, value in rewriter.storages.items() if key in used}
    gone = {value: None for value in graph.values if value not in values}
    return Edit(Graph(nodes, values, storages, graph.inputs, graph.outputs), gone)
