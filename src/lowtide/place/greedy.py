"""Greedy placement: one block after the other, each at the lowest (or tightest) gap that fits.

Problem.  An arena close to the lower bound in milliseconds, for thousands of blocks.

Method.  `ORDERS` are the orders in which blocks are placed; each runs with first fit and with best fit, the
smallest arena wins.  Then its order is improved: blocks that reach the top of the arena evidently should have
had the choice earlier.  `_pin` moves all of them to the front, again and again, whatever comes of it; `climb`
moves one of them forward, and the new order stays if it is not worse.

Invariants.  Deterministic (the seed is fixed).  Never worse than greedy by size, which is the first entry.

Not done.  Proofs (`exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lowtide.kernel import kernel
from lowtide.place.blocks import Blocks, Ints, blocks_of, placement_of
from lowtide.place.problem import Placement, PlacementProblem

__all__ = ["ORDERS", "Greedy", "best_greedy", "climb", "place_greedy"]

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
PINS = 24  # most rounds of `_pin`
CLIMB_ROUNDS = 400  # most rounds of `climb`
CLIMB_PAIRS = 10_000_000  # a round looks at most pairs of blocks: about 10 ms for either, in all
FEW = 1000  # blocks; beyond, best fit is tried with the orders below only
BEST_FIT = ("crowd", "time")


@dataclass(frozen=True, eq=False)
class Greedy:
    """Offsets in units, the top of the arena, and how they came about: the order, and whether best fit."""

    offsets: Ints
    top: int
    order: Ints
    tight: bool


def _crowd(blocks: Blocks) -> Ints:
    """The most units alive in any section of each block."""
    rows = [blocks.live[low:high].max() for low, high in zip(blocks.low, blocks.high, strict=True)]
    return np.array(rows, np.int64)


def place_greedy(problem: PlacementProblem) -> Placement:
    """The best greedy placement."""
    blocks = blocks_of(problem.blocks, problem.alignment)
    found = best_greedy(blocks)
    return placement_of(problem, dict(zip(blocks.ids, found.offsets.tolist(), strict=True)))


def best_greedy(blocks: Blocks) -> Greedy:
    """The best of all orders, improved; stops as soon as the lower bound is reached."""
    best = Greedy(np.zeros(0, np.int64), 0, np.zeros(0, np.int64), False)
    if not len(blocks):
        return best
    for name, key in ORDERS.items():
        order = np.lexsort((blocks.low, -blocks.width, -key(blocks)))
        for tight in (False, True) if len(blocks) <= FEW or name in BEST_FIT else (False,):
            offsets, top = _place_in_order(order, blocks.size, blocks.low, blocks.high, tight)
            if not best.top or top < best.top:
                best = Greedy(offsets, top, order, tight)
            if best.top == blocks.bound:
                return best
    best = _pin(blocks, best, min(PINS, CLIMB_PAIRS // len(blocks) ** 2))
    return climb(blocks, best, min(CLIMB_ROUNDS, CLIMB_PAIRS // len(blocks) ** 2), 0)


def _pin(blocks: Blocks, found: Greedy, rounds: int) -> Greedy:
    """Place again with all blocks that reach the top first, `rounds` times; the best on the way."""
    best = found
    for _ in range(rounds):
        reach = (found.offsets + blocks.size == found.top)[found.order]
        order = np.concatenate([found.order[reach], found.order[~reach]])
        offsets, top = _place_in_order(order, blocks.size, blocks.low, blocks.high, found.tight)
        found = Greedy(offsets, int(top), order, found.tight)
        best = min(best, found, key=lambda entry: entry.top)
        if best.top == blocks.bound:
            break
    return best


def climb(blocks: Blocks, found: Greedy, rounds: int, seed: int) -> Greedy:
    """Move blocks that reach the top forward in the order, as long as the arena does not grow."""
    offsets, top, order = _climb(
        found.offsets, found.top, found.order.copy(), blocks.size, blocks.low, blocks.high, found.tight,
        blocks.bound, rounds, seed,
    )  # fmt: skip
    return Greedy(offsets, int(top), order, found.tight)


@kernel
def _climb(
    offsets: Ints, top: int, order: Ints, size: Ints, low: Ints, high: Ints, tight: bool, enough: int,
    rounds: int, seed: int,
) -> tuple[Ints, int, Ints]:  # fmt: skip
    state = np.uint64(2 * seed + 1)
    reach = np.empty(order.size, np.int64)
    for _ in range(rounds):
        if top <= enough:
            break
        count = 0
        for k in range(order.size):
            if offsets[order[k]] + size[order[k]] == top:
                reach[count] = k
                count += 1
        state = _next(state)
        place = reach[_below(state, count)]
        state = _next(state)
        # The square prefers the front.
        goal = _below(state, place + 1) * _below(state, place + 1) // (place + 1)
        other = order.copy()
        other[goal + 1 : place + 1] = order[goal:place]
        other[goal] = order[place]
        state = _next(state)
        if _below(state, 10) < 3:
            state = _next(state)
            one, two = _below(state, order.size), _below(_next(state), order.size)
            other[one], other[two] = other[two], other[one]
        moved, height = _place_in_order(other, size, low, high, tight)
        if height <= top:
            offsets, top, order = moved, height, other
    return offsets, top, order


@kernel
def _next(state: np.uint64) -> np.uint64:
    """A linear congruential generator."""
    return state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@kernel
def _below(state: np.uint64, limit: int) -> int:
    """A number in ``[0, limit)`` from the upper bits of `state`."""
    return int((state >> np.uint64(33)) % np.uint64(limit))


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
