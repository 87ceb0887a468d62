"""The smallest arena, with proof: search under the capacity, from the lower bound up and the best arena down.

Problem.  Greedy placement may waste a third of the arena; is there a placement at the lower bound?

Method.  `fit` decides one capacity.  The gap between what is proven impossible and what is reached closes
from both ends: first the lower bound itself is tried, then the middle of the gap.  Each capacity is tried
with three orders of preference in turn, with a node limit that doubles from round to round.  Stretches of
time that share no block are placed independently; only the largest matters.

Invariants.  Anytime: the placement is never worse than the one it starts from.
``lower_bound_bytes <= arena_bytes`` of every placement; equal means proven optimal.

Not done.  Using both cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from lowtide.place.blocks import Blocks, Ints, blocks_of, components, placement_of
from lowtide.place.fit import DOES_NOT, FITS, LIMIT, Pruning, fit
from lowtide.place.greedy import greedy_offsets, place_greedy
from lowtide.place.problem import Placement, PlacementProblem, lower_bound

__all__ = ["ExactPlacement", "place", "place_exact"]

FIRST_NODES = 1000
ALL = Pruning()


@dataclass(frozen=True)
class ExactPlacement:
    """A placement, what no arena can be under, and how many search nodes that took."""

    placement: Placement
    lower_bound_bytes: int
    nodes: int = 0

    @property
    def proven(self) -> bool:
        """Whether no arena is smaller."""
        return self.placement.arena_bytes == self.lower_bound_bytes


def place(problem: PlacementProblem, seconds: float = 1.0) -> Placement:
    """The default: greedy, and exact search for at most `seconds` if that is above the lower bound."""
    found = place_greedy(problem)
    if found.arena_bytes == lower_bound(problem) or seconds <= 0:
        return found
    return place_exact(problem, seconds).placement


def place_exact(problem: PlacementProblem, seconds: float, pruning: Pruning = ALL) -> ExactPlacement:
    """The smallest arena, or the best one found in `seconds` and the best bound proven."""
    deadline = perf_counter() + seconds
    parts = [blocks_of(part, problem.alignment) for part in components(problem)]
    states = [_State(part) for part in sorted(parts, key=lambda part: part.bound, reverse=True)]
    enough = max([state.lower for state in states], default=0)
    for state in states:
        state.close(enough, deadline, pruning)
        # What one stretch of time needs anyway, every other one may use.
        enough = max(enough, state.lower)
    units = {name: int(at) for state in states for name, at in state.named()}
    return ExactPlacement(
        placement_of(problem, units), enough * problem.alignment, sum(state.nodes for state in states)
    )


class _State:
    """One stretch of time: the best offsets, their top, and the first capacity that is not ruled out."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.offsets = greedy_offsets(blocks)
        self.upper = self._top(self.offsets)
        self.lower = blocks.bound
        self.nodes = 0

    def _top(self, offsets: Ints) -> int:
        return int((offsets + self.blocks.size).max(initial=0))

    def named(self) -> list[tuple[int, int]]:
        """Block ids with their offsets in units."""
        return list(zip(self.blocks.ids, self.offsets.tolist(), strict=True))

    def close(self, enough: int, deadline: float, pruning: Pruning) -> None:
        """Search until the top is at most `enough`, or proven least, or the time is out."""
        limit = FIRST_NODES
        ranks = _ranks(self.blocks)
        while self.upper > max(self.lower, enough):
            for capacity in dict.fromkeys((self._goal(enough), (self._goal(enough) + self.upper) // 2)):
                if not self._try(capacity, limit, ranks, deadline, pruning):
                    return
            limit *= 2

    def _goal(self, enough: int) -> int:
        return min(max(self.lower, enough), self.upper - 1)

    def _try(self, capacity: int, limit: int, ranks: list[Ints], deadline: float, pruning: Pruning) -> bool:
        """Try one capacity in every order of preference; False if the time is out."""
        for rank in ranks:
            left = deadline - perf_counter()
            if left <= 0:
                return False
            if not self.lower <= capacity < self.upper:
                break
            started = perf_counter()
            status, offsets, used = fit(self.blocks, capacity, rank, limit, pruning)
            self.nodes += used
            if status == FITS:
                self.offsets, self.upper = offsets, self._top(offsets)
            elif status == DOES_NOT:
                self.lower = capacity + 1
            elif status == LIMIT and 4 * (perf_counter() - started) > left:
                # Searches are not interrupted: the next, longer one would end after the deadline.
                return False
        return True


def _ranks(blocks: Blocks) -> list[Ints]:
    """Orders of preference: by lifetime, area and crowd, in the sequences that MiniMalloc found useful."""
    rows = zip(blocks.low, blocks.high, strict=True)
    crowd = np.array([blocks.live[low:high].max() for low, high in rows], np.int64)
    area, width = blocks.size * blocks.width, blocks.width
    found = []
    for keys in ((crowd, area, width), (width, area, crowd), (area, width, crowd)):
        rank = np.empty(len(blocks), np.int64)
        rank[np.lexsort([-key for key in keys])] = np.arange(len(blocks))
        found.append(rank)
    return found
