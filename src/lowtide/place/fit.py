"""Do these blocks fit under a capacity?  Depth-first search with pruning (after MiniMalloc, ASPLOS 2023).

Problem.  Decide it exactly for hundreds of blocks, or say that the node limit was too small.

Method.  Every placement can be pushed down and written as a sequence in which offsets never fall, each block
standing on what is under it.  So a partial solution is a skyline: per section a floor, and per open block
the lowest offset that it can still get.  A node places one open block at that offset.  `Pruning` holds the
ideas that cut branches, one switch each.

Invariants.  FITS comes with offsets; DOES_NOT is a proof; LIMIT says nothing.  No idea changes an answer,
only how many nodes it takes (tests run all combinations).

Not done.  Learning from failed branches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.kernel import kernel
from lowtide.place.blocks import Blocks, Ints

__all__ = ["DOES_NOT", "FITS", "LIMIT", "Pruning", "fit"]

FITS, DOES_NOT, LIMIT = 0, 1, 2


class Pruning(NamedTuple):
    """Which ideas `fit` uses."""

    # Offsets never fall along a branch, and equal ones come in rank order: each placement is
    # reached by one sequence only.
    canonical: bool = True
    # A section whose floor and open blocks together exceed the capacity can never be completed,
    # so the branch is dead although each block still fits alone.
    inference: bool = True
    # No open block can get an offset below the last one, so every section's floor is at least
    # that: the inference above sees it.
    monotonic: bool = True
    # A section's floor is at least the lowest offset that any of its open blocks can still get,
    # for the same inference.
    open_floor: bool = True
    # If a block could be placed wholly under an offset, then nothing else should go to that offset
    # first: putting it there instead never hurts.
    dominance: bool = True
    # A block with no open block above it harms nobody where it is: if the rest fails, it fails with
    # every choice that could come later (canonical sequences need `lowest_first` for that).
    hatless: bool = True
    # Where no open block spans two neighbouring sections, the rest falls apart: the sides are solved
    # one by one, and one failure is enough.
    decompose: bool = True
    # Blocks that can lie lowest are tried first; off, they are tried by rank alone.
    lowest_first: bool = True
    # The open blocks with the lowest offsets they can get say all about a branch: one that failed
    # before, reached by other placements of the same blocks, is not searched again.
    memory: bool = True
    # Of two open blocks with equal lifetimes and sizes the one of smaller rank goes first: exchanging
    # them changes nothing.
    twins: bool = True


ALL = Pruning()


class _Search(NamedTuple):
    """The problem, and the state along the current branch; rows of `lows` and `floors` are by depth.

    near_start, near: blocks that meet each block in time.  offset: -1 for open blocks.  rest: open units by
    section.  spans: by section, open blocks that span it and the next.  nodes: how many are left.
    failed: branches that failed, as a hash table of rows: key, offset and rank of the block before.
    """

    size: Ints
    low: Ints
    high: Ints
    rank: Ints
    near_start: Ints
    near: Ints
    offset: Ints
    rest: Ints
    spans: Ints
    lows: Ints
    floors: Ints
    nodes: Ints
    failed: Ints


def fit(
    blocks: Blocks, capacity: int, rank: Ints, nodes: int, pruning: Pruning = ALL
) -> tuple[int, Ints, int]:
    """Whether `blocks` fit into `capacity` units: FITS, DOES_NOT or LIMIT, offsets, and nodes used.

    Among equals blocks with a smaller `rank` (a permutation) are tried first.
    """
    count, sections = len(blocks), blocks.live.size
    near_start, near = _neighbours(blocks.low, blocks.high)
    search = _Search(
        blocks.size,
        blocks.low,
        blocks.high,
        rank,
        near_start,
        near,
        np.full(count, -1, np.int64),
        blocks.live.copy(),
        _spans(blocks.low, blocks.high, sections),
        np.zeros((count + 1, count), np.int64),
        np.zeros((count + 1, sections), np.int64),
        np.array([nodes], np.int64),
        np.zeros((_table_size(nodes) if pruning.memory else 1, 3), np.int64),
    )
    status = _place_open(search, pruning, capacity, np.argsort(rank), 0, 0, -1, 0, sections)
    return status, search.offset, nodes - int(search.nodes[0])


def _table_size(nodes: int) -> int:
    """A power of two that holds the failures of most searches of `nodes` nodes."""
    return int(min(1 << 19, max(64, 1 << (2 * nodes).bit_length())))


@kernel
def _neighbours(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Rows of the blocks that meet each block in time."""
    count = low.size
    start = np.zeros(count + 1, np.int64)
    for i in range(count):
        start[i + 1] = start[i]
        for j in range(count):
            start[i + 1] += j != i and low[i] < high[j] and low[j] < high[i]
    near = np.empty(start[count], np.int64)
    k = 0
    for i in range(count):
        for j in range(count):
            if j != i and low[i] < high[j] and low[j] < high[i]:
                near[k] = j
                k += 1
    return start, near


@kernel
def _spans(low: Ints, high: Ints, sections: int) -> Ints:
    """By section, how many blocks span it and the next one."""
    spans = np.zeros(sections, np.int64)
    for i in range(low.size):
        for s in range(low[i], high[i] - 1):
            spans[s] += 1
    return spans


@kernel
def _raise_neighbours(s: _Search, block: int, depth: int) -> bool:
    """Fill row ``depth + 1`` of `lows` after `block` was placed; whether an open block meets it."""
    for i in range(s.size.size):
        s.lows[depth + 1, i] = s.lows[depth, i]
    top = s.offset[block] + s.size[block]
    hatless = True
    for k in range(s.near_start[block], s.near_start[block + 1]):
        other = s.near[k]
        if s.offset[other] < 0:
            hatless = False
            s.lows[depth + 1, other] = max(s.lows[depth + 1, other], top)
    return not hatless


@kernel
def _raise_floors(s: _Search, block: int, depth: int, begin: int, end: int) -> None:
    """Fill row ``depth + 1`` of `floors` in ``[begin, end)`` after `block` was placed."""
    for k in range(begin, end):
        s.floors[depth + 1, k] = s.floors[depth, k]
    for k in range(s.low[block], s.high[block]):
        s.floors[depth + 1, k] = s.offset[block] + s.size[block]


@kernel
def _is_dead(
    s: _Search, p: Pruning, capacity: int, open_: Ints, depth: int, offset: int, begin: int, end: int
) -> bool:
    """Whether some section in ``[begin, end)`` cannot be completed."""
    reach = np.empty(end - begin, np.int64)
    for k in range(reach.size):
        reach[k] = 1 << 62
    if p.open_floor:
        for block in open_:
            if s.offset[block] < 0:
                least = s.lows[depth, block]
                for k in range(s.low[block] - begin, s.high[block] - begin):
                    reach[k] = min(reach[k], least)
    dead = False
    for k in range(begin, end):
        floor = s.floors[depth, k]
        if p.open_floor and s.rest[k] > 0:
            floor = max(floor, reach[k - begin])
        if p.monotonic and s.rest[k] > 0:
            floor = max(floor, offset)
        if p.inference:
            floor += s.rest[k]
        dead |= floor > capacity
    return dead


@kernel
def _ordered(s: _Search, p: Pruning, open_: Ints, depth: int) -> tuple[Ints, int]:
    """The blocks of `open_` that are still open, in the order of trying, and the lowest top they can have."""
    order = np.empty(open_.size, np.int64)
    count, lowest = 0, 1 << 62
    for block in open_:
        if s.offset[block] >= 0:
            continue
        least = s.lows[depth, block]
        lowest = min(lowest, least + s.size[block])
        k = count
        while k > 0 and _comes_before(s, p, block, order[k - 1], depth):
            order[k] = order[k - 1]
            k -= 1
        order[k] = block
        count += 1
    return order[:count], lowest


@kernel
def _comes_before(s: _Search, p: Pruning, block: int, other: int, depth: int) -> bool:
    if p.lowest_first and s.lows[depth, block] != s.lows[depth, other]:
        return bool(s.lows[depth, block] < s.lows[depth, other])
    return bool(s.rank[block] < s.rank[other])


@kernel
def _count_spans(s: _Search, block: int, by: int) -> bool:
    """Count `block` in `spans` and `rest`; whether a section and the next have nothing in common now."""
    parted = False
    for k in range(s.low[block], s.high[block]):
        s.rest[k] += by * s.size[block]
        if k + 1 < s.high[block]:
            s.spans[k] += by
            parted |= s.spans[k] == 0
    return parted


@kernel
def _between(s: _Search, open_: Ints, begin: int, end: int) -> Ints:
    """The open blocks of `open_` in the sections ``[begin, end)``."""
    found = np.empty(open_.size, np.int64)
    count = 0
    for block in open_:
        if s.offset[block] < 0 and begin <= s.low[block] < end:
            found[count] = block
            count += 1
    return found[:count]


@kernel
def _next_parting(s: _Search, begin: int, end: int) -> int:
    """The first section after `begin` that has no open block in common with the one before it."""
    k = begin
    while k + 1 < end and s.spans[k] > 0:
        k += 1
    return k + 1


@kernel
def _reopen(s: _Search, blocks: Ints) -> None:
    """Take back every offset among `blocks`."""
    for block in blocks:
        if s.offset[block] >= 0:
            _count_spans(s, block, 1)
            s.offset[block] = -1


@kernel
def _headroom(s: _Search, p: Pruning, capacity: int, begin: int, end: int) -> int:
    """The highest offset that the next block may get: above it, some section cannot hold its open blocks.

    The same inference as `_is_dead`, cheap, and most often enough.
    """
    most = 0
    if p.monotonic and p.inference:
        for k in range(begin, end):
            most = max(most, s.rest[k])
    return capacity - most


@kernel
def _key(s: _Search, open_: Ints, depth: int) -> int:
    """A hash of the open blocks and the lowest offsets that they can get."""
    key = np.uint64(0)
    for block in open_:
        if s.offset[block] < 0:
            word = np.uint64(block + 1) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(s.lows[depth, block])
            word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key ^= word ^ (word >> np.uint64(31))
    return int(key >> np.uint64(1)) | 1


@kernel
def _has_failed(s: _Search, key: int, last: int, last_rank: int) -> bool:
    """Whether the branch `key` failed when at least as much was allowed as after `last`."""
    row = key & (s.failed.shape[0] - 1)
    if s.failed[row, 0] != key:
        return False
    before, rank = s.failed[row, 1], s.failed[row, 2]
    return bool(before < last or (before == last and rank <= last_rank))


@kernel
def _remember(s: _Search, key: int, last: int, last_rank: int) -> None:
    """Record a failure; an older one in its place is forgotten."""
    row = key & (s.failed.shape[0] - 1)
    s.failed[row, 0], s.failed[row, 1], s.failed[row, 2] = key, last, last_rank


@kernel
def _has_twin_before(s: _Search, block: int) -> bool:
    """Whether an open block of the same lifetime and size has a smaller rank."""
    for k in range(s.near_start[block], s.near_start[block + 1]):
        other = s.near[k]
        same = (
            s.size[other] == s.size[block] and s.low[other] == s.low[block] and s.high[other] == s.high[block]
        )
        if same and s.offset[other] < 0 and s.rank[other] < s.rank[block]:
            return True
    return False


@kernel
def _place_open(
    s: _Search,
    p: Pruning,
    capacity: int,
    open_: Ints,
    depth: int,
    last: int,
    last_rank: int,
    begin: int,
    end: int,
) -> int:
    """Place the blocks `open_`, all within the sections ``[begin, end)``, at offsets from `last` on."""
    if s.nodes[0] <= 0:
        return LIMIT
    s.nodes[0] -= 1
    key = _key(s, open_, depth) if p.memory else 1
    if p.memory and _has_failed(s, key, last, last_rank):
        return DOES_NOT
    headroom = _headroom(s, p, capacity, begin, end)
    order, lowest = _ordered(s, p, open_, depth)
    if order.size == 0:
        return FITS
    for block in order:
        offset = s.lows[depth, block]
        if p.canonical and (offset < last or (offset == last and s.rank[block] < last_rank)):
            continue
        if p.dominance and offset >= lowest:
            continue
        if offset > headroom or (p.twins and _has_twin_before(s, block)):
            continue
        s.offset[block] = offset
        hat = _raise_neighbours(s, block, depth)
        _raise_floors(s, block, depth, begin, end)
        parted = _count_spans(s, block, -1)
        status = DOES_NOT
        if not _is_dead(s, p, capacity, order, depth + 1, offset, begin, end):
            stop = begin
            while stop < end:
                start, stop = stop, _next_parting(s, stop, end) if p.decompose and parted else end
                part = _between(s, order, start, stop)
                status = _place_open(s, p, capacity, part, depth + 1, offset, s.rank[block], start, stop)
                if status != FITS:
                    break
        if status != DOES_NOT:
            return status
        _reopen(s, order)
        if p.hatless and not hat and (p.lowest_first or not p.canonical):
            break
    if p.memory:
        _remember(s, key, last, last_rank)
    return DOES_NOT
