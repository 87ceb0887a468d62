"""Do these blocks fit under a capacity?  Valley by valley: for problems with little room to spare.

Problem.  `fit` takes the block that can lie lowest, anywhere in time.  When nearly every byte is needed, it
notices only much later that a hole was left which no block can fill.

Method.  The skyline of what is placed has *valleys*: stretches of sections on one level between higher walls.
In a placement that is pushed down, the leftmost section of a valley is either filled by a block that begins
there, ends in the valley and lies on its ground, or some of its height is wasted; likewise the rightmost.
A node takes the end of a valley that leaves the fewest choices, tries the blocks, then the waste.

         wall                 wall
        ------+              +------      choices at the left end: a (begins there), or waste:
              | a            |            the ground there rises to the lowest level at which
              +----+  b      |            a block could cover it later
              |    +---------+

Before that, `_settle` raises the ground of every section to the lowest offset that any of its open blocks can
still get, until nothing changes; a section that cannot hold its open blocks any more ends the branch.

Invariants.  As `fit`: FITS comes with offsets, DOES_NOT is a proof, LIMIT says nothing.

Not done.  Bounds over several sections at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.kernel import kernel
from lowtide.place.blocks import Blocks, Ints
from lowtide.place.fit import DOES_NOT, FITS, LIMIT

__all__ = ["Digging", "fit_valleys"]

WALL = 1 << 60


class Digging(NamedTuple):
    """Which ideas `fit_valleys` uses."""

    # Of all ends of all valleys the one with the fewest choices is filled first: a hole that
    # nothing fits is seen at once.  Off: the left end of the lowest valley.
    fewest: bool = True
    # The right end of a valley is as good a place to decide as the left one.  Off: left ends only.
    both_ends: bool = True
    # A block needs something solid under it: on waste alone it could be pushed down, and that
    # placement is met in another branch.
    solid: bool = True
    # The ground and the open blocks say all about a branch: one that failed before, reached by other
    # placements of the same blocks, is not searched again.
    memory: bool = True
    # Where no open block spans two neighbouring sections, the sides are filled one by one, and one
    # failure is enough.
    decompose: bool = True


ALL = Digging()


class _Skyline(NamedTuple):
    """The problem, and the state along the current branch.

    offset: by block, -1 while open.  lowest: by block, the lowest offset that it can get.  rest, spans: by
    section, open units, and open blocks that span it and the next.  floors, solid: by depth and section, the
    ground, and whether it is the top of a block (or the bottom of the arena) and not waste.  nodes: how many
    are left.  failed: keys of branches that failed, a hash table.
    """

    size: Ints
    low: Ints
    high: Ints
    rank: Ints
    offset: Ints
    lowest: Ints
    rest: Ints
    spans: Ints
    floors: Ints
    solid: Ints
    nodes: Ints
    failed: Ints


def fit_valleys(
    blocks: Blocks, capacity: int, rank: Ints, nodes: int, digging: Digging = ALL
) -> tuple[int, Ints, int]:
    """Whether `blocks` fit into `capacity` units: FITS, DOES_NOT or LIMIT, offsets, and nodes used.

    Among equals blocks with a smaller `rank` (a permutation) are tried first.
    """
    count, sections = len(blocks), blocks.live.size
    spans = np.zeros(sections, np.int64)
    for low, high in zip(blocks.low, blocks.high, strict=True):
        spans[low : high - 1] += 1
    depth = 2 * count + 6 * sections + 2
    sky = _Skyline(
        blocks.size,
        blocks.low,
        blocks.high,
        rank,
        np.full(count, -1, np.int64),
        np.zeros(count, np.int64),
        blocks.live.copy(),
        spans,
        np.empty((depth, sections), np.int64),
        np.empty((depth, sections), np.int64),
        np.array([nodes], np.int64),
        np.zeros(int(min(1 << 19, max(64, 1 << (2 * nodes).bit_length()))), np.int64),
    )
    sky.floors[0], sky.solid[0] = 0, 1
    status = _fill(sky, digging, capacity, np.argsort(rank), 0, 0, sections)
    return status, sky.offset, nodes - int(sky.nodes[0])


@kernel
def _settle(s: _Skyline, capacity: int, open_: Ints, depth: int, begin: int, end: int) -> bool:
    """Raise floors to what open blocks can still get; False if a section cannot hold its open blocks."""
    floors, solid = s.floors[depth], s.solid[depth]
    reach = np.empty(end - begin, np.int64)
    changed = True
    while changed:
        for k in range(reach.size):
            reach[k] = WALL
        for block in open_:
            lowest = 0
            for k in range(s.low[block], s.high[block]):
                lowest = max(lowest, floors[k])
            s.lowest[block] = lowest
            for k in range(s.low[block], s.high[block]):
                reach[k - begin] = min(reach[k - begin], lowest)
        changed = False
        for k in range(begin, end):
            if reach[k - begin] > floors[k]:
                floors[k], solid[k] = reach[k - begin], 0
                changed = True
            if s.rest[k] > 0 and floors[k] + s.rest[k] > capacity:
                return False
    return True


@kernel
def _runs(s: _Skyline, depth: int, begin: int, end: int) -> Ints:
    """By section from `begin`: rows 0 and 1, where its run of equal floors begins and ends; row 2, how many
    solid sections there are before it.
    """
    floors = s.floors[depth]
    runs = np.empty((3, end - begin + 1), np.int64)
    runs[2, 0] = 0
    for k in range(begin, end):
        joined = k > begin and floors[k] == floors[k - 1]
        runs[0, k - begin] = runs[0, k - begin - 1] if joined else k
        runs[2, k - begin + 1] = runs[2, k - begin] + s.solid[depth, k]
    for k in range(end - 1, begin - 1, -1):
        joined = k + 1 < end and floors[k] == floors[k + 1]
        runs[1, k - begin] = runs[1, k - begin + 1] if joined else k + 1
    return runs


@kernel
def _lies_flat(s: _Skyline, d: Digging, runs: Ints, block: int, begin: int) -> bool:
    """Whether `block` could lie on the ground of one run, on something solid."""
    low, high = s.low[block] - begin, s.high[block] - begin
    supported = runs[2, high] > runs[2, low] or not d.solid
    return bool(supported and runs[0, low] == runs[0, high - 1])


@kernel
def _walls(s: _Skyline, depth: int, first: int, last: int, begin: int, end: int) -> tuple[int, int]:
    """The floors beside the run ``[first, last)``."""
    left = s.floors[depth, first - 1] if first > begin else WALL
    right = s.floors[depth, last] if last < end else WALL
    return left, right


@kernel
def _raised(
    s: _Skyline, open_: Ints, depth: int, first: int, last: int, left: bool, walls: tuple[int, int]
) -> int:
    """What the ground at one end of the valley ``[first, last)`` becomes if it is wasted.

    What covers it later lies on a wall, or on a block that stands in the valley beside it.
    """
    level = min(walls[0], walls[1])
    for block in open_:
        low, high = s.low[block], s.high[block]
        if (first < low < last) if left else (first < high < last):
            level = min(level, s.floors[depth, first] + s.size[block])
    return level


@kernel
def _choose(
    s: _Skyline, d: Digging, capacity: int, open_: Ints, runs: Ints, depth: int, begin: int, end: int
) -> tuple[int, int, bool, int]:
    """The end of a valley with the fewest choices: the valley, whether its left end, what waste makes of it.

    The level is WALL if waste is out of the question.
    """
    choices = np.zeros((2, end - begin), np.int64)
    for block in open_:
        if _lies_flat(s, d, runs, block, begin):
            first = runs[0, s.low[block] - begin]
            choices[0, first - begin] += s.low[block] == first
            choices[1, first - begin] += s.high[block] == runs[1, first - begin]
    best = (begin, begin, True, WALL)
    fewest = 1 << 60
    first = begin
    while first < end:
        last = runs[1, first - begin]
        walls = _walls(s, depth, first, last, begin, end)
        if s.rest[first] > 0 and s.floors[depth, first] < min(walls[0], walls[1]):
            for side in range(2 if d.both_ends else 1):
                level = _raised(s, open_, depth, first, last, side == 0, walls)
                at = first if side == 0 else last - 1
                if level + s.rest[at] > capacity:
                    level = WALL
                count = choices[side, first - begin] + (level < WALL)
                if not d.fewest:
                    count = s.floors[depth, first]
                if count < fewest:
                    fewest, best = count, (first, last, side == 0, level)
        first = last
    return best


@kernel
def _key(s: _Skyline, open_: Ints, depth: int, begin: int, end: int) -> int:
    """A hash of the open blocks and the ground."""
    key = np.uint64(0)
    for block in open_:
        word = np.uint64(block + 1) * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key ^= word ^ (word >> np.uint64(31))
    for k in range(begin, end):
        if s.rest[k] > 0:
            word = np.uint64(2 * s.floors[depth, k] + s.solid[depth, k])
            key = (key ^ word) * np.uint64(0xFF51AFD7ED558CCD)
            key ^= key >> np.uint64(32)
    return int(key >> np.uint64(1)) | 1


@kernel
def _occupy(s: _Skyline, block: int, by: int) -> bool:
    """Take `block` out of the open ones (-1) or back in (1); whether time falls apart where it was."""
    parted = False
    for k in range(s.low[block], s.high[block]):
        s.rest[k] += by * s.size[block]
        if k + 1 < s.high[block]:
            s.spans[k] += by
            parted |= s.spans[k] == 0
    return parted


@kernel
def _reopen(s: _Skyline, blocks: Ints) -> None:
    """Take back every offset among `blocks`."""
    for block in blocks:
        if s.offset[block] >= 0:
            _occupy(s, block, 1)
            s.offset[block] = -1


@kernel
def _copy_ground(s: _Skyline, depth: int, begin: int, end: int) -> None:
    """Start row ``depth + 1`` from row `depth`."""
    for k in range(begin, end):
        s.floors[depth + 1, k] = s.floors[depth, k]
        s.solid[depth + 1, k] = s.solid[depth, k]


@kernel
def _part(s: _Skyline, open_: Ints, start: int, end: int, parted: bool) -> tuple[Ints, int]:
    """The open blocks from section `start` to where time falls apart, and that section."""
    stop = end
    if parted:
        stop = start + 1
        while stop < end and s.spans[stop - 1] > 0:
            stop += 1
    part, count = np.empty(open_.size, np.int64), 0
    for block in open_:
        if s.offset[block] < 0 and start <= s.low[block] < stop:
            part[count] = block
            count += 1
    return part[:count].copy(), stop


@kernel
def _choices(
    s: _Skyline, d: Digging, open_: Ints, runs: Ints, begin: int, first: int, last: int, left: bool
) -> Ints:
    """The blocks that can fill the chosen end of the valley ``[first, last)``; -1 stands for waste."""
    found, count = np.empty(open_.size + 1, np.int64), 0
    for block in open_:
        ends = s.low[block] == first if left else s.high[block] == last
        if ends and _lies_flat(s, d, runs, block, begin):
            found[count] = block
            count += 1
    found[count] = -1
    return found[: count + 1]


@kernel
def _choose_ground(s: _Skyline, block: int, depth: int, at: int, level: int) -> bool:
    """Put `block` on the ground of section `at`, or raise it to `level`; whether time falls apart."""
    if block < 0:
        s.floors[depth + 1, at], s.solid[depth + 1, at] = level, 0
        return False
    s.offset[block] = s.floors[depth, at]
    for k in range(s.low[block], s.high[block]):
        s.floors[depth + 1, k], s.solid[depth + 1, k] = s.offset[block] + s.size[block], 1
    return _occupy(s, block, -1)


@kernel
def _fill(s: _Skyline, d: Digging, capacity: int, open_: Ints, depth: int, begin: int, end: int) -> int:
    """Place the blocks `open_`, all within the sections ``[begin, end)``."""
    if open_.size == 0:
        return FITS
    if s.nodes[0] <= 0 or depth + 2 > s.floors.shape[0]:
        return LIMIT
    s.nodes[0] -= 1
    if not _settle(s, capacity, open_, depth, begin, end):
        return DOES_NOT
    key = _key(s, open_, depth, begin, end) if d.memory else 1
    if d.memory and s.failed[key & (s.failed.size - 1)] == key:
        return DOES_NOT
    runs = _runs(s, depth, begin, end)
    first, last, left, level = _choose(s, d, capacity, open_, runs, depth, begin, end)
    at = first if left else last - 1
    for block in _choices(s, d, open_, runs, begin, first, last, left):
        if block < 0 and level >= WALL:
            break
        _copy_ground(s, depth, begin, end)
        parted = _choose_ground(s, block, depth, at, level)
        stop, status = begin, FITS
        while stop < end and status == FITS:
            start = stop
            part, stop = _part(s, open_, start, end, parted and d.decompose)
            status = _fill(s, d, capacity, part, depth + 1, start, stop)
        if status != DOES_NOT:
            return status
        _reopen(s, open_)
    if d.memory:
        s.failed[key & (s.failed.size - 1)] = key
    return DOES_NOT
