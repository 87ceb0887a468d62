"""Where every storage of a graph lies while it runs in one order: the arena and the output slots.

Problem.  Lifetimes say when bytes are taken, a placement says at which offset; the executor asks where a
given storage is, and where an operator's temporaries are.

Method.  Buffers (in-place reuse included) that the caller does not receive are placed in the arena; each
output Buffer is a slot of its own, allocated fresh for every call.  Until its result comes, a slot has room
for *guests*: values and temporaries that are gone by then, so that large results do not come on top of
everything else.  A step is as many moments long as its operator has events (`lowtide.run.temps`), so a
temporary that is gone before the operator asks for its output may lie where that will be, in part or beside
others, and takes nothing of its own:

    offset ^  +-------+
           |  | %4    |+--+----+
           |  +----+--++t |    |      slot 1: the loss
           |  | %2 |   |  | %7 |      t is a temporary of the operator that makes %7
           +--+----+---+--+----+--> moment

Invariant.  What is taken at the same moment does not share a byte.

Not done.  Guests in the results of a body (the slices of a Fission's outputs), but for temporaries of the
operator that makes it; workspaces of bodies as guests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from lowtide.analysis.facts import Facts, fresh_outputs
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten
from lowtide.place.greedy import place_greedy
from lowtide.place.problem import Block, Placement, PlacementProblem
from lowtide.run.temps import ALIGNMENT, Group, Inside, align, first_gap, inside_of

__all__ = [
    "Guests",
    "Layout",
    "Location",
    "Piece",
    "Tenants",
    "guests_of",
    "lay_out",
    "placement_problem",
    "problem_of",
    "tenants_of",
]

Guests = Mapping[int, tuple[int, int]]
"""Buffer or Piece id -> (output slot, offset in it)."""


@dataclass(frozen=True, slots=True)
class Location:
    """`offset_bytes` into the arena, into output slot `index` (from 1), or from the first element of the
    caller's value `index`; a host number has only its value.
    """

    kind: Literal["arena", "output", "resident", "host"]
    index: int = 0
    offset_bytes: int = 0

    def shifted(self, offset_bytes: int) -> Location:
        """The place `offset_bytes` further on."""
        return Location(self.kind, self.index, self.offset_bytes + offset_bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    """Temporaries of the operator of one step; ids go on where those of the Buffers end."""

    id: int
    step: int
    group: Group


@dataclass(frozen=True)
class Layout:
    """Buffers and pieces of one order with their places: arena `offsets` and `guests` by their ids, `slots`
    the output Buffers.  The workspace of an operator that has pieces has no place of its own.
    """

    buffers: tuple[Buffer, ...]
    offsets: Mapping[int, int]
    nbytes: int
    guests: Guests = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()

    @property
    def slots(self) -> tuple[Buffer, ...]:
        """The output Buffers; slot k is entry k - 1."""
        return tuple(buffer for buffer in self.buffers if buffer.kind == "output")

    @property
    def output_bytes(self) -> int:
        """Bytes that a call allocates for its results."""
        return sum(buffer.nbytes for buffer in self.slots)

    def place(self, number: int) -> Location | None:
        """Where the Buffer or piece with this id lies, if it has a place that is no slot of its own."""
        if number in self.guests:
            return Location("output", *self.guests[number])
        return Location("arena", 0, self.offsets[number]) if number in self.offsets else None

    def locate(self) -> dict[int, Location]:
        """Storage id -> its place, for the storages that have a Buffer."""
        found: dict[int, Location] = {}
        slot = 0
        for buffer in self.buffers:
            slot += buffer.kind == "output"
            place = Location("output", slot) if buffer.kind == "output" else self.place(buffer.id)
            if place is not None:
                found.update(dict.fromkeys(buffer.storages, place))
        return found

    def workspaces(self, order: Sequence[int]) -> dict[int, int]:
        """Node id -> arena offset of its workspace, for the nodes that have one in one piece."""
        return {
            order[buffer.start]: self.offsets[buffer.id]
            for buffer in self.buffers
            if buffer.kind == "workspace" and buffer.id in self.offsets
        }

    def temps(self, order: Sequence[int]) -> dict[int, tuple[Location, ...]]:
        """Node id -> the places of its temporaries."""
        found: dict[int, dict[int, Location]] = {}
        for piece in self.pieces:
            place = self.place(piece.id)
            assert place is not None
            inside = zip(piece.group.temps, piece.group.offsets, strict=True)
            found.setdefault(order[piece.step], {}).update({k: place.shifted(at) for k, at in inside})
        return {node: tuple(places[k] for k in sorted(places)) for node, places in found.items()}


# -- moments -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tenants:
    """Who needs room, and when: `blocks` has the moments of every Buffer and piece, by id."""

    buffers: tuple[Buffer, ...]
    pieces: tuple[Piece, ...]
    blocks: Mapping[int, Block]


def tenants_of(
    graph: Graph, order: Sequence[int], facts: Facts, buffers: tuple[Buffer, ...] | None = None
) -> Tenants:
    """The Buffers of `graph` in `order` (with in-place reuse unless they are given), and the pieces of its
    operators' workspace.
    """
    buffers = lifetimes(graph, order, facts, inplace=True) if buffers is None else buffers
    insides = {step: found for step, node in enumerate(order) if (found := _inside(graph, node, facts))}
    groups = [(step, group) for step, inside in insides.items() for group in inside.groups]
    pieces = tuple(Piece(number, *each) for number, each in enumerate(groups, start=len(buffers)))
    lengths = (insides[step].moments if step in insides else 1 for step in range(len(order)))
    clock = list(accumulate(lengths, initial=0))
    blocks = {}
    for buffer in buffers:
        inside = insides.get(buffer.start)
        late = 0
        if inside is not None and buffer.kind == "workspace":
            continue
        if inside is not None and buffer.storages:
            late = _requested(graph, graph.node[order[buffer.start]], buffer.storages[0], inside)
        start, stop = clock[buffer.start] + late, clock[buffer.stop]
        blocks[buffer.id] = Block(buffer.id, buffer.nbytes, start, stop)
    for piece in pieces:
        begin, group = clock[piece.step], piece.group
        blocks[piece.id] = Block(piece.id, group.nbytes, begin + group.start, begin + group.stop)
    return Tenants(buffers, pieces, blocks)


def _inside(graph: Graph, number: int, facts: Facts) -> Inside | None:
    """The moments of a node whose operator has temporaries."""
    node = graph.node.get(number)
    if node is None or not isinstance(node.op, Aten) or number not in facts:
        return None
    found = inside_of(node.op, facts[number])
    return found if found.groups else None


def _requested(graph: Graph, node: Node, storage: int, inside: Inside) -> int:
    """The moment at which `node` asks for a storage that it makes."""
    positions = fresh_outputs(graph, node).get(storage, ())
    return min((inside.requested[each] for each in positions if each in inside.requested), default=0)


_LEAST_GUEST_BYTES = 256
"""A guest's address changes with every call, which costs about a microsecond."""


def guests_of(tenants: Tenants, *, body: bool = False) -> dict[int, tuple[int, int]]:
    """Values and temporaries that fit into a result's slot and are gone before it is made; large ones first.

    In a `body` only temporaries of the operator that makes the result.
    """
    hosts = [buffer for buffer in tenants.buffers if buffer.kind == "output"]
    inside: list[list[tuple[Block, int]]] = [[] for _ in hosts]
    found: dict[int, tuple[int, int]] = {}
    steps = {piece.id: piece.step for piece in tenants.pieces}
    values = () if body else (b.id for b in tenants.buffers if b.kind == "value")
    guests = (tenants.blocks[number] for number in (*values, *steps))
    large = (guest for guest in guests if guest.nbytes >= _LEAST_GUEST_BYTES)
    for guest in sorted(large, key=lambda each: (-each.nbytes, each.id)) if hosts else ():
        for slot, host in enumerate(hosts):
            if guest.stop > tenants.blocks[host.id].start or guest.nbytes > host.nbytes:
                continue
            if body and steps[guest.id] != host.start:
                continue
            offset = _free_offset(guest, inside[slot])
            if offset + guest.nbytes <= host.nbytes:
                inside[slot].append((guest, offset))
                found[guest.id] = (slot + 1, offset)
                break
    return found


def _free_offset(guest: Block, others: Sequence[tuple[Block, int]]) -> int:
    """The lowest offset that nobody takes while `guest` lives."""
    busy = sorted(
        (offset, offset + align(other.nbytes))
        for other, offset in others
        if other.start < guest.stop and guest.start < other.stop
    )
    return first_gap(busy, align(guest.nbytes))


def placement_problem(graph: Graph, order: Sequence[int], facts: Facts) -> PlacementProblem:
    """What `lay_out` places in the arena of a program: blocks with the ids of Buffers and pieces."""
    tenants = tenants_of(graph, order, facts)
    return problem_of(tenants, guests_of(tenants))


def problem_of(tenants: Tenants, guests: Guests) -> PlacementProblem:
    """What is neither a result nor a guest."""
    slots = {buffer.id for buffer in tenants.buffers if buffer.kind == "output"}
    blocks = (block for number, block in tenants.blocks.items() if number not in guests)
    return PlacementProblem(tuple(block for block in blocks if block.id not in slots), ALIGNMENT)


def lay_out(
    graph: Graph,
    order: Sequence[int],
    facts: Facts,
    placement: Placement | None = None,
    *,
    body: bool = False,
) -> Layout:
    """Lifetimes with in-place reuse, placed greedily or as `placement` says (of `placement_problem`).

    The results of a `body` lie in those of its node.
    """
    tenants = tenants_of(graph, order, facts)
    guests = guests_of(tenants, body=body)
    problem = problem_of(tenants, guests)
    found = placement or place_greedy(problem)
    end = max((found.offsets[block.id] + block.nbytes for block in problem.blocks), default=0)
    return Layout(tenants.buffers, dict(found.offsets), end, guests, tenants.pieces)
