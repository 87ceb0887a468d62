"""Is a placement sound?  Every pair of blocks is looked at; nothing is shared with the solvers.

Invariants.  An empty list of complaints means that the arena can be used as planned.
"""

from __future__ import annotations

from itertools import combinations

from lowtide.place.problem import Block, Placement, PlacementProblem

__all__ = ["check_placement"]


def check_placement(problem: PlacementProblem, placement: Placement) -> list[str]:
    """Complaints about `placement`, each naming the blocks; empty if it is sound."""
    names = {block.id for block in problem.blocks}
    wrong = [f"block {name} has no offset" for name in names - placement.offsets.keys()]
    wrong += [
        f"offset for block {name}, which is not placed here" for name in placement.offsets.keys() - names
    ]
    if wrong:
        return wrong
    for block in problem.blocks:
        wrong += _misplaced(block, placement, problem.alignment)
    for one, other in combinations(problem.blocks, 2):
        if max(one.start, other.start) < min(one.stop, other.stop) and _collide(one, other, placement):
            wrong.append(f"blocks {one.id} and {other.id} are alive together and share bytes")
    return wrong


def _misplaced(block: Block, placement: Placement, alignment: int) -> list[str]:
    offset = placement.offsets[block.id]
    wrong = []
    if offset < 0 or offset % alignment:
        wrong.append(f"block {block.id} lies at {offset}, which is not a multiple of {alignment}")
    if block.start < block.stop and offset + block.nbytes > placement.arena_bytes:
        wrong.append(
            f"block {block.id} ends at {offset + block.nbytes}, the arena at {placement.arena_bytes}"
        )
    return wrong


def _collide(one: Block, other: Block, placement: Placement) -> bool:
    first, second = placement.offsets[one.id], placement.offsets[other.id]
    return first < second + other.nbytes and second < first + one.nbytes and one.nbytes > 0 < other.nbytes
