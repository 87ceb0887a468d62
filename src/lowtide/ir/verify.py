"""Is this a graph?  The invariants that every part relies on, numbered.

Problem.  A wrong edit shows up far from where it was made: as a wrong number, or as a byte that nobody
counted.  The checker does not trust whoever made the graph.

Method.  One small function per invariant, in an order in which each may rely on the ones before.  The
first fault is raised.  Bodies are graphs and are verified inside their node.

 1. Ids are unique, and every value and storage is filed under its own id.
 2. Every value that a node or the graph mentions exists, and so does every storage of a value.
 3. Every value comes from exactly one place: the graph's inputs or one output of one node.
 4. A node reads only what inputs and earlier nodes defined; every result of the graph is defined.
 5. Every storage has a value.
 6. A value lies inside its storage, with one stride per size, none of them negative.
 7. An output is fresh (the first value on a storage that is not the caller's) or a view (on the storage of
    one of its node's inputs).
 8. A graph takes only what its caller owns (resident storages, HOST numbers) and hands out only OUTPUT
    or resident storages.  Bodies are exempt: the graph around them owns what they take and give.
 9. A node writes only its inputs, and only resident storages; the body of a Fused may also write what it
    takes and what it made.
10. A storage that a body made and overwrote is read afterwards only through the value that was written,
    or through windows made since.  (Writes to resident storages mean what the program order says.)
11. The arguments of an Aten mention every input, and nothing else.
12. HOST numbers are 0-d, have no bytes, and come from the graph's inputs or a Scalar.
13. A Fused binds its body: same number, shapes, strides, types on both sides; it writes what the body
    writes, and a written storage is bound once.
14. A Fission binds its bodies: slices lie inside their tensors and have the shapes that the body takes and
    gives; the parts of a written output tile its axis, those of a merged one cover it.
15. A Store's copy is fresh, like its original, and read by Loads of its tier alone; a Load reads nothing
    else.

Not done.  Whether an operator's result really has the shape that its Value says, or really aliases
its input: only running it tells (`lowtide.capture.storages`, the reference executor).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lowtide.ir.bindings import Finding, fission_faults, fused_faults
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten, Fission, Fused, Load, Scalar, Store, refs_in
from lowtide.ir.text import print_node

__all__ = ["InvalidGraph", "verify"]


class InvalidGraph(ValueError):
    """A broken invariant: its number, the node it was found at (None for the graph), the values."""

    def __init__(self, invariant: int, finding: Finding, where: str) -> None:
        super().__init__(f"invariant {invariant}: {finding.what}{where}")
        self.invariant = invariant
        self.node = finding.node
        self.values = finding.values


@dataclass(frozen=True, slots=True)
class _Subject:
    """A graph and the kind of node that it is the body of ("" for a whole program)."""

    graph: Graph
    inside: str = ""


def verify(graph: Graph) -> None:
    """Raise InvalidGraph for the first invariant that `graph` breaks."""
    _verify(_Subject(graph), "")


def _verify(subject: _Subject, where: str) -> None:
    for invariant, check in _CHECKS.items():
        for finding in check(subject):
            raise InvalidGraph(invariant, finding, _locate(subject.graph, finding) + where)
    for node in subject.graph.nodes:
        for number, body in enumerate(_bodies(node)):
            kind = type(node.op).__name__
            _verify(_Subject(body, kind), f"; in body {number} of {kind} node {node.id}{where}")


def _bodies(node: Node) -> tuple[Graph, ...]:
    match node.op:
        case Fused():
            return (node.op.body,)
        case Fission():
            return node.op.bodies
    return ()


def _locate(graph: Graph, finding: Finding) -> str:
    node = next((node for node in graph.nodes if node.id == finding.node), None)
    return "" if node is None else f"; node {node.id}: `{print_node(graph, node)}`"


def _ids(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    for node, count in Counter(node.id for node in graph.nodes).items():
        if count > 1:
            yield Finding(f"{count} nodes have the id {node}", node)
    for key, value in graph.values.items():
        if value.id != key:
            yield Finding(f"value %{value.id} is filed as %{key}", values=(key, value.id))
    for key, storage in graph.storages.items():
        if storage.id != key:
            yield Finding(f"storage s{storage.id} is filed as s{key}")


def _mentions(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs, *node.writes):
            if value not in graph.values:
                yield Finding(f"value %{value} does not exist", node.id, (value,))
    for value in (*graph.inputs, *graph.outputs):
        if value not in graph.values:
            yield Finding(
                f"value %{value} is an input or result of the graph but does not exist", values=(value,)
            )
    for found in graph.values.values():
        if found.storage not in graph.storages:
            yield Finding(
                f"value %{found.id} is on storage s{found.storage}, which does not exist", values=(found.id,)
            )


def _sources(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    made: dict[int, int | None] = {}
    for value in graph.inputs:
        if value in made:
            yield Finding(f"%{value} is twice among the graph's inputs", values=(value,))
        made[value] = None
    for node in graph.nodes:
        for value in node.outputs:
            if value in made:
                other = "the graph's inputs" if made[value] is None else f"node {made[value]}"
                yield Finding(f"%{value} comes from {other} already", node.id, (value,))
            made[value] = node.id
    for value in graph.values:
        if value not in made:
            yield Finding(
                f"%{value} is neither an input of the graph nor an output of a node", values=(value,)
            )


def _order(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    defined = set(graph.inputs)
    for node in graph.nodes:
        for value in node.inputs:
            if value not in defined:
                yield Finding(f"%{value} is read before it is defined", node.id, (value,))
        defined.update(node.outputs)
    for value in graph.outputs:
        if value not in defined:
            yield Finding(f"%{value} is a result of the graph but never defined", values=(value,))


def _viewed(subject: _Subject) -> Iterator[Finding]:
    used = {value.storage for value in subject.graph.values.values()}
    for storage in subject.graph.storages:
        if storage not in used:
            yield Finding(f"storage s{storage} has no value")


def _windows(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    for value in graph.values.values():
        meta, storage = value.meta, graph.storages[value.storage]
        at = graph.producer.get(value.id)
        if len(meta.shape) != len(meta.stride):
            yield Finding(
                f"%{value.id} has {len(meta.shape)} sizes and {len(meta.stride)} strides", at, (value.id,)
            )
        elif min((*meta.shape, *meta.stride, value.offset)) < 0:
            yield Finding(f"%{value.id} has a negative size, stride or offset", at, (value.id,))
        elif storage.role is not Role.HOST and meta.numel:
            need = value.offset * meta.dtype.itemsize + meta.span_bytes
            if need > storage.nbytes:
                what = f"%{value.id} reaches byte {need} of storage s{storage.id}, which has {storage.nbytes}"
                yield Finding(what, at, (value.id,))


def _freshness(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    known = {graph.values[value].storage for value in graph.inputs}
    for node in graph.nodes:
        given = {graph.values[value].storage for value in node.inputs}
        made = {graph.values[value].storage for value in node.outputs}
        for value in node.outputs:
            storage = graph.storage_of(value)
            if storage.id in known and storage.id not in given:
                what = (
                    f"%{value} is on storage s{storage.id}, which exists already and is none of its inputs'"
                )
                yield Finding(what, node.id, (value,))
            if storage.id not in known and storage.role.resident:
                what = f"%{value} makes storage s{storage.id} of role {storage.role.value}, the caller's"
                yield Finding(what, node.id, (value,))
        known |= made


def _border(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    if subject.inside:
        return
    for value in graph.inputs:
        role = graph.storage_of(value).role
        if not role.resident and role is not Role.HOST:
            yield Finding(f"input %{value} has role {role.value}; nobody counts its bytes", values=(value,))
    for value in graph.outputs:
        role = graph.storage_of(value).role
        if not role.resident and role is not Role.OUTPUT:
            what = f"result %{value} is on a storage of role {role.value}, which dies with the step"
            yield Finding(what, graph.producer.get(value), (value,))


def _writes(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    for node in graph.nodes:
        for value in node.writes:
            role = graph.storage_of(value).role
            if value not in node.inputs:
                yield Finding(f"%{value} is written but is no input", node.id, (value,))
            elif role is Role.HOST or not (role.resident or subject.inside == "Fused"):
                what = (
                    f"%{value} is written, but its storage has role {role.value}; a temporary has one value"
                )
                yield Finding(what, node.id, (value,))


def _stale_reads(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    written: dict[int, tuple[int, int]] = {}  # storage -> position of its last write, value it went through
    born = dict.fromkeys(graph.inputs, -1)
    for position, node in enumerate(graph.nodes):
        for value in node.inputs:
            storage = graph.storage_of(value)
            when, through = written.get(storage.id, (-1, value))
            if not storage.role.resident and through != value and born[value] <= when:
                what = f"%{value} is read after its storage s{storage.id} was overwritten through %{through}"
                yield Finding(what, node.id, (value, through))
        born.update(dict.fromkeys(node.outputs, position))
        written.update({graph.values[value].storage: (position, value) for value in node.writes})


def _arguments(subject: _Subject) -> Iterator[Finding]:
    for node in subject.graph.nodes:
        if not isinstance(node.op, Aten):
            continue
        refs = set(refs_in((*node.op.args, *(arg for _, arg in node.op.kwargs))))
        if refs != set(range(len(node.inputs))):
            what = f"the arguments mention inputs {sorted(refs)}, the node has {len(node.inputs)}"
            yield Finding(what, node.id, node.inputs)


def _host_numbers(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    for value in graph.values.values():
        storage = graph.storages[value.storage]
        on_host = storage.role is Role.HOST
        maker = graph.producer.get(value.id)
        if on_host != (value.meta.device == "host"):
            what = f"%{value.id} has device {value.meta.device} and a storage of role {storage.role.value}"
            yield Finding(what, maker, (value.id,))
        elif on_host and (value.meta.shape or storage.nbytes):
            yield Finding(f"number %{value.id} has a shape or bytes", maker, (value.id,))
        elif on_host and maker is not None and not isinstance(graph.node[maker].op, Scalar):
            yield Finding(f"number %{value.id} comes from no Scalar", maker, (value.id,))


def _fused(subject: _Subject) -> Iterator[Finding]:
    for node in subject.graph.nodes:
        if isinstance(node.op, Fused):
            yield from fused_faults(subject.graph, node, node.op)


def _fission(subject: _Subject) -> Iterator[Finding]:
    for node in subject.graph.nodes:
        if isinstance(node.op, Fission):
            yield from fission_faults(subject.graph, node, node.op)


def _tiers(subject: _Subject) -> Iterator[Finding]:
    graph = subject.graph
    stored: dict[int, str] = {}
    for node in graph.nodes:
        op = node.op
        if isinstance(op, Store | Load):
            if len(node.inputs) != 1 or len(node.outputs) != 1:
                yield Finding(f"a {type(op).__name__} has one input and one output", node.id)
                continue
            before, after = graph.values[node.inputs[0]], graph.values[node.outputs[0]]
            if (before.meta.shape, before.meta.dtype) != (after.meta.shape, after.meta.dtype):
                yield Finding(
                    f"%{after.id} is unlike its original %{before.id}", node.id, (before.id, after.id)
                )
            if before.storage == after.storage:
                yield Finding(
                    f"copy %{after.id} shares its original's storage", node.id, (before.id, after.id)
                )
        if isinstance(op, Store):
            stored[graph.values[node.outputs[0]].storage] = op.tier
        for value in node.inputs:
            tier = stored.get(graph.values[value].storage)
            if isinstance(op, Load) and tier != op.tier:
                what = f"%{value} is on tier {tier or 'device'}, the Load reads {op.tier}"
                yield Finding(what, node.id, (value,))
            elif tier and not isinstance(op, Load):
                yield Finding(f"%{value} is on tier {tier}; only its Loads may read it", node.id, (value,))


_CHECKS: dict[int, Callable[[_Subject], Iterator[Finding]]] = {
    1: _ids,
    2: _mentions,
    3: _sources,
    4: _order,
    5: _viewed,
    6: _windows,
    7: _freshness,
    8: _border,
    9: _writes,
    10: _stale_reads,
    11: _arguments,
    12: _host_numbers,
    13: _fused,
    14: _fission,
    15: _tiers,
}
