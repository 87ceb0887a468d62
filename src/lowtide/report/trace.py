"""A graph in an order, as the curve, the blocks and the holders that a report shows.

Method.  `analysis.timeline` says which Buffers are alive when; here each step and each Buffer gets the name
of its operator, its module path and its source line.  A Fission is opened: its parts follow one another as
steps of their own, and its workspace becomes the buffers of its bodies, as `lowtide.run.fission_steps`
lays them out.  What a Buffer is for follows from the phase of the node that makes it and from the first
step of the backward in its graph (or body):

              forward            |first backward step
    forward   [-----)            |
    saved          [-------------|-------)
    recomputed                   |    [------)     made by a node of the forward
    backward                     |      [-------)  made by a node of backward, clip or update

A step is known by its trail (`lowtide.run.steps`), by which what was measured finds what was predicted.

Invariants.  A step's bytes are the bytes of the Buffers that span it; a Fission's workspace counts as what
its bodies hold.  With more than `MOST_STEPS` steps only the first part of each Fission is opened.

Not done.  The calls inside an update or a fused kernel: one step each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten, Fission, Fused, Load, Op, Scalar, Store
from lowtide.report.data import Block, Curve, Holder, Resident, Step
from lowtide.run.fission_steps import lay_out_body
from lowtide.run.layout import Piece
from lowtide.run.probe import FactsTree, Path
from lowtide.run.steps import Trail

__all__ = ["Price", "Trace", "family_of", "label_of", "resident_by_role", "trace"]

Price = Callable[[Graph], Mapping[int, float]]
"""Seconds by node id of a graph, or of a body."""

EARLY = frozenset({"forward", "loss"})
MOST_STEPS = 9_000
ROLE_WORDS = {
    Role.PARAM: "parameters",
    Role.STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "arguments",
    Role.CONST: "constants",
}


@dataclass(frozen=True)
class Trace:
    """What an order does with memory: live bytes per step, blocks with offsets, holders at the peak.

    `trails` and `families` belong to the curve's steps; a part that was not opened has the trail of the part.
    `merging_s` are the predicted seconds of bringing parts' results to the wholes, which are in no step.
    """

    curve: Curve
    blocks: tuple[Block, ...]
    holders: tuple[Holder, ...]
    trails: tuple[Trail, ...] = ()
    families: tuple[str, ...] = ()
    merging_s: float = 0.0


def trace(
    graph: Graph,
    order: Sequence[int],
    tree: FactsTree,
    *,
    inplace: bool = False,
    offsets: Mapping[int, int] | None = None,
    pieces: Sequence[Piece] = (),
    price: Price | None = None,
) -> Trace:
    """Trace `graph` in `order` with the facts in `tree`; `offsets` is by the id of Buffers and `pieces`.

    Only what has an offset becomes a block: what is handed to the caller is not in the arena, and temporaries
    are drawn one by one (those of a step may share bytes with its result).  A Fission whose bodies have no
    facts in `tree` stays closed.
    """
    walk = _Walk(tree, price or (lambda graph: {}), _opens_all(graph))
    buffers = lifetimes(graph, order, tree[()], inplace)
    walk.enter(_Run(graph, tuple(order), (), buffers, offsets or {}, pieces=pieces))
    curve = Curve(tuple(walk.steps), graph.resident_bytes)
    peak = curve.peak_step
    at_peak = (span for span in walk.spans if span.start <= peak < span.stop and span.nbytes)
    blocks = tuple(span.block() for span in (*walk.spans, *walk.pieces) if span.offset is not None)
    holders = tuple(span.holder() for span in at_peak)
    return Trace(curve, blocks, holders, tuple(walk.trails), tuple(walk.families), walk.merging_s)


def _opens_all(graph: Graph) -> bool:
    return sum(_unrolled(node) for node in graph) <= MOST_STEPS


def _unrolled(node: Node) -> int:
    if not isinstance(node.op, Fission):
        return 1
    return sum(_unrolled(inner) for part in node.op.parts for inner in node.op.bodies[part.body])


@dataclass(frozen=True)
class _Run:
    """A graph or a body (at `trail`) in its order, with its Buffers; `place` is where its offsets begin."""

    graph: Graph
    order: tuple[int, ...]
    path: Path
    buffers: tuple[Buffer, ...]
    offsets: Mapping[int, int]
    place: int | None = 0
    above_bytes: int = 0
    part: str = ""
    trail: Trail = ()

    pieces: Sequence[Piece] = field(default=(), kw_only=True)

    def live(self) -> list[int]:
        """Bytes of its Buffers per step; what a body hands out belongs to the graph around it."""
        change = [0] * (len(self.order) + 1)
        for buffer in self.counted():
            change[buffer.start] += buffer.nbytes
            change[buffer.stop] -= buffer.nbytes
        return list(accumulate(change[:-1]))

    def counted(self) -> Iterator[Buffer]:
        return (buffer for buffer in self.buffers if not (self.path and buffer.kind == "output"))


@dataclass(frozen=True)
class _Span:
    """A Buffer with its name, in steps of the whole trace."""

    node: Node
    nbytes: int
    start: int
    stop: int
    kind: str
    offset: int | None

    def block(self) -> Block:
        origin, offset = self.node.origin, self.offset or 0
        label = label_of(self.node.op)
        return Block(
            self.start, self.stop, offset, self.nbytes, label, origin.module, origin.source, self.kind
        )

    def holder(self) -> Holder:
        origin = self.node.origin
        return Holder(self.nbytes, label_of(self.node.op), origin.module, origin.source, self.kind)


@dataclass
class _Walk:
    """Collects the steps and Buffers of a graph and of the bodies in it, in the order in which they run."""

    tree: FactsTree
    price: Price
    opens_all: bool
    steps: list[Step] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    pieces: list[_Span] = field(default_factory=list)
    trails: list[Trail] = field(default_factory=list)
    families: list[str] = field(default_factory=list)
    merging_s: float = 0.0

    def enter(self, run: _Run) -> None:
        """Append the steps and Buffers of `run`."""
        nodes = [run.graph.node[node] for node in run.order]
        seconds, live = self.price(run.graph), run.live()
        starts, opened = [], set()
        for k, node in enumerate(nodes):
            starts.append(len(self.steps))
            inner = self._bodies(run, node)
            if inner:
                opened.add(k)
                base = run.above_bytes + live[k] - _workspace(run, k)
                self.merging_s += seconds.get(node.id, 0.0) - self._inside_s(node, inner)
                self._open(run, k, inner, base)
            else:
                step = _step(node, run.above_bytes + live[k], seconds.get(node.id, 0.0), run.part)
                self._append(step, (*run.trail, k), node.op)
        starts.append(len(self.steps))
        kinds = _Kinds(nodes)
        for buffer in run.counted():
            if buffer.kind == "workspace" and buffer.start in opened:
                continue
            maker = _maker(run.graph, nodes[buffer.start], buffer)
            span = (starts[buffer.start], starts[buffer.stop])
            self.spans.append(_Span(maker, buffer.nbytes, *span, kinds.of(buffer), _offset(run, buffer.id)))
        for piece in run.pieces:
            span = (starts[piece.step], starts[piece.step + 1])
            offset = _offset(run, piece.id)
            self.pieces.append(_Span(nodes[piece.step], piece.group.nbytes, *span, "workspace", offset))

    def _append(self, step: Step, trail: Trail, op: Op) -> None:
        self.steps.append(step)
        self.trails.append(trail)
        self.families.append(family_of(op))

    def _inside_s(self, node: Node, bodies: Sequence[Graph]) -> float:
        """Seconds of what the parts of a Fission compute."""
        assert isinstance(node.op, Fission)
        seconds = [sum(self.price(body).values()) for body in bodies]
        return sum(seconds[part.body] for part in node.op.parts)

    def _bodies(self, run: _Run, node: Node) -> tuple[Graph, ...]:
        """The bodies of a Fission as they run; empty for other nodes and where facts are missing."""
        if not isinstance(node.op, Fission):
            return ()
        paths = [(*run.path, node.id, number) for number in range(len(node.op.bodies))]
        if any(path not in self.tree for path in paths):
            return ()
        ways = deliveries(run.graph, node)
        return tuple(body_as_run(body, ways) for body in node.op.bodies)

    def _open(self, run: _Run, k: int, bodies: Sequence[Graph], base: int) -> None:
        node = run.graph.node[run.order[k]]
        assert isinstance(node.op, Fission)
        ways = deliveries(run.graph, node)
        workspace = next((b for b in run.buffers if b.kind == "workspace" and b.start == k), None)
        place = None if workspace is None else _offset(run, workspace.id)
        for number, part in enumerate(node.op.parts):
            path = (*run.path, node.id, part.body)
            layout = lay_out_body(node.op.bodies[part.body], ways, self.tree[path])
            body = bodies[part.body]
            order = tuple(inner.id for inner in body)
            name = f"part {number + 1} of {len(node.op.parts)}"
            trail = (*run.trail, k, number)
            place_of = (layout.buffers, layout.offsets, place, base, name, trail)
            inner = _Run(body, order, path, *place_of, pieces=layout.pieces)
            if number and not self.opens_all:
                self._close(node, inner)
            else:
                self.enter(inner)

    def _close(self, node: Node, run: _Run) -> None:
        """A part as a single step."""
        peak, seconds = max(run.live(), default=0), sum(self.price(run.graph).values())
        self._append(_step(node, run.above_bytes + peak, seconds, run.part), run.trail, node.op)


def _step(node: Node, above_bytes: int, seconds: float, part: str) -> Step:
    origin = node.origin
    return Step(above_bytes, label_of(node.op), origin.module, origin.source, _phase(node), seconds, part)


def _maker(graph: Graph, node: Node, buffer: Buffer) -> Node:
    """The node that fills `buffer`: for a result of a Fission, the node of its body that computes it."""
    if isinstance(node.op, Fission):
        body = node.op.bodies[node.op.parts[0].body]
        for outer, inner in zip(node.outputs, body.outputs, strict=True):
            if graph.values[outer].storage in buffer.storages and inner in body.producer:
                return body.node[body.producer[inner]]
    return node


def _workspace(run: _Run, k: int) -> int:
    return sum(buffer.nbytes for buffer in run.buffers if buffer.kind == "workspace" and buffer.start == k)


def _offset(run: _Run, number: int) -> int | None:
    if run.place is None or number not in run.offsets:
        return None
    return run.place + run.offsets[number]


def _phase(node: Node) -> str:
    """The node's phase; what only writes the caller's tensors (running statistics) is an update."""
    if isinstance(node.op, Fission):
        phases = [_phase(inner) for body in node.op.bodies for inner in body]
        return next((phase for phase in phases if phase not in EARLY), node.origin.phase)
    return "update" if node.writes and not node.outputs else node.origin.phase


class _Kinds:
    """What the Buffers of one run are for."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.late = [_phase(node) not in EARLY for node in nodes]
        # Running statistics are updated in the middle of the forward: they do not begin the backward.
        begins = (k for k, node in enumerate(nodes) if _phase(node) == "backward" and node.inputs)
        self.first_late = next(begins, len(nodes))

    def of(self, buffer: Buffer) -> str:
        """saved, forward, recomputed, backward, workspace or output."""
        if buffer.kind != "value":
            return buffer.kind
        if self.late[buffer.start]:
            return "backward"
        if buffer.start > self.first_late:
            return "recomputed"
        return "saved" if buffer.stop > self.first_late else "forward"


def label_of(op: Op) -> str:
    """What a node does, in a few words: the overload, or what a group is made of."""
    match op:
        case Aten():
            return op.overload
        case Fused(body=body, kind="update"):
            return f"update of {len(body)} operators"
        case Fused(body=body):
            inside = [label_of(node.op).removeprefix("aten.").split(".")[0] for node in body]
            more = f"+{len(inside) - 4} more" if len(inside) > 4 else ""
            return "fused " + "+".join(inside[:4]) + more
        case Fission():
            return f"{len(op.parts)} parts of {max(len(body) for body in op.bodies)} operators"
        case Scalar():
            return f"scalar {op.expr}"
        case Store():
            return f"store to {op.tier}"
        case Load():
            return f"load from {op.tier}"


_PRODUCTS = ("convolution", "mm", "linear", "attention", "matmul", "mv")
_REDUCTIONS = ("norm", "softmax", "sum", "mean", "var", "amax", "nll_loss")


def family_of(op: Op) -> str:
    """The operators that an operation is like where time is concerned."""
    match op:
        case Aten():
            return op.overload.removeprefix("aten.").split(".")[0].rstrip("_")
        case Fused(kind="update"):
            return "update"
        case Fused(body=body):
            names = " ".join(label_of(node.op) for node in body)
            if any(word in names for word in _PRODUCTS):
                return "fused with a product"
            return "fused rows" if any(word in names for word in _REDUCTIONS) else "fused pointwise"
        case Fission():
            return "parts"
        case Scalar():
            return "scalar"
        case Store() | Load():
            return "swap"


def resident_by_role(graph: Graph) -> tuple[Resident, ...]:
    """Bytes of the storages that the caller owns, by role; roles without bytes are left out."""
    found = dict.fromkeys(ROLE_WORDS, 0)
    for storage in graph.storages.values():
        if storage.role.resident:
            found[storage.role] += storage.nbytes
    return tuple(Resident(ROLE_WORDS[role], nbytes) for role, nbytes in found.items() if nbytes)
