"""A new order after an edit, from the old one.

Problem.  A search asks for the order of a graph that differs from the last one in a few nodes, thousands
of times per second.

Method.  `merge` keeps the old order: tasks that are new go directly before their first dependent, and
whatever an edge now contradicts moves as little as needed.  Then only a window is scheduled anew.

- ``peak`` (default): wherever the edit moved the peak, releases that can come before it are brought forward,
  allocations that can wait are put behind it, and a window around it is solved by exact search with few
  states; that is repeated while the peak falls.  What does not decide the peak keeps its order.
- ``narrow-waist``: as published (MAGIS, section 5).  The interval that holds the changed tasks is extended
  to where the graph is narrow, cut at narrow tasks, each piece ordered by dynamic programming over
  down-sets, and the pieces that free most come first.

Invariants.  The result is a valid order; after `merge`, windows never raise the peak.

Not done.  Building the problem: the search edits its tables itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lowtide.analysis.facts import Facts
from lowtide.ir.graph import Graph
from lowtide.kernel import kernel
from lowtide.schedule.downsets import FOUND, NONE
from lowtide.schedule.polish import advance, delay
from lowtide.schedule.relation import narrow_waist, relate
from lowtide.schedule.schedule import Schedule, order_problem
from lowtide.schedule.tables import (
    AFTER,
    BEFORE,
    Ints,
    Tables,
    as_order,
    highest,
    peak_bytes,
    task_count,
    usage_curve,
)
from lowtide.schedule.windows import improve_peak, solve_window

__all__ = ["Incremental", "merge", "reorder", "reschedule"]


@dataclass(frozen=True)
class Incremental:
    """How `reorder` works.

    variant: "peak" or "narrow-waist", see the module.
    margin: how many steps behind the peak releases are still brought forward, and before it put off.
    width: most tasks in a window around the peak.
    states: limit of one exact search; 0 leaves windows out.
    rounds: most improvements per edit.
    extend: most tasks by which "narrow-waist" extends its interval on each side.
    """

    variant: Literal["peak", "narrow-waist"] = "peak"
    margin: int = 32
    width: int = 64
    states: int = 200
    rounds: int = 8
    extend: int = 20


DEFAULT = Incremental()


@kernel
def _keys(t: Tables, old: Ints) -> Ints:
    """What tasks are sorted by: the old step, or just under the first dependent's.

    A new task without dependents goes behind the last task that it waits for.
    """
    count = task_count(t)
    wide = 1 << 20
    key = np.full(count, -1, np.int64)
    for k in range(old.size):
        key[old[k]] = (k + 1) * wide
    for task in range(count - 1, -1, -1):
        if key[task] < 0 and t.task[AFTER, task] < t.task[AFTER, task + 1]:
            key[task] = 1 << 62
            for k in range(t.task[AFTER, task], t.task[AFTER, task + 1]):
                if key[t.entries[k]] >= 0:
                    key[task] = min(key[task], key[t.entries[k]] - 1)
            if key[task] == 1 << 62:
                key[task] = -1
    for task in range(count):
        if key[task] < 0:
            for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
                key[task] = max(key[task], key[t.entries[k]] + 1)
    return key


@kernel
def merge(t: Tables, old: Ints) -> Ints:
    """The order of all tasks that follows `old`, which may lack tasks and contradict edges.

    Task numbers must be a valid order (as `order_problem` numbers them).
    """
    key = _keys(t, old)
    count = task_count(t)
    waits = np.empty(count, np.int64)
    ready, waiting = np.empty(count, np.int64), 0
    for task in range(count):
        waits[task] = t.task[BEFORE, task + 1] - t.task[BEFORE, task]
        if waits[task] == 0:
            ready[waiting] = task
            waiting += 1
    order = np.empty(count, np.int64)
    for step in range(count):
        pick = 0
        for k in range(1, waiting):
            if key[ready[k]] < key[ready[pick]]:
                pick = k
        order[step] = ready[pick]
        waiting -= 1
        ready[pick] = ready[waiting]
        for k in range(t.task[AFTER, order[step]], t.task[AFTER, order[step] + 1]):
            waits[t.entries[k]] -= 1
            if waits[t.entries[k]] == 0:
                ready[waiting] = t.entries[k]
                waiting += 1
    return order


def reorder(t: Tables, old: Ints, changed: Collection[int], how: Incremental = DEFAULT) -> Ints:
    """An order of all tasks of `t`, from the order `old` of those that were there before.

    `changed` are the tasks that are new or whose relations changed; "peak" does not need them.
    """
    order = merge(t, old)
    if not order.size:
        return order
    if how.variant == "narrow-waist":
        return _around_changes(t, order, changed, how)
    return _around_peaks(t, order, how)


def _around_peaks(t: Tables, order: Ints, how: Incremental) -> Ints:
    whole = as_order([0, order.size])
    for _ in range(how.rounds):
        during, _ = usage_curve(t, order)
        level, peak = highest(during, 0, during.size)
        moved = delay(t, order, level, max(0, peak - how.margin))
        moved = advance(t, moved, level, peak + how.margin)
        if peak_bytes(t, moved) < level:
            order = moved
            continue
        status, order = improve_peak(t, order, whole, how.width, how.states) if how.states else (NONE, order)
        if status != FOUND:
            break
    return order


def _around_changes(t: Tables, order: Ints, changed: Collection[int], how: Incremental) -> Ints:
    """The published way: one interval, cut at narrow tasks, each piece by dynamic programming."""
    if not changed:
        return order
    waist = narrow_waist(relate(t, order))[order]
    steps = np.flatnonzero(np.isin(order, as_order(list(changed))))
    start = _extended(waist, int(steps[0]), -1, how.extend)
    stop = _extended(waist, int(steps[-1]), 1, how.extend) + 1
    narrow = [k + 1 for k in range(start, stop - 1) if waist[k] <= 1]
    for low, high in pairwise([start, *narrow, stop]):
        order = _order_piece(t, order, low, high, how)
    return order


def _extended(waist: Ints, step: int, by: int, most: int) -> int:
    """Walk from `step` to where few tasks are independent of the one there."""
    for _ in range(most):
        after = step + by
        if waist[step] < 4 or not 0 <= after < waist.size:
            break
        if waist[step] <= 10 and waist[after] >= waist[step]:
            break
        step = after
    return step


def _order_piece(t: Tables, order: Ints, low: int, high: int, how: Incremental) -> Ints:
    """Order ``order[low:high]``: each connected part exactly, the parts that free most first."""
    parts = _parts(t, order[low:high])
    order = order.copy()
    order[low:high] = np.concatenate(parts)
    _, before = usage_curve(t, order)
    ends = low + np.cumsum([part.size for part in parts])
    gains = [before[end] - before[end - part.size] for part, end in zip(parts, ends, strict=True)]
    parts = [parts[k] for k in np.argsort(gains, kind="stable")]
    order[low:high] = np.concatenate(parts)
    start = low
    for part in parts:
        _, before = usage_curve(t, order)
        _, order = solve_window(t, order, start, start + part.size, before[start], 0, max(how.states, 300))
        start += part.size
    return order


def _parts(t: Tables, tasks: Ints) -> list[Ints]:
    """`tasks` by weakly connected component, each in the given order, by first task."""
    home = {int(task): int(task) for task in tasks}

    def root(task: int) -> int:
        while home[task] != task:
            home[task] = task = home[home[task]]
        return task

    for task in list(home):
        for before in t.entries[t.task[BEFORE, task] : t.task[BEFORE, task + 1]].tolist():
            if before in home:
                home[root(task)] = root(before)
    found: dict[int, list[int]] = {}
    for task in home:
        found.setdefault(root(task), []).append(task)
    return [as_order(part) for part in found.values()]


def reschedule(
    graph: Graph,
    facts: Facts,
    old: Schedule,
    changed: Collection[int] = (),
    inplace: bool = True,
    how: Incremental = DEFAULT,
) -> Schedule:
    """A schedule of the edited `graph` that keeps what it can of `old`.

    `old` may name nodes that are gone; `changed` are ids of nodes that are new or were altered (the
    "narrow-waist" variant starts from them).
    """
    problem = order_problem(graph, facts, inplace)
    tasks = problem.tasks(old.order)
    order = reorder(problem.tables, tasks, problem.tasks(changed).tolist(), how)
    return problem.schedule(order, old.name)
