"""Where every storage of a graph lies while it runs in one order: the arena and the output slots.

Problem.  Lifetimes say when bytes are taken, a placement says at which offset; the executor asks where a
given storage is.

Method.  Buffers (in-place reuse included) that the caller does not receive are placed in the arena; each
output Buffer is a slot of its own, allocated fresh for every call.

    offset ^  +-------+
           |  | %4    |  +----+
           |  +----+--+--+ %7 |      slot 1: the loss
           |  | %2 |     +----+
           +--+----+------------> step

Invariant.  Buffers that are taken at the same step do not share a byte of the arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.analysis.facts import Facts
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir.graph import Graph
from lowtide.place.greedy import place_greedy
from lowtide.place.problem import Block, Placement, PlacementProblem
from lowtide.run.temps import ALIGNMENT

__all__ = ["Layout", "Location", "lay_out", "placement_problem"]


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
    """Buffers of one order with their places: `offsets` by Buffer id, `slots` the output Buffers."""

    buffers: tuple[Buffer, ...]
    offsets: Mapping[int, int]
    nbytes: int

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


def placement_problem(buffers: Sequence[Buffer]) -> PlacementProblem:
    """The Buffers that belong in the arena, as blocks with the Buffers' ids."""
    blocks = tuple(
        Block(buffer.id, buffer.nbytes, buffer.start, buffer.stop)
        for buffer in buffers
        if buffer.kind != "output"
    )
    return PlacementProblem(blocks, ALIGNMENT)


def lay_out(graph: Graph, order: Sequence[int], facts: Facts, placement: Placement | None = None) -> Layout:
    """Lifetimes with in-place reuse, placed greedily or as `placement` says (by Buffer id)."""
    buffers = lifetimes(graph, order, facts, inplace=True)
    found = placement or place_greedy(placement_problem(buffers))
    return Layout(buffers, dict(found.offsets), found.arena_bytes)
