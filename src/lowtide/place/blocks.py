"""A placement problem as arrays, in units of the alignment.

Problem.  The solvers look at blocks millions of times.

Method.  Sizes become whole numbers of alignment units.  Time becomes *sections*: stretches of steps in
which the same blocks are alive.  Blocks that occupy nothing, because they have no bytes or no steps, are
left out and lie at 0.  Where no block is alive on both sides of a step, the problem falls apart into
`components`, which are solved one by one.

Invariants.  ``low[i] < high[i]`` are section numbers; two blocks meet in time if and only if their section
ranges do.

Not done.  Dominated sections (whose blocks are a subset of a neighbour's) stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.place.problem import Block, Placement, PlacementProblem, aligned

__all__ = ["Blocks", "Ints", "blocks_of", "components", "placement_of"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Block i occupies ``size[i]`` units in the sections ``[low[i], high[i])``; `ids` names it.

    `width[i]` are its steps.  `live` are the units alive per section: the largest is a lower bound.
    """

    ids: tuple[int, ...]
    size: Ints
    low: Ints
    high: Ints
    width: Ints
    live: Ints

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bound(self) -> int:
        """The most units alive at once."""
        return int(self.live.max(initial=0))


def blocks_of(blocks: Sequence[Block], alignment: int) -> Blocks:
    """Arrays of those of `blocks` that occupy something."""
    real = [block for block in blocks if block.nbytes > 0 and block.start < block.stop]
    size = np.array([aligned(block.nbytes, alignment) // alignment for block in real], np.int64)
    start = np.array([block.start for block in real], np.int64)
    stop = np.array([block.stop for block in real], np.int64)
    steps = np.unique(np.concatenate([start, stop]))
    low, high = np.searchsorted(steps, start), np.searchsorted(steps, stop)
    change = np.zeros(steps.size + 1, np.int64)
    np.add.at(change, low, size)
    np.subtract.at(change, high, size)
    live = np.cumsum(change)[: max(0, steps.size - 1)]
    return Blocks(
        tuple(block.id for block in real),
        size,
        low.astype(np.int64),
        high.astype(np.int64),
        stop - start,
        live,
    )


def components(problem: PlacementProblem) -> list[tuple[Block, ...]]:
    """The blocks by stretch of time with something alive throughout, in order of time."""
    found: list[list[Block]] = []
    end = 0
    for block in sorted(problem.blocks, key=lambda b: (b.start, b.stop)):
        if not found or block.start >= end:
            found.append([])
            end = block.stop
        found[-1].append(block)
        end = max(end, block.stop)
    return [tuple(part) for part in found]


def placement_of(problem: PlacementProblem, units: dict[int, int]) -> Placement:
    """A Placement from offsets in units by block id; blocks without one occupy nothing and lie at 0."""
    step = problem.alignment
    offsets = {block.id: units.get(block.id, 0) * step for block in problem.blocks}
    ends = [offsets[block.id] + aligned(block.nbytes, step) for block in problem.blocks if block.id in units]
    return Placement(offsets, max(ends, default=0))
