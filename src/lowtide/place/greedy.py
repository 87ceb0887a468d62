"""Greedy placement: one block after the other, each at the lowest (or tightest) gap that fits.

Problem.  An arena close to the lower bound in milliseconds, for thousands of blocks.

Method.  `ORDERS` are the orders in which blocks are placed; each runs with first fit and with best fit, the
smallest arena wins.  Then the winner is improved: the blocks that reach its top are *pinned* to the front
of the order, since they evidently should have had the choice earlier, and everything is placed again.

Invariants.  Deterministic.  Never worse than greedy by size, which is the first entry.

Not done.  Proofs (`exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from lowtide.kernel import kernel
from lowtide.place.blocks import Blocks, Ints, blocks_of, placement_of
from lowtide.place.problem import Placement, PlacementProblem

__all__ = ["ORDERS", "greedy_offsets", "place_greedy"]

# What blocks are sorted by, largest first; ties: longer lifetime, then earlier start, then position.
ORDERS: Mapping[str, Callable[[Blocks], Ints]] = MappingProxyType(
    {
        "size": lambda blocks: blocks.size,
        "area": lambda blocks: blocks.size * blocks.width,
        "width": lambda blocks: blocks.width,
        "crowd": lambda blocks: _crowd(blocks),
        "time": lambda blocks: -blocks.low,
    }
)
PINS = 24  # most rounds of pinning
PINNED_BLOCKS = 8_000  # rounds of pinning shrink so that about this many blocks are placed again


def _crowd(blocks: Blocks) -> Ints:
    """The most units alive in any section of each block."""
    rows = [blocks.live[low:high].max() for low, high in zip(blocks.low, blocks.high, strict=True)]
    return np.array(rows, np.int64)


def place_greedy(problem: PlacementProblem) -> Placement:
    """The best greedy placement."""
    blocks = blocks_of(problem.blocks, problem.alignment)
    offsets = greedy_offsets(blocks)
    return placement_of(problem, dict(zip(blocks.ids, offsets.tolist(), strict=True)))


def greedy_offsets(blocks: Blocks) -> Ints:
    """Offsets in units; stops as soon as the lower bound is reached."""
    best, best_order, best_top, best_tight = (
        np.zeros(len(blocks), np.int64),
        np.arange(len(blocks)),
        -1,
        False,
    )
    if not len(blocks):
        return best
    for key in ORDERS.values():
        order = np.lexsort((blocks.low, -blocks.width, -key(blocks)))
        for tight in (False, True):
            offsets, top = _place_in_order(order, blocks.size, blocks.low, blocks.high, tight)
            if best_top < 0 or top < best_top:
                best, best_order, best_top, best_tight = offsets, order, top, tight
            if best_top == blocks.bound:
                return best
    return _pin(blocks, best, best_order, best_top, best_tight)


def _pin(blocks: Blocks, offsets: Ints, order: Ints, top: int, tight: bool) -> Ints:
    """Place again and again, the blocks that reach the top first."""
    best, least = offsets, top
    for _ in range(min(PINS, PINNED_BLOCKS // len(blocks))):
        reach = (offsets + blocks.size == top)[order]
        order = np.concatenate([order[reach], order[~reach]])
        offsets, top = _place_in_order(order, blocks.size, blocks.low, blocks.high, tight)
        if top < least:
            best, least = offsets, top
        if least == blocks.bound:
            break
    return best


@kernel
def _place_in_order(order: Ints, size: Ints, low: Ints, high: Ints, tight: bool) -> tuple[Ints, int]:
    """Offsets and the top of the arena when blocks are placed one by one.

    Each goes to the lowest gap that fits, with `tight` to the smallest such gap.
    """
    offsets = np.zeros(order.size, np.int64)
    placed = np.empty((order.size, 4), np.int64)  # by offset: first section, last, offset, end
    top = 0
    for count in range(order.size):
        block = order[count]
        need, first, last = size[block], low[block], high[block]
        end, offset, least = 0, -1, 1 << 62
        for k in range(count):
            if placed[k, 0] < last and first < placed[k, 1]:
                gap = placed[k, 2] - end
                if need <= gap < least:
                    offset, least = end, gap
                    if not tight:
                        break
                end = max(end, placed[k, 3])
        if offset < 0:
            offset = end
        offsets[block] = offset
        top = max(top, offset + need)
        at = count
        while at > 0 and placed[at - 1, 2] > offset:
            placed[at, 0], placed[at, 1] = placed[at - 1, 0], placed[at - 1, 1]
            placed[at, 2], placed[at, 3] = placed[at - 1, 2], placed[at - 1, 3]
            at -= 1
        placed[at, 0], placed[at, 1], placed[at, 2], placed[at, 3] = first, last, offset, offset + need
    return offsets, top
