"""The edge of a growing order: which tasks are ready, and what running one of them would do.

Problem.  A list scheduler asks at every step what each ready task would do to the live bytes.  Asking
anew costs (ready tasks) x (operands) per step; nearly all answers are those of the step before.

Method.  Changes of live bytes do not depend on the level they start from, so each answer is kept, and
only asked again after an event that can change it: few users of an operand are left, or a task came to
wait for little but the ready one.

A *chain* starts with a ready task and goes on with tasks that wait for nothing but the chain.  Of each
chain the best end is kept: the prefix that leaves the fewest bytes.

Invariants.  END and HILL are relative to the live bytes before the chain (after the task, for an order
that grows from its end).  A kept answer equals a fresh one.

Not done.  Choosing (`listing`, `polish`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.kernel import kernel
from lowtide.schedule.tables import (
    AFTER,
    BEFORE,
    DONOR,
    KEPT,
    MADE,
    NBYTES,
    READ,
    USER,
    WORKSPACE,
    Ints,
    Tables,
    step_bytes,
    task_count,
    user_counts,
)

__all__ = ["CHAIN", "END", "HILL", "LENGTH", "READY", "Front", "back", "best_released", "front"]
__all__ += ["refresh", "refresh_back", "run", "run_back"]

CHAIN = 3  # most tasks of a chain; `_touch` looks back as far

WAITS, READY, END, HILL, LENGTH, STALE = range(6)


class Front(NamedTuple):
    """What has run, and what each ready task would do; all int64.

    Rows of `task`, by task: WAITS, how many tasks it waits for, -1 once it ran; END, HILL, LENGTH of its
    best chain prefix; STALE, to be asked again.  READY is by rank: the ready tasks.

    `left`, by storage: how many users have not run; for an order that grows from its end, whether the
    storage is kept or used by what comes after.
    """

    task: Ints
    left: Ints


@kernel
def _front(t: Tables, relation: int, left: Ints) -> tuple[Front, int]:
    f = Front(np.zeros((6, task_count(t)), np.int64), left)
    waiting = 0
    for task in range(task_count(t)):
        f.task[STALE, task] = 1
        f.task[WAITS, task] = t.task[relation, task + 1] - t.task[relation, task]
        if f.task[WAITS, task] == 0:
            f.task[READY, waiting] = task
            waiting += 1
    return f, waiting


@kernel
def front(t: Tables) -> tuple[Front, int]:
    """Nothing has run; the front, and how many tasks are ready."""
    return _front(t, BEFORE, user_counts(t))


@kernel
def back(t: Tables) -> tuple[Front, int]:
    """Nothing has been put at the end; the front, and how many tasks are ready."""
    used = np.empty(t.storage.shape[1] - 1, np.int64)
    for s in range(used.size):
        used[s] = t.storage[KEPT, s]
    return _front(t, AFTER, used)


@kernel
def _count(t: Tables, f: Front, task: int, by: int) -> None:
    """Count `task` as run (`by` -1), or take that back (1)."""
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        f.left[t.entries[k]] += by
    for k in range(t.task[AFTER, task], t.task[AFTER, task + 1]):
        f.task[WAITS, t.entries[k]] += by


@kernel
def best_released(t: Tables, f: Front, task: int) -> int:
    """Of the tasks that waited only for `task`, the one that leaves the fewest bytes; -1 if none."""
    best, least = -1, 2**62
    for k in range(t.task[AFTER, task], t.task[AFTER, task + 1]):
        if f.task[WAITS, t.entries[k]] == 0:
            _, end = step_bytes(t, t.entries[k], f.left, 0)
            if end < least:
                best, least = t.entries[k], end
    return best


@kernel
def _ask(t: Tables, f: Front, first: int, depth: int) -> None:
    """Find the best end of the chain of `first`, at most `depth` tasks long."""
    chain = np.empty(CHAIN, np.int64)
    live = hill = length = counted = 0
    f.task[END, first] = 2**62
    task = first
    while task >= 0:
        usage, live = step_bytes(t, task, f.left, live)
        hill = max(hill, usage)
        chain[length] = task
        length += 1
        if live < f.task[END, first]:
            f.task[END, first], f.task[HILL, first], f.task[LENGTH, first] = live, hill, length
        if length == depth:
            break
        _count(t, f, task, -1)
        counted = length
        task = best_released(t, f, task)
    for k in range(counted):
        _count(t, f, chain[k], 1)


@kernel
def refresh(t: Tables, f: Front, waiting: int, depth: int) -> None:
    """Ask again about every ready task whose answer may have changed."""
    for k in range(waiting):
        task = f.task[READY, k]
        if f.task[STALE, task]:
            f.task[STALE, task] = 0
            _ask(t, f, task, depth)


@kernel
def _touch(t: Tables, f: Front, task: int) -> None:
    """Mark every ready task whose chain may contain `task`."""
    f.task[STALE, task] = 1
    if f.task[WAITS, task] <= 0 or f.task[WAITS, task] >= CHAIN:
        return
    for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
        middle = t.entries[k]
        if f.task[WAITS, middle] < 0:
            continue
        f.task[STALE, middle] = 1
        for j in range(t.task[BEFORE, middle], t.task[BEFORE, middle + 1]):
            f.task[STALE, t.entries[j]] = 1


@kernel
def run(t: Tables, f: Front, pick: int, waiting: int) -> int:
    """Run the ready task of rank `pick`; the new number of ready tasks, what it released is at the end."""
    task = f.task[READY, pick]
    _count(t, f, task, -1)
    f.task[WAITS, task] = -1
    waiting -= 1
    f.task[READY, pick] = f.task[READY, waiting]
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        s = t.entries[k]
        # A chain may hold all users that are left.
        if f.left[s] <= CHAIN:
            for j in range(t.storage[USER, s], t.storage[USER, s + 1]):
                if f.task[WAITS, t.entries[j]] >= 0:
                    _touch(t, f, t.entries[j])
    for k in range(t.task[AFTER, task], t.task[AFTER, task + 1]):
        after = t.entries[k]
        if f.task[WAITS, after] == 0:
            f.task[READY, waiting] = after
            waiting += 1
        else:
            _touch(t, f, after)
    return waiting


@kernel
def step_bytes_back(t: Tables, task: int, used: Ints) -> tuple[int, int]:
    """Live bytes while `task` runs and before it, relative to those after it.

    `used[s]` says whether storage s is kept or has a user among the tasks that come after.
    """
    fresh = alive = dying = joined = 0
    for k in range(t.task[MADE, task], t.task[MADE, task + 1]):
        s = t.entries[k]
        fresh += t.storage[NBYTES, s]
        if used[s]:
            alive += t.storage[NBYTES, s]
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        if not used[t.entries[k]]:
            dying += t.storage[NBYTES, t.entries[k]]
    for k in range(t.task[DONOR, task], t.task[DONOR, task + 1]):
        s = t.entries[k]
        if not used[s] and t.storage[NBYTES, s] == fresh:
            joined = fresh
            break
    return fresh - alive + dying - joined + t.task[WORKSPACE, task], dying - alive


@kernel
def refresh_back(t: Tables, b: Front, waiting: int) -> None:
    """Ask again about every ready task whose answer may have changed."""
    for k in range(waiting):
        task = b.task[READY, k]
        if b.task[STALE, task]:
            b.task[STALE, task] = 0
            b.task[HILL, task], b.task[END, task] = step_bytes_back(t, task, b.left)


@kernel
def run_back(t: Tables, b: Front, pick: int, waiting: int) -> int:
    """Put the ready task of rank `pick` before all that ran; the new number of ready tasks."""
    task = b.task[READY, pick]
    b.task[WAITS, task] = -1
    waiting -= 1
    b.task[READY, pick] = b.task[READY, waiting]
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        s = t.entries[k]
        if not b.left[s]:
            b.left[s] = 1
            for j in range(t.storage[USER, s], t.storage[USER, s + 1]):
                b.task[STALE, t.entries[j]] = 1
    for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
        before = t.entries[k]
        b.task[WAITS, before] -= 1
        if b.task[WAITS, before] == 0:
            b.task[READY, waiting] = before
            waiting += 1
    return waiting
