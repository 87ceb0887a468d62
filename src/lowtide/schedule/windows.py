"""Improve an order where its peak is: windows around the peak, solved exactly.

Problem.  Graphs of hundreds of nodes are too large for exact search, but a peak is a local matter.

Method.  The tasks around the step of the peak are ordered anew by `downsets.search`, with everything
outside the window fixed; windows grow until one lowers the peak, or search meets its limit.  A found
order replaces the window and the next peak is looked for.  A window that is proven optimal is no failure:
the next, larger one contains it.  Windows stop at the cuts of the graph (`relation.cuts`), where every
order has run the same tasks; once a window fills a piece between cuts, the peak is optimal.

Invariants.  The peak never rises.

Not done.  Moves between far ends of the order, other than those of `polish`.
"""

from __future__ import annotations

from bisect import bisect_right
from time import perf_counter

import numpy as np

from lowtide.schedule.downsets import FOUND, LIMIT, NONE, search
from lowtide.schedule.polish import polish
from lowtide.schedule.relation import cuts, floor_bytes, relate
from lowtide.schedule.tables import Ints, Tables, highest, peak_bytes, usage_curve
from lowtide.schedule.window import window

__all__ = ["improve", "improve_peak", "solve_window"]

NARROWEST = 8
ROUNDS = 4


def solve_window(
    t: Tables, order: Ints, start: int, stop: int, live: int, enough: int, limit: int
) -> tuple[int, Ints]:
    """Order ``order[start:stop]`` anew with a lower peak; the search's status and the whole order.

    `live` bytes are live before step `start`.  Any window order with a peak of at most `enough` is good
    enough.  Without success `order` comes back.  If the least peak is out of reach of `limit` states,
    any lower one is looked for.
    """
    local = window(t, order, start, stop, live)
    own = np.arange(stop - start)
    ceiling = peak_bytes(local, own)
    floor = floor_bytes(local, relate(local, own))
    status, _, found = search(local, max(floor, min(enough, ceiling - 1)), ceiling, limit, True, True)
    if status == LIMIT:
        again, _, found = search(local, ceiling - 1, ceiling, limit, True, True)
        status = FOUND if again == FOUND else LIMIT
    if status != FOUND:
        return status, order
    result = order.copy()
    result[start:stop] = order[start + found]
    return status, result


def improve_peak(t: Tables, order: Ints, pieces: Ints, widest: int, limit: int) -> tuple[int, Ints]:
    """One improvement at the first peak of `order`: FOUND and the new order; NONE if it is optimal.

    Windows double up to `widest` tasks and end at the cuts `pieces`; LIMIT if none helps.
    """
    during, before = usage_curve(t, order)
    _, peak = highest(during, 0, during.size)
    piece = bisect_right(pieces, peak)
    low, high = int(pieces[piece - 1]), int(pieces[piece])
    width = NARROWEST
    while True:
        start = max(low, min(peak - width // 2, high - width))
        stop = min(high, start + width)
        outside = max(highest(during, 0, start)[0], highest(during, stop, during.size)[0])
        status, result = solve_window(t, order, start, stop, before[start], outside, limit)
        if status != NONE or (start == low and stop == high):
            return status, result
        if width >= widest:
            return LIMIT, order
        width *= 2


def improve(t: Tables, order: Ints, widest: int, limit: int, deadline: float) -> tuple[int, Ints]:
    """Improve and polish `order` until its peak is optimal (NONE) or no window helps (LIMIT).

    `deadline` is a `time.perf_counter` time; it is looked at between windows.
    """
    if not order.size:
        return NONE, order
    pieces = cuts(relate(t, order))
    while perf_counter() < deadline:
        status, order = improve_peak(t, order, pieces, widest, limit)
        if status != FOUND:
            return status, order
        order, _ = polish(t, order, ROUNDS)
    return LIMIT, order
