"""Moves that can only help: bring releases forward, put allocations off.

Problem.  List schedulers leave tasks in places where a look at the whole would not: a weight gradient
that waits for its update, a recomputed value that is made long before it is read.

Method.  Live bytes are a submodular function of the set of tasks that ran: the change that a task makes
is never larger when more tasks ran before it.  So if a ready task (or a chain of tasks, each waiting
only for the ones before it) ends at no more live bytes than it started from and does not rise above
`level` on its way, then running it *now* leaves every later step no worse.  `advance` follows a given
order and does that wherever it can; `delay` is its mirror image from the end.

Invariants.  With ``level >= peak(order)`` neither raises the peak.

Not done.  Moves that trade a rise now for a fall later (`exact`, `windows`).
"""

from __future__ import annotations

import numpy as np

from lowtide.kernel import kernel
from lowtide.schedule.front import (
    CHAIN,
    END,
    HILL,
    LENGTH,
    READY,
    WAITS,
    Front,
    back,
    best_released,
    front,
    refresh,
    refresh_back,
    run,
    run_back,
)
from lowtide.schedule.tables import Ints, Tables, end_bytes, peak_bytes, positions, start_bytes, step_bytes

__all__ = ["advance", "delay", "polish"]


@kernel
def _next_forward(f: Front, waiting: int, place: Ints, room: int) -> tuple[int, int]:
    """Rank of the ready task to run, and how many tasks of its chain to run at once."""
    pick, first, least = -1, 0, 1
    for k in range(waiting):
        task = f.task[READY, k]
        if place[task] < place[f.task[READY, first]]:
            first = k
        if f.task[END, task] < least and f.task[HILL, task] <= room:
            pick, least = k, f.task[END, task]
    if pick < 0:
        return first, 1
    return pick, f.task[LENGTH, f.task[READY, pick]]


@kernel
def _rank(f: Front, waiting: int, task: int) -> int:
    """The rank of `task`, which has just been released."""
    for k in range(waiting - 1, -1, -1):
        if f.task[READY, k] == task:
            return k
    return -1


@kernel
def advance(t: Tables, order: Ints, level: int, until: int = 1 << 62) -> Ints:
    """Follow `order`, but run at once whatever ends no higher than it starts and stays within `level`.

    From step `until` on the rest keeps its order.
    """
    place = positions(order)
    f, waiting = front(t)
    live = start_bytes(t)
    result = np.empty(order.size, np.int64)
    step = 0
    while step < min(until, order.size):
        refresh(t, f, waiting, CHAIN)
        pick, length = _next_forward(f, waiting, place, level - live)
        while True:
            task = f.task[READY, pick]
            _, live = step_bytes(t, task, f.left, live)
            waiting = run(t, f, pick, waiting)
            result[step] = task
            step += 1
            length -= 1
            if length == 0:
                break
            pick = _rank(f, waiting, best_released(t, f, task))
    for task in order:
        if f.task[WAITS, task] >= 0:
            result[step] = task
            step += 1
    return result


@kernel
def delay(t: Tables, order: Ints, level: int, until: int = 0) -> Ints:
    """Follow `order` from its end, but put off whatever needs no more before than after it.

    The first `until` steps are those of `order` that remain, in its order.
    """
    place = positions(order)
    b, waiting = back(t)
    live = end_bytes(t)
    result = np.empty(order.size, np.int64)
    for step in range(order.size - 1, until - 1, -1):
        refresh_back(t, b, waiting)
        pick, last, least = -1, 0, 1
        for k in range(waiting):
            task = b.task[READY, k]
            if place[task] > place[b.task[READY, last]]:
                last = k
            if b.task[END, task] < least and live + b.task[HILL, task] <= level:
                pick, least = k, b.task[END, task]
        pick = last if pick < 0 else pick
        result[step] = b.task[READY, pick]
        live += b.task[END, result[step]]
        waiting = run_back(t, b, pick, waiting)
    step = 0
    for task in order:
        if b.task[WAITS, task] >= 0:
            result[step] = task
            step += 1
    return result


def polish(t: Tables, order: Ints, rounds: int) -> tuple[Ints, int]:
    """`delay` and `advance` in turn while the peak falls, at most `rounds` times; the order and its peak.

    Without a lower peak `order` itself comes back.
    """
    peak = peak_bytes(t, order)
    for _ in range(rounds):
        candidate = advance(t, delay(t, order, peak), peak)
        lower = peak_bytes(t, candidate)
        if lower >= peak:
            break
        order, peak = candidate, lower
    return order, int(peak)
