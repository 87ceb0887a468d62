"""A graph in an order, as the curve, the blocks and the holders that a report shows.

Method.  `analysis.timeline` says which Buffers are alive when; here each step and each Buffer gets the name
of its operator, its module path and its source line.  What a Buffer is for follows from the phase of the
node that makes it and from the first step of the backward:

              forward            |first backward step
    forward   [-----)            |
    saved          [-------------|-------)
    recomputed                   |    [------)     made by a node of the forward
    backward                     |      [-------)  made by a node of backward, clip or update

Not done: the inside of a Fission; its bodies' buffers count as the node's workspace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.analysis.facts import Facts
from lowtide.analysis.lifetime import Buffer
from lowtide.analysis.timeline import Timeline, timeline
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten, Fission, Fused, Load, Op, Scalar, Store
from lowtide.report.data import Block, Curve, Holder, Resident, Step

__all__ = ["Trace", "label_of", "resident_by_role", "trace"]

EARLY = frozenset({"forward", "loss"})
ROLE_WORDS = {
    Role.PARAM: "parameters",
    Role.STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "arguments",
    Role.CONST: "constants",
}


@dataclass(frozen=True)
class Trace:
    """What an order does with memory: live bytes per step, blocks with offsets, holders at the peak."""

    curve: Curve
    blocks: tuple[Block, ...]
    holders: tuple[Holder, ...]


def trace(
    graph: Graph,
    order: Sequence[int],
    facts: Facts,
    *,
    inplace: bool = False,
    offsets: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
) -> Trace:
    """Trace `graph` in `order`; `offsets` is by Buffer id, `seconds` by node id, both may be absent.

    Only Buffers with an offset become blocks: what is handed to the caller is not in the arena.
    """
    seen = timeline(graph, order, facts, inplace)
    naming = _Naming(graph, order)
    curve = Curve(_steps(naming, seen, seconds or {}), graph.resident_bytes)
    blocks = tuple(
        naming.block(buffer, offsets[buffer.id])
        for buffer in seen.buffers
        if offsets and buffer.id in offsets
    )
    holders = tuple(naming.holder(buffer) for buffer in seen.alive(seen.peak_step) if buffer.nbytes)
    return Trace(curve, blocks, holders)


def _steps(naming: _Naming, seen: Timeline, seconds: Mapping[int, float]) -> tuple[Step, ...]:
    return tuple(
        Step(
            above,
            label_of(node.op),
            node.origin.module,
            node.origin.source,
            _phase(node),
            seconds.get(node.id, 0.0),
        )
        for above, node in zip(seen.above_bytes, naming.nodes, strict=True)
    )


def _phase(node: Node) -> str:
    """The node's phase; what only writes the caller's tensors (running statistics) is an update."""
    return "update" if node.writes and not node.outputs else node.origin.phase


class _Naming:
    """Names for the Buffers of one order."""

    def __init__(self, graph: Graph, order: Sequence[int]) -> None:
        self.nodes: tuple[Node, ...] = tuple(graph.node[node] for node in order)
        late = (step for step, node in enumerate(self.nodes) if node.origin.phase not in EARLY)
        self.first_late = next(late, len(self.nodes))

    def kind(self, buffer: Buffer) -> str:
        """saved, forward, recomputed, backward, workspace or output."""
        if buffer.kind != "value":
            return buffer.kind
        if self.nodes[buffer.start].origin.phase not in EARLY:
            return "backward"
        if buffer.start > self.first_late:
            return "recomputed"
        return "saved" if buffer.stop > self.first_late else "forward"

    def block(self, buffer: Buffer, offset_bytes: int) -> Block:
        node = self.nodes[buffer.start]
        return Block(
            buffer.start,
            buffer.stop,
            offset_bytes,
            buffer.nbytes,
            label_of(node.op),
            node.origin.module,
            node.origin.source,
            self.kind(buffer),
        )

    def holder(self, buffer: Buffer) -> Holder:
        node = self.nodes[buffer.start]
        return Holder(
            buffer.nbytes, label_of(node.op), node.origin.module, node.origin.source, self.kind(buffer)
        )


def label_of(op: Op) -> str:
    """What a node does, in a few words: the overload, or what a group is made of."""
    match op:
        case Aten():
            return op.overload
        case Fused(body=body, kind="update"):
            return f"update of {len(body)} operators"
        case Fused(body=body):
            inside = [label_of(node.op).removeprefix("aten.").split(".")[0] for node in body]
            return "fused " + "+".join(inside[:4]) + (f"+{len(inside) - 4} more" if len(inside) > 4 else "")
        case Fission():
            return f"{len(op.parts)} parts of {max(len(body) for body in op.bodies)} operators"
        case Scalar():
            return f"scalar {op.expr}"
        case Store():
            return f"store to {op.tier}"
        case Load():
            return f"load from {op.tier}"


def resident_by_role(graph: Graph) -> tuple[Resident, ...]:
    """Bytes of the storages that the caller owns, by role; roles without bytes are left out."""
    found = dict.fromkeys(ROLE_WORDS, 0)
    for storage in graph.storages.values():
        if storage.role.resident:
            found[storage.role] += storage.nbytes
    return tuple(Resident(ROLE_WORDS[role], nbytes) for role, nbytes in found.items() if nbytes)
