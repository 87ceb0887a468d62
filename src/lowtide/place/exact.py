"""The smallest arena, with proof: search under a capacity, from the lower bound up and the best arena down.

Problem.  Greedy placement may waste a third of the arena; is there a placement at the lower bound?

Method.  A search (`fit_valleys` or `fit`) decides one capacity.  The gap between what is proven impossible
and what is reached closes from both ends: the lowest capacity that is not ruled out is tried first, then,
with fewer nodes, three, two and one quarters of the gap.  Searches are lucky or not: each runs with several
orders of preference and is started again with shuffled ones; node limits double from turn to turn.
Stretches of time that share no block are placed independently; only the largest matters.

Invariants.  Anytime: the placement is never worse than greedy.  ``lower_bound_bytes <= arena_bytes`` of every
placement; equal means proven optimal.  Deterministic but for the time limit.

Not done.  Using both cores; searching beyond `LARGEST`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lowtide.place.blocks import Blocks, Ints, blocks_of, components, placement_of
from lowtide.place.fit import DOES_NOT, FITS, fit
from lowtide.place.greedy import best_greedy, climb
from lowtide.place.problem import Block, Placement, PlacementProblem
from lowtide.place.valleys import fit_valleys

__all__ = ["SEARCHES", "ExactPlacement", "place", "place_exact", "warm_up"]

Search = Callable[[Blocks, int, Ints, int], tuple[int, Ints, int]]

# Which blocks come first among equals, for either search.  Instances differ in which one is lucky.
SEARCHES: Mapping[str, tuple[Search, tuple[tuple[str, ...], ...]]] = MappingProxyType(
    {
        "valleys": (fit_valleys, (("area",), ("width",), ("size",), ("late",), ("sections", "size"))),
        "offsets": (
            fit,
            (
                ("crowd", "width", "area"),
                ("crowd", "sections", "size"),
                ("early", "size", "area"),
                ("width", "area", "crowd"),
                ("crowd", "area", "width"),
            ),
        ),
    }
)
FIRST_NODES = 1000
RESTART_NODES = 2000
NOISES = (0.1, 0.5, 2.0)  # spread of the logarithm
CLIMB_ROUNDS = 512  # of the greedy placement in the first turn; doubles
CLIMB_SLICE = 32
SLOWEST_NODES_PER_S = 20_000.0  # until something better was seen
LARGEST = 4_000_000  # blocks x sections: beyond about 1,400 blocks a branch needs too much memory


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
    return place_exact(problem, seconds).placement


def place_exact(
    problem: PlacementProblem, seconds: float, searches: Sequence[str] = tuple(SEARCHES)
) -> ExactPlacement:
    """The smallest arena, or the best one found in `seconds` and the best bound proven.

    `searches` are names in `SEARCHES`.
    """
    deadline = perf_counter() + seconds
    parts = [blocks_of(part, problem.alignment) for part in components(problem)]
    states = [_State(part, searches) for part in sorted(parts, key=lambda part: part.bound, reverse=True)]
    enough = max([state.lower for state in states], default=0)
    for state in states:
        state.close(enough, deadline)
        # What one stretch of time needs anyway, every other one may use.
        enough = max(enough, state.lower)
    units = {name: int(at) for state in states for name, at in state.named()}
    return ExactPlacement(
        placement_of(problem, units), enough * problem.alignment, sum(state.nodes for state in states)
    )


class _State:
    """One stretch of time: the best offsets, their top, and the first capacity that is not ruled out."""

    def __init__(self, blocks: Blocks, searches: Sequence[str]) -> None:
        self.blocks = blocks
        self.searches = searches
        self.keys = _keys(blocks)
        self.greedy = best_greedy(blocks)
        self.offsets, self.upper = self.greedy.offsets, self.greedy.top
        self.lower = blocks.bound
        self.nodes = 0
        self.nodes_per_s = SLOWEST_NODES_PER_S

    def _top(self, offsets: Ints) -> int:
        return int((offsets + self.blocks.size).max(initial=0))

    def named(self) -> list[tuple[int, int]]:
        """Block ids with their offsets in units."""
        return list(zip(self.blocks.ids, self.offsets.tolist(), strict=True))

    def close(self, enough: int, deadline: float) -> None:
        """Search until the top is at most `enough`, or proven least, or the time is out."""
        turn = 0
        if len(self.blocks) * self.blocks.live.size > LARGEST:
            return
        while self.upper > max(self.lower, enough):
            self._climb(CLIMB_ROUNDS << turn, turn, deadline)
            for quarter in (0, 3, 2, 1):
                for search, rank, nodes in self._attempts(turn, 1 if quarter else 0):
                    goal = min(max(self.lower, enough), self.upper - 1)
                    capacity = goal + (self.upper - goal) * quarter // 4
                    if not self.lower <= capacity < self.upper:
                        break
                    if not self._try(search, capacity, nodes, rank, deadline):
                        return
            turn += 1

    def _climb(self, rounds: int, turn: int, deadline: float) -> None:
        """Go on improving the greedy placement, in slices, a tenth of the time that is left at most."""
        until = perf_counter() + (deadline - perf_counter()) / 10
        for number in range(0, rounds, CLIMB_SLICE):
            if perf_counter() >= until or self.greedy.top <= self.lower:
                break
            self.greedy = climb(self.blocks, self.greedy, CLIMB_SLICE, turn + number)
        if self.greedy.top < self.upper:
            self.offsets, self.upper = self.greedy.offsets, self.greedy.top

    def _attempts(self, turn: int, halvings: int) -> Iterator[tuple[Search, Ints, int]]:
        """Searches with their orders of preference and node limits, which double from turn to turn.

        Restarts with shuffled orders are given about as many nodes all together.
        """
        nodes = (FIRST_NODES << turn) >> halvings
        for name in self.searches:
            search, preferences = SEARCHES[name]
            for names in preferences:
                yield search, _rank(*(self.keys[key] for key in names)), nodes
        random = np.random.default_rng((turn, halvings))
        for number in range((8 << turn) >> halvings):
            # Every fourth restart is of another search than the first.
            name = self.searches[number // 4 % len(self.searches) if number % 4 == 3 else 0]
            search, preferences = SEARCHES[name]
            first, *others = (self.keys[key] for key in preferences[number % len(preferences)])
            noise = random.lognormal(0.0, random.choice(NOISES), len(self.blocks))
            yield search, _rank(first * noise, *others), RESTART_NODES

    def _try(self, search: Search, capacity: int, nodes: int, rank: Ints, deadline: float) -> bool:
        """Try one capacity with one order of preference; False if the time is out."""
        started = perf_counter()
        # A search is not interrupted, so it gets no more nodes than it has time for.
        nodes = min(nodes, int(self.nodes_per_s * (deadline - started)))
        if nodes <= 0:
            return False
        status, offsets, used = search(self.blocks, capacity, rank, nodes)
        self.nodes += used
        if status == FITS:
            self.offsets, self.upper = offsets, self._top(offsets)
        elif status == DOES_NOT:
            self.lower = capacity + 1
        if used >= FIRST_NODES // 4:
            self.nodes_per_s = max(self.nodes_per_s, used / (perf_counter() - started))
        return True


def _keys(blocks: Blocks) -> dict[str, Ints]:
    """What blocks are ranked by, largest first."""
    rows = zip(blocks.low, blocks.high, strict=True)
    return {
        "crowd": np.array([blocks.live[low:high].max() for low, high in rows], np.int64),
        "area": blocks.size * blocks.width,
        "width": blocks.width,
        "sections": blocks.high - blocks.low,
        "size": blocks.size,
        "early": -blocks.low,
        "late": blocks.high,
    }


def _rank(*keys: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Ints:
    """Positions when blocks are sorted by `keys`, the first one counting most, largest first."""
    rank = np.empty(keys[0].size, np.int64)
    rank[np.lexsort([-key for key in reversed(keys)])] = np.arange(rank.size)
    return rank


def warm_up() -> None:
    """Compile every kernel of this package (about 8 s, once a machine), or load them from disk."""
    blocks = blocks_of([Block(0, 2, 0, 2), Block(1, 1, 1, 3)], 1)
    climb(blocks, best_greedy(blocks), 1, 0)
    for search, _ in SEARCHES.values():
        search(blocks, 3, np.arange(2), 10)
