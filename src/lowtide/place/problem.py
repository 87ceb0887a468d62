"""The placement problem: blocks with half-open lifetimes, to be given offsets in one arena.

Problem.  Blocks that are alive at the same step need disjoint bytes; the arena is to be small.

    offset ^
           |  +----+   +-------+      time x offset: rectangles of fixed width and height that may only
           |  | b  |   |   c   |      move up and down (dynamic storage allocation, strongly NP-hard)
           |  +----+---+--+----+
           |  |     a     |
           +--+-----------+------> step

Invariants.  Two blocks whose lifetimes meet never overlap; offsets are multiples of `alignment`; a block
occupies its size rounded up to `alignment` (padding counts).  `lower_bound` is under every arena.

Not done.  Blocks with fixed offsets, several arenas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Block", "Placement", "PlacementProblem", "aligned", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Block:
    """`nbytes` bytes that are taken in the steps ``[start, stop)``."""

    id: int
    nbytes: int
    start: int
    stop: int


@dataclass(frozen=True)
class PlacementProblem:
    """What to place, and the alignment of every offset in bytes."""

    blocks: tuple[Block, ...]
    alignment: int = 64


@dataclass(frozen=True)
class Placement:
    """Offset in bytes by block id, and the bytes of the arena that they need."""

    offsets: Mapping[int, int]
    arena_bytes: int


def aligned(nbytes: int, alignment: int) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def lower_bound(problem: PlacementProblem) -> int:
    """The most (padded) bytes alive at one step: no arena is smaller."""
    change: dict[int, int] = {}
    for block in problem.blocks:
        size = aligned(block.nbytes, problem.alignment)
        change[block.start] = change.get(block.start, 0) + size
        change[block.stop] = change.get(block.stop, 0) - size
    live = best = 0
    for step in sorted(change):
        live += change[step]
        best = max(best, live)
    return best
