"""Correcting predicted times by measured ones.

Problem.  Seconds are predicted from operators that ran alone, with warm operands; in a plan they find their
operands elsewhere, and fused groups replace them.  What is off is off by much the same factor for plans of
one kind, and plans with other regions split are another kind.

Method.  One factor per base, learned from the last plan of it that was measured.  A base without one has the
geometric mean of 1 and the last factor of any: what was off with one kind need not be with another, and of a
kind that is not tried nothing is ever known.

Not done.  Factors per operator family: a plan is measured as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lowtide.search.explorer import Spot

__all__ = ["Correction"]


@dataclass
class Correction:
    """Measured to predicted seconds, by base; `otherwise` is the last of any."""

    otherwise: float = 1.0
    known: dict[int, float] = field(default_factory=dict)

    def seconds(self, spot: Spot) -> float:
        """What a point is expected to take when run."""
        return spot.point.latency_s * self.factor(spot)

    def factor(self, spot: Spot) -> float:
        """Measured to predicted seconds for points of this base."""
        return self.known.get(id(spot.base), math.sqrt(self.otherwise))

    def learn(self, spot: Spot, measured_s: float) -> None:
        """Remember what a plan of this point took."""
        self.otherwise = self.known[id(spot.base)] = measured_s / spot.point.latency_s
