"""Content keys: what a node or a graph is, whatever its ids are.

Problem.  The search must not visit one state twice, and measurements are kept for one call of one
operator wherever it stands.  A key that is blind to who reads which copy merges states that differ
(all ways to share out a recomputed value among its readers); a key that sees ids or the order of
independent nodes splits states that do not.

Method.  Arguments and results of a graph are ordered, so walking back from each result, inputs in
order, meets every live node on a path that no other node has: the order in which the walk finishes
them is a canonical numbering.  What no result needs (writes, dead code) follows, by the storage that
is written.  The key is a digest of the graph spelled with those numbers; no refinement rounds, no
approximation.

    %7 = relu(%2)    %9 = relu(%2)           one relu read by two: numbers 1, 1
    %8 = mul(%7, %3) %10 = add(%8, %9)       two relus read by one each: numbers 1, 2

Invariants.  Equal keys: the same operations on the same shapes, the same value at every reader, the
same storages, hazards and order of random draws.  Keys are the same in every process.

Not done.  Commutativity (``add(a, b)`` and ``add(b, a)`` differ); origins; a canonical place for several
equal dead nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.ops import Aten, Fission, Fused, Load, Op, Ref, Scalar, Store
from lowtide.ir.random import is_random
from lowtide.ir.spelling import spell_arg, spell_meta

__all__ = ["canonical_order", "graph_key", "node_key"]


def node_key(graph: Graph, node: Node) -> str:
    """A digest of the operation, its arguments, the metas of its inputs and the layouts of its outputs.

    Ids do not enter, nor do outputs that are row-major.
    """
    metas = ";".join(spell_meta(graph.values[value].meta) for value in node.inputs)
    writes = ",".join(str(node.inputs.index(value)) for value in node.writes)
    made = [graph.values[value].meta for value in node.outputs]
    laid = "" if all(meta.contiguous for meta in made) else "|" + ";".join(map(spell_meta, made))
    return _digest(f"{_spell_op(node.op)}|{metas}|{writes}{laid}")


def graph_key(graph: Graph) -> str:
    """A digest of the whole graph; kept with the graph once computed."""
    found = graph.memo.get(graph_key)
    if not isinstance(found, str):
        found = graph.memo[graph_key] = _digest("\n".join(_lines(graph)))
    return found


def canonical_order(graph: Graph) -> tuple[int, ...]:
    """All node ids, producers before readers, in an order that depends on the graph's content alone.

    It respects data edges; hazards between writes and reads are not considered.
    """
    done: dict[int, None] = {}
    for value in graph.outputs:
        if value in graph.producer:
            _visit(graph, graph.producer[value], done)
    for node in sorted(_sinks(graph), key=lambda node: _written_inputs(graph, node)):
        _visit(graph, node.id, done)
    return tuple(done)


def _visit(graph: Graph, root: int, done: dict[int, None]) -> None:
    """Append `root` and what it needs to `done`, inputs first and in order."""
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [
            graph.producer[value]
            for value in graph.node[node].inputs
            if value in graph.producer and graph.producer[value] not in done
        ]
        if missing and node not in done:
            stack.extend(reversed(missing))
        else:
            done[stack.pop()] = None


def _sinks(graph: Graph) -> Iterator[Node]:
    """Nodes whose outputs nobody reads, in program order."""
    for node in graph.nodes:
        if not any(graph.readers[value] for value in node.outputs):
            yield node


def _written_inputs(graph: Graph, node: Node) -> tuple[bool, tuple[int, ...], str]:
    """A rank for sinks: writers first, by the position of what they write among the graph's inputs."""
    storages = [graph.values[value].storage for value in graph.inputs]
    written = {graph.values[value].storage for value in node.writes}
    places = tuple(place for place, storage in enumerate(storages) if storage in written)
    return (not places, places, "" if places else node_key(graph, node))


def _lines(graph: Graph) -> Iterator[str]:
    """The graph in canonical numbers: inputs, nodes, results."""
    place = {node: number for number, node in enumerate(canonical_order(graph))}
    draws = [node.id for node in graph.nodes if is_random(node.op)]
    names: dict[int, str] = {}
    storages: dict[int, int] = {}

    def declare(value: Value, name: str) -> str:
        names[value.id] = name
        storage = graph.storages[value.storage]
        known = storage.id in storages
        number = storages.setdefault(storage.id, len(storages))
        new = "" if known else f" {storage.nbytes} {storage.role.value}"
        return f"{name}:{spell_meta(value.meta)}@{number}+{value.offset}{new}"

    for position, value in enumerate(graph.inputs):
        yield declare(graph.values[value], f"i{position}")
    for node_id, number in place.items():
        node = graph.node[node_id]
        inputs = ",".join(names[value] for value in node.inputs)
        writes = ",".join(names[value] for value in node.writes)
        after = sorted(place[before] for before in graph.dependencies[node_id])
        outputs = ",".join(
            declare(graph.values[value], f"{number}.{position}")
            for position, value in enumerate(node.outputs)
        )
        draw = f" draw {draws.index(node_id)}" if node_id in draws else ""
        yield f"{outputs}={_spell_op(node.op)}({inputs})!{writes} after {after}{draw}"
    yield "return " + ",".join(names[value] for value in graph.outputs)


def _spell_op(op: Op) -> str:
    """The operation with inputs by position and bodies by key."""
    match op:
        case Aten():
            args = [spell_arg(arg, _spell_ref) for arg in op.args]
            args += [f"{name}={spell_arg(arg, _spell_ref)}" for name, arg in op.kwargs]
            return f"{op.overload}({', '.join(args)})"
        case Fused():
            return f"fused {op.kind} {graph_key(op.body)}"
        case Fission():
            bodies = [graph_key(body) for body in op.bodies]
            return f"fission {bodies} {op.parts} {[merge.value for merge in op.merges]}"
        case Scalar():
            return f"scalar {op.expr}"
        case Store() | Load():
            return f"{type(op).__name__} {op.tier}"


def _spell_ref(ref: Ref) -> str:
    return f"${ref.index}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
