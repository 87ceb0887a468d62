"""Which tasks must precede which, what every order has to hold at a task, and where a graph is narrow.

Problem.  Exact search needs pieces that are small and bounds that are cheap.

Method.  Ancestors and descendants as rows of bits.  `narrow_waist(v)` is the number of tasks that are
independent of v (MAGIS, section 5); where it is 0, what has run when v has run is the same in every
order, so the graph can be cut after v.  `forced_bytes(v)` adds up the storages that are alive at v in
every order: made by an ancestor, used by v or a descendant.

Invariants.  ``max(forced_bytes) <= peak`` for every order.

Not done.  Bounds from sets of tasks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.kernel import kernel
from lowtide.schedule.tables import (
    AFTER,
    BEFORE,
    DONOR,
    KEPT,
    MADE,
    MAKER,
    NBYTES,
    USER,
    WORKSPACE,
    Ints,
    Tables,
    end_bytes,
    start_bytes,
    task_count,
)

__all__ = ["Relation", "Words", "cuts", "floor_bytes", "forced_bytes", "narrow_waist", "relate"]

Words = npt.NDArray[np.uint64]

_ONE = np.uint64(1)


class Relation(NamedTuple):
    """Rows of bits per task: all tasks that must run earlier, later."""

    ancestors: Words
    descendants: Words


@kernel
def _reach(t: Tables, relation: int, order: Ints, step: int) -> Words:
    """Rows of everything that `relation` leads to, when `order` is walked by `step` (1 or -1)."""
    rows = np.zeros((order.size, (order.size + 63) // 64), np.uint64)
    at = 0 if step > 0 else order.size - 1
    for _ in range(order.size):
        task = order[at]
        at += step
        for k in range(t.task[relation, task], t.task[relation, task + 1]):
            near = t.entries[k]
            for w in range(rows.shape[1]):
                rows[task, w] |= rows[near, w]
            rows[task, near >> 6] |= _ONE << np.uint64(near & 63)
    return rows


@kernel
def relate(t: Tables, order: Ints) -> Relation:
    """Ancestors and descendants of every task; `order` is any valid order."""
    return Relation(_reach(t, BEFORE, order, 1), _reach(t, AFTER, order, -1))


@kernel
def _bits(rows: Words, task: int) -> int:
    """How many bits are set in row `task`."""
    count = 0
    for w in range(rows.shape[1]):
        word = rows[task, w]
        while word:
            word &= word - _ONE
            count += 1
    return count


@kernel
def narrow_waist(r: Relation) -> Ints:
    """Per task, how many tasks are independent of it."""
    count = r.ancestors.shape[0]
    waist = np.empty(count, np.int64)
    for task in range(count):
        waist[task] = count - 1 - _bits(r.ancestors, task) - _bits(r.descendants, task)
    return waist


@kernel
def _has(rows: Words, task: int, other: int) -> bool:
    return bool((rows[task, other >> 6] >> np.uint64(other & 63)) & _ONE)


@kernel
def _always_alive(t: Tables, r: Relation, storage: int, task: int) -> bool:
    """Whether every order has `storage` alive, and made earlier, while `task` runs."""
    maker = t.storage[MAKER, storage]
    if maker == task or (maker >= 0 and not _has(r.ancestors, task, maker)):
        return False
    if t.storage[KEPT, storage]:
        return True
    for k in range(t.storage[USER, storage], t.storage[USER, storage + 1]):
        if t.entries[k] == task or _has(r.descendants, task, t.entries[k]):
            return True
    return False


@kernel
def forced_bytes(t: Tables, r: Relation, task: int) -> int:
    """Live bytes that no order can avoid while `task` runs."""
    live = t.base_bytes + t.task[WORKSPACE, task]
    for storage in range(t.storage.shape[1] - 1):
        if _always_alive(t, r, storage, task):
            live += t.storage[NBYTES, storage]
    fresh = 0
    for k in range(t.task[MADE, task], t.task[MADE, task + 1]):
        fresh += t.storage[NBYTES, t.entries[k]]
    for k in range(t.task[DONOR, task], t.task[DONOR, task + 1]):
        if t.storage[NBYTES, t.entries[k]] == fresh and not t.storage[KEPT, t.entries[k]]:
            return int(live)
    return int(live + fresh)


@kernel
def floor_bytes(t: Tables, r: Relation) -> int:
    """A lower bound of the peak of every order."""
    floor = max(start_bytes(t), end_bytes(t))
    for task in range(task_count(t)):
        floor = max(floor, forced_bytes(t, r, task))
    return floor


@kernel
def cuts(r: Relation) -> Ints:
    """Steps before which every order has run the same tasks, ascending, 0 and the task count included."""
    waist = narrow_waist(r)
    count = waist.size
    marked = np.zeros(count + 1, np.int64)
    marked[0] = marked[count] = 1
    for task in range(count):
        if waist[task] == 0:
            step = _bits(r.ancestors, task)
            marked[step] = marked[step + 1] = 1
    found = np.empty(count + 1, np.int64)
    size = 0
    for step in range(count + 1):
        if marked[step]:
            found[size] = step
            size += 1
    return found[:size]
