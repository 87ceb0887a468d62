"""Where every storage of a graph lies while it runs in one order: the arena and the output slots.

Problem.  Lifetimes say when bytes are taken, a placement says at which offset; the executor asks where a
given storage is.

Method.  Buffers (in-place reuse included) that the caller does not receive are placed in the arena; each
output Buffer is a slot of its own, allocated fresh for every call.  Until its result comes, a slot has room
for *guests*: values that are gone by then, so that large results do not come on top of everything else.

    offset ^  +-------+
           |  | %4    |  +----+
           |  +----+--+--+ %7 |      slot 1: the loss
           |  | %2 |     +----+
           +--+----+------------> step

Invariant.  Buffers that are taken at the same step do not share a byte.

Not done.  Guests in the results of a body (the slices of a Fission's outputs); workspaces as guests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lowtide.analysis.facts import Facts
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir.graph import Graph
from lowtide.place.greedy import place_greedy
from lowtide.place.problem import Block, Placement, PlacementProblem
from lowtide.run.temps import ALIGNMENT, align, first_gap

__all__ = ["Guests", "Layout", "Location", "guests_of", "lay_out", "placement_problem"]

Guests = Mapping[int, tuple[int, int]]
"""Buffer id -> (output slot, offset in it)."""


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


@dataclass(frozen=True)
class Layout:
    """Buffers of one order with their places: arena `offsets` by Buffer id, `guests` of output Buffers,
    `slots` the output Buffers.
    """

    buffers: tuple[Buffer, ...]
    offsets: Mapping[int, int]
    nbytes: int
    guests: Guests = field(default_factory=dict)

    @property
    def slots(self) -> tuple[Buffer, ...]:
        """The output Buffers; slot k is entry k - 1."""
        return tuple(buffer for buffer in self.buffers if buffer.kind == "output")

    @property
    def output_bytes(self) -> int:
        """Bytes that a call allocates for its results."""
        return sum(buffer.nbytes for buffer in self.slots)

    def locate(self) -> dict[int, Location]:
        """Storage id -> its place, for the storages that have a Buffer."""
        found = {}
        slot = 0
        for buffer in self.buffers:
            if buffer.kind == "output":
                slot += 1
                place = Location("output", slot)
            elif buffer.id in self.guests:
                place = Location("output", *self.guests[buffer.id])
            else:
                place = Location("arena", 0, self.offsets[buffer.id])
            found.update(dict.fromkeys(buffer.storages, place))
        return found

    def workspaces(self, order: Sequence[int]) -> dict[int, int]:
        """Node id -> arena offset of its workspace, for the nodes that have one."""
        return {
            order[buffer.start]: self.offsets[buffer.id]
            for buffer in self.buffers
            if buffer.kind == "workspace"
        }


_LEAST_GUEST_BYTES = 256
"""A guest's address changes with every call, which costs about a microsecond."""


def guests_of(buffers: Sequence[Buffer]) -> dict[int, tuple[int, int]]:
    """Values that fit into a result's slot and are gone before it is made; large ones first."""
    hosts = [buffer for buffer in buffers if buffer.kind == "output"]
    inside: list[list[tuple[Buffer, int]]] = [[] for _ in hosts]
    found: dict[int, tuple[int, int]] = {}
    large = [b for b in buffers if b.kind == "value" and b.nbytes >= _LEAST_GUEST_BYTES]
    for guest in sorted(large, key=lambda each: (-each.nbytes, each.id)):
        for slot, host in enumerate(hosts):
            if guest.stop > host.start or guest.nbytes > host.nbytes:
                continue
            offset = _free_offset(guest, inside[slot])
            if offset + guest.nbytes <= host.nbytes:
                inside[slot].append((guest, offset))
                found[guest.id] = (slot + 1, offset)
                break
    return found


def _free_offset(guest: Buffer, others: Sequence[tuple[Buffer, int]]) -> int:
    """The lowest offset that nobody takes while `guest` lives."""
    busy = sorted(
        (offset, offset + align(other.nbytes))
        for other, offset in others
        if other.start < guest.stop and guest.start < other.stop
    )
    return first_gap(busy, align(guest.nbytes))


def placement_problem(buffers: Sequence[Buffer], guests: Guests | None = None) -> PlacementProblem:
    """The Buffers that belong in the arena, as blocks with the Buffers' ids.

    `guests` defaults to what `lay_out` takes for the guests of a program.
    """
    guests = guests_of(buffers) if guests is None else guests
    blocks = tuple(
        Block(buffer.id, buffer.nbytes, buffer.start, buffer.stop)
        for buffer in buffers
        if buffer.kind != "output" and buffer.id not in guests
    )
    return PlacementProblem(blocks, ALIGNMENT)


def lay_out(
    graph: Graph,
    order: Sequence[int],
    facts: Facts,
    placement: Placement | None = None,
    *,
    body: bool = False,
) -> Layout:
    """Lifetimes with in-place reuse, placed greedily or as `placement` says (by Buffer id).

    The results of a `body` lie in those of its node, which take no guests.
    """
    buffers = lifetimes(graph, order, facts, inplace=True)
    guests = {} if body else guests_of(buffers)
    problem = placement_problem(buffers, guests)
    found = placement or place_greedy(problem)
    end = max((found.offsets[block.id] + block.nbytes for block in problem.blocks), default=0)
    return Layout(buffers, dict(found.offsets), end, guests)
