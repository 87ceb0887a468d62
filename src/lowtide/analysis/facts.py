"""What an operator really allocates, beside what the graph says.

Problem.  A Storage's size in the graph is what its values need.  The allocator may see more: an
operator keeps a bigger storage than its result (`mse_loss` on CPU), or takes blocks while it runs
and frees them before it returns.

Method.  `OperatorFacts` describes one call of one operator with its shapes and strides.  Probing
(`lowtide.run.probe`) measures them; `assumed_facts` writes down what the graph alone implies, so
that every analysis works without a measurement.

Invariants.  `transient_bytes` covers the fresh outputs.  A view allocates nothing.  A Store's copy
lives on another tier and counts nothing here.

Not done.  Times; bytes outside the allocator other than `hidden_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Fission, Fused, Store

__all__ = [
    "Facts",
    "OperatorFacts",
    "Temp",
    "assumed_facts",
    "fresh_bytes",
    "fresh_outputs",
    "workspace_bytes",
]


@dataclass(frozen=True, slots=True)
class Temp:
    """An allocator block that is freed inside the operator.

    `start` and `stop` are event numbers inside the operator: its allocations and frees, counted
    from 0 in time order; the block exists in ``[start, stop)``.
    """

    nbytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What one operator call does to the allocator.

    output_bytes: true storage bytes of each fresh output, 0 for a view.
    transient_bytes: most allocator bytes live at once while it runs, its fresh outputs included.
    temps: blocks that are freed inside the operator.
    sequence: allocator requests in order, ``(nbytes, j)``: j >= 0 becomes the storage of output j,
        j < 0 is ``temps[-1 - j]``.
    hidden_bytes: what the process's high-water mark shows beyond the allocator.
    foreign_bytes: what is never placed in an arena: requests of other threads, results that are copied.
    assumed: nobody looked; such an operator's requests are unknown, so they are never answered from an arena.
    inplace: (output, input) pairs that may share memory, of a fused kernel; for other operators a table has
        them (`lowtide.analysis.inplace`).
    """

    output_bytes: tuple[int, ...]
    transient_bytes: int
    temps: tuple[Temp, ...] = ()
    sequence: tuple[tuple[int, int], ...] = ()
    hidden_bytes: int = 0
    foreign_bytes: int = 0
    assumed: bool = False
    inplace: tuple[tuple[int, int], ...] = ()


Facts = Mapping[int, OperatorFacts]
"""Facts by node id; nodes that allocate nothing may be absent."""

_NOTHING = OperatorFacts((), 0)


def fresh_outputs(graph: Graph, node: Node) -> dict[int, tuple[int, ...]]:
    """The storages that `node` brings into being on the device: storage id -> output positions on it."""
    if isinstance(node.op, Store):
        return {}
    values, storages = graph.values, graph.storages
    given = {values[value].storage for value in node.inputs}
    found: dict[int, tuple[int, ...]] = {}
    for position, out in enumerate(node.outputs):
        storage = values[out].storage
        if storage not in given and storages[storage].role is not Role.HOST:
            found[storage] = (*found.get(storage, ()), position)
    return found


def fresh_bytes(graph: Graph, node: Node, facts: Facts) -> dict[int, int]:
    """The storages that `node` brings into being, with their true bytes.

    Raises KeyError if `facts` lacks a node that allocates.
    """
    fresh = fresh_outputs(graph, node)
    if not fresh:
        return {}
    if node.id not in facts:
        raise KeyError(f"no facts for node {node.id} ({node.op}), which allocates: probe it first")
    sizes = facts[node.id].output_bytes
    return {storage: max(sizes[position] for position in where) for storage, where in fresh.items()}


def workspace_bytes(graph: Graph, node: Node, facts: Facts) -> int:
    """Bytes that `node` needs while it runs, beyond its fresh outputs; never negative."""
    transient = facts.get(node.id, _NOTHING).transient_bytes
    return max(0, transient - sum(fresh_bytes(graph, node, facts).values())) if transient else 0


def assumed_facts(graph: Graph) -> dict[int, OperatorFacts]:
    """Facts without a measurement: outputs at their Storage's size, no workspace.

    Nested bodies count: an update runs its body call by call, and a Fission holds one part at a
    time beside its outputs (`lowtide.analysis.parts`).  A fused kernel stores no intermediate.
    """
    return {node.id: _assume(graph, node) for node in graph.nodes}


def _assume(graph: Graph, node: Node) -> OperatorFacts:
    sizes = [0] * len(node.outputs)
    for storage, where in fresh_outputs(graph, node).items():
        sizes[where[0]] = graph.storages[storage].nbytes
    transient_bytes = sum(sizes) + _inside_bytes(graph, node)
    return OperatorFacts(tuple(sizes), transient_bytes, assumed=transient_bytes > 0)


def _inside_bytes(graph: Graph, node: Node) -> int:
    """The most bytes that the bodies of `node` hold at once, beside its inputs and outputs."""
    if isinstance(node.op, Fused) and node.op.kind == "update":
        return _body_peak_bytes(node.op.body)
    if isinstance(node.op, Fission):
        ways = deliveries(graph, node)
        return max((_body_peak_bytes(body_as_run(body, ways)) for body in node.op.bodies), default=0)
    return 0


def _body_peak_bytes(body: Graph) -> int:
    """Peak of a body in program order, without inputs and outputs: they belong to the graph around it."""
    facts = assumed_facts(body)
    last: dict[int, int] = {}
    given = {body.values[value].storage for value in body.outputs}
    for node in reversed(body.nodes):
        for value in (*node.inputs, *node.outputs):
            last.setdefault(body.values[value].storage, node.id)
    sizes: dict[int, int] = {}
    peak = live = 0
    for node in body.nodes:
        workspace = workspace_bytes(body, node, facts)
        fresh = {key: size for key, size in fresh_bytes(body, node, facts).items() if key not in given}
        sizes.update(fresh)
        live += sum(fresh.values())
        peak = max(peak, live + workspace)
        for storage in {body.values[value].storage for value in (*node.inputs, *node.outputs)}:
            if last[storage] == node.id:
                live -= sizes.pop(storage, 0)
    return peak
