"""The order with the least peak, with proof; or the tightest bound that the given effort allows.

Problem.  How far from optimal is a schedule?

Method.  The graph is cut where every order has run the same tasks (`relation.cuts`); each piece is solved
alone by search over down-sets, under the peak that the heuristics reach.  Pieces do not interact, so the
optimum of the whole is the largest of their optima.

Invariants.  ``lower_bound_bytes`` is under the peak of every order; the two are equal if and only if the
order is proven optimal.

Not done.  Graphs whose pieces have hundreds of parallel tasks: the bound stays below the peak there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.schedule.downsets import FOUND, NONE, search
from lowtide.schedule.heuristics import best_order
from lowtide.schedule.relation import cuts, floor_bytes, relate
from lowtide.schedule.tables import Ints, Tables, peak_bytes, usage_curve
from lowtide.schedule.window import window

__all__ = ["ExactOrder", "exact_order"]


@dataclass(frozen=True, eq=False)
class ExactOrder:
    """An order, its peak, and what no order can be under."""

    order: Ints
    peak_bytes: int
    lower_bound_bytes: int

    @property
    def proven(self) -> bool:
        """Whether no order has a lower peak."""
        return self.peak_bytes == self.lower_bound_bytes


def exact_order(t: Tables, states: int = 200_000) -> ExactOrder:
    """The best order of all, or the best one found with at most `states` states per piece."""
    order, _ = best_order(t)
    if not order.size:
        return ExactOrder(order, 0, 0)
    relation = relate(t, order)
    bound = int(floor_bytes(t, relation))
    for low, high in pairwise(cuts(relation).tolist()):
        order, least = _solve_piece(t, order, low, high, bound, states)
        bound = max(bound, least)
    return ExactOrder(order, int(peak_bytes(t, order)), bound)


def _solve_piece(t: Tables, order: Ints, low: int, high: int, bound: int, states: int) -> tuple[Ints, int]:
    """Order one piece as well as `bound` asks for; the order, and what no order of the piece can be under."""
    during, before = usage_curve(t, order)
    ceiling = int(during[low:high].max())
    if ceiling <= bound:
        return order, bound
    local = window(t, order, low, high, before[low])
    floor = max(bound, int(floor_bytes(local, relate(local, np.arange(high - low)))))
    status, level, found = search(local, floor, ceiling, states, True, True)
    if status == NONE:
        return order, ceiling
    if status == FOUND:
        order = order.copy()
        order[low:high] = order[low + found]
    return order, int(level)
