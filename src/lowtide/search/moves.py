"""The moves of a point, for people: what each saved and what it cost.

Not done here: applying them (`bases.realise_base`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowtide.ir import Fused
from lowtide.run.kernels import Kernels, kernel_of
from lowtide.search.bases import choices_of
from lowtide.search.explorer import Spot
from lowtide.search.levels import Choice, Level
from lowtide.search.outcome import Move

__all__ = ["count_moves", "moves_of"]


def moves_of(spot: Spot, kernels: Kernels) -> tuple[Move, ...]:
    """A Fission move per split region, Remat per recomputed storage, Fuse per compiled update."""
    level = spot.base.level
    moves = [*_splits(level, spot.point.options), *_remats(level, spot.point.chosen)]
    for choice in choices_of(spot.point):
        inner = choice.variant.level
        moves += [*_splits(inner, choice.point.options), *_remats(inner, choice.point.chosen)]
    for node in level.graph.nodes:
        if isinstance(node.op, Fused) and kernel_of(node.op, kernels):
            moves.append(Move("fuse", node.origin.module or node.origin.phase, node.origin.source))
    return tuple(moves)


def count_moves(spot: Spot, kernels: Kernels) -> dict[str, int]:
    """How many moves of each kind a point applies."""
    return dict(Counter(move.kind for move in moves_of(spot, kernels)))


def _splits(level: Level, options: tuple[Choice, ...]) -> Iterator[Move]:
    """One Fission move per split region of a level, by the module that it lies in."""
    for region, choice in zip(level.regions, options, strict=True):
        origin = level.graph.node[region.node].origin
        where = f"{origin.module or origin.phase} in {len(choice.variant.op.parts)} parts"
        yield Move("fission", where, origin.source)


def _remats(level: Level, chosen: frozenset[int]) -> Iterator[Move]:
    mirror = level.search.mirror
    for number, storage in enumerate(mirror.storage_ids):
        if storage not in chosen:
            continue
        owner = int(mirror.owner[number])
        origin = level.graph.node[mirror.node_ids[owner]].origin
        size, cost = int(mirror.nbytes[number]), float(mirror.cost[owner])
        yield Move("remat", origin.module, origin.source, size, cost)
