"""Greedy placement: the largest block first, each at the lowest gap that fits (greedy by size).

Not done: proofs of optimality (`exact.py`).
"""

from __future__ import annotations

from lowtide.place.problem import Block, Placement, PlacementProblem, aligned

__all__ = ["place_greedy"]


def place_greedy(problem: PlacementProblem) -> Placement:
    """Place all blocks; ties go to the longer lifetime, then to the smaller id."""
    order = sorted(problem.blocks, key=lambda b: (-b.nbytes, b.start - b.stop, b.id))
    placed: list[tuple[int, int, Block]] = []
    offsets: dict[int, int] = {}
    for block in order:
        size = aligned(block.nbytes, problem.alignment)
        offset = _lowest_gap(block, size, placed)
        offsets[block.id] = offset
        placed.append((offset, offset + size, block))
        placed.sort(key=lambda entry: entry[0])
    return Placement(offsets, max((end for _, end, _ in placed), default=0))


def _lowest_gap(block: Block, size: int, placed: list[tuple[int, int, Block]]) -> int:
    offset = 0
    for start, end, other in placed:
        if other.start < block.stop and block.start < other.stop:
            if start - offset >= size:
                break
            offset = max(offset, end)
    return offset
