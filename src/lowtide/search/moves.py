"""The moves of a point, for people: what each saved and what it cost.

Not done here: applying them (`bases.realise_base`).
"""

from __future__ import annotations

from lowtide.ir import Fission, Fused
from lowtide.run.kernels import Kernels, kernel_of
from lowtide.search.explorer import Spot
from lowtide.search.levels import Level
from lowtide.search.outcome import Move

__all__ = ["moves_of"]


def moves_of(spot: Spot, kernels: Kernels) -> tuple[Move, ...]:
    """A Fission move per split region, Remat per recomputed storage, Fuse per compiled update."""
    moves = [*_splits(spot), *_remats(spot.base.outer, spot.point.outer)]
    if spot.base.inner is not None:
        moves += _remats(spot.base.inner, spot.point.inner)
    for node in spot.base.outer.graph.nodes:
        if isinstance(node.op, Fused) and kernel_of(node.op, kernels):
            moves.append(Move("fuse", node.origin.module or node.origin.phase, node.origin.source))
    return tuple(moves)


def _splits(spot: Spot) -> list[Move]:
    """One Fission move per split region, by the module that it lies in."""
    graph = spot.base.outer.graph
    moves = []
    for node in graph.nodes:
        if isinstance(node.op, Fission):
            where = f"{node.origin.module or node.origin.phase} in {len(node.op.parts)} parts"
            moves.append(Move("fission", where, node.origin.source))
    return moves


def _remats(level: Level, chosen: frozenset[int]) -> list[Move]:
    mirror = level.search.mirror
    moves = []
    for number, storage in enumerate(mirror.storage_ids):
        if storage not in chosen:
            continue
        owner = int(mirror.owner[number])
        origin = level.graph.node[mirror.node_ids[owner]].origin
        size, cost = int(mirror.nbytes[number]), float(mirror.cost[owner])
        moves.append(Move("remat", origin.module, origin.source, size, cost))
    return moves
