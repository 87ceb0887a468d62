"""One door to both kinds of fission: along a dimension, and along rows with halos.

Invariants.  For every number of parts of one region the resulting node has the same inputs and outputs.
"""

from __future__ import annotations

from lowtide.ir import Edit, Graph
from lowtide.transforms import fission, halo
from lowtide.transforms.fission import FissionCandidate
from lowtide.transforms.halo import HaloCandidate

__all__ = ["SplitCandidate", "apply", "resized"]

SplitCandidate = FissionCandidate | HaloCandidate


def apply(graph: Graph, candidate: SplitCandidate) -> Edit:
    """Replace the region by one Fission node; raises IllegalFission if it cannot be split so."""
    return (
        halo.apply(graph, candidate)
        if isinstance(candidate, HaloCandidate)
        else fission.apply(graph, candidate)
    )


def resized(graph: Graph, candidate: SplitCandidate) -> SplitCandidate:
    """`candidate` for the same nodes in another size: shares of rows are shares of any number of rows."""
    return candidate if isinstance(candidate, HaloCandidate) else fission.resized(graph, candidate)
