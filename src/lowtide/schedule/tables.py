"""The order problem as flat arrays, and the live bytes that an order gives.

Problem.  Schedulers look at thousands of orders per second; Python objects are too slow for that, and
every scheduler has to count bytes in the same way.

Method.  A *task* is a node that does work: views are contracted away.  Relations are rows of one flat
array, so that few arrays travel between kernels (each one costs compile time).  A storage is alive from
its maker's step to its last user's, both included; a task's own step also holds its workspace.  An
output may take the room of a *donor* of equal size that dies at that step (in-place reuse).

Invariants.  A storage that nobody uses dies after its maker's step unless it is kept.  `usage_curve`
agrees with `lowtide.analysis.timeline` to the byte.

Not done.  Offsets; time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.kernel import kernel

__all__ = [
    "AFTER",
    "BEFORE",
    "DONOR",
    "KEPT",
    "MADE",
    "MAKER",
    "NBYTES",
    "READ",
    "USER",
    "WORKSPACE",
    "Ints",
    "Tables",
    "as_order",
    "end_bytes",
    "positions",
    "start_bytes",
    "step_bytes",
    "tables_of",
    "task_count",
    "usage_curve",
    "user_counts",
]

Ints = npt.NDArray[np.int64]

# Rows of `Tables.task`: where the entries of each task begin; WORKSPACE is a number of bytes.
BEFORE, AFTER, READ, MADE, DONOR, WORKSPACE = range(6)
# Rows of `Tables.storage`: USER is where the entries begin, the others are values.
USER, NBYTES, MAKER, KEPT = range(4)


class Tables(NamedTuple):
    """Tasks 0..n-1 and storages 0..m-1; all arrays hold int64, bytes are integers.

    ``entries[task[R, i]:task[R, i + 1]]`` is what relation R holds for task i: tasks that must run
    BEFORE or AFTER it, storages that it touches and did not make (READ), brings into being (MADE), or may
    take the room of (DONOR); for storage s, ``entries[storage[USER, s]:storage[USER, s + 1]]`` are the
    tasks that read it.  MAKER is -1 for what is alive from the start, KEPT is 1 for what is alive at the
    end.  `base_bytes` are live throughout, beside the storages listed.
    """

    task: Ints
    storage: Ints
    entries: Ints
    base_bytes: int


def tables_of(
    *,
    before: Sequence[Sequence[int]],
    reads: Sequence[Sequence[int]],
    makes: Sequence[Sequence[int]],
    nbytes: Sequence[int],
    kept: Sequence[bool] | None = None,
    workspace: Sequence[int] | None = None,
    donors: Sequence[Sequence[int]] | None = None,
    base_bytes: int = 0,
) -> Tables:
    """Tables from one row per task (`before`, `reads`, `makes`, `donors`) and one entry per storage.

    Rows have no duplicates.  Storages without a maker are alive from the start and need a reader.
    """
    count, total = len(before), len(nbytes)
    task, storage = np.zeros((6, count + 1), np.int64), np.zeros((4, total + 1), np.int64)
    flat: list[int] = []
    relations = (before, _inverse(before, count), reads, makes, donors or [()] * count)
    for relation, rows in enumerate(relations):
        task[relation] = _append(flat, rows)
    storage[USER] = _append(flat, _inverse(reads, total))
    task[WORKSPACE, :count] = workspace if workspace is not None else 0
    storage[NBYTES, :total] = nbytes
    storage[KEPT, :total] = kept if kept is not None else 0
    storage[MAKER] = -1
    for maker, row in enumerate(makes):
        storage[MAKER, list(row)] = maker
    return Tables(task, storage, np.array(flat, np.int64), base_bytes)


def _append(flat: list[int], rows: Sequence[Sequence[int]]) -> list[int]:
    """Add `rows` to `flat`; where each begins, and where the last one ends."""
    begins = [len(flat)]
    for row in rows:
        flat.extend(row)
        begins.append(len(flat))
    return begins


def _inverse(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(size)]
    for row, entries in enumerate(rows):
        for entry in entries:
            found[entry].append(row)
    return found


def as_order(tasks: Sequence[int] | Ints) -> Ints:
    """Task numbers in the form that the kernels take."""
    return np.ascontiguousarray(tasks, np.int64)


@kernel
def task_count(t: Tables) -> int:
    """How many tasks there are."""
    return int(t.task.shape[1] - 1)


@kernel
def start_bytes(t: Tables) -> int:
    """Live bytes before the first task."""
    live = t.base_bytes
    for s in range(t.storage.shape[1] - 1):
        if t.storage[MAKER, s] < 0:
            live += t.storage[NBYTES, s]
    return live


@kernel
def end_bytes(t: Tables) -> int:
    """Live bytes after the last task."""
    live = t.base_bytes
    for s in range(t.storage.shape[1] - 1):
        if t.storage[KEPT, s]:
            live += t.storage[NBYTES, s]
    return live


@kernel
def positions(order: Ints) -> Ints:
    """The inverse of `order`."""
    place = np.empty(order.size, np.int64)
    for k in range(order.size):
        place[order[k]] = k
    return place


@kernel
def user_counts(t: Tables) -> Ints:
    """How many tasks have yet to use each storage, before the first task runs."""
    left = np.empty(t.storage.shape[1] - 1, np.int64)
    for s in range(left.size):
        left[s] = t.storage[USER, s + 1] - t.storage[USER, s]
    return left


@kernel
def step_bytes(t: Tables, task: int, left: Ints, live: int) -> tuple[int, int]:
    """Live bytes while `task` runs and after it, when `live` bytes are live before it.

    `left[s]` counts the users of storage s that have not run.
    """
    fresh = lost = freed = joined = 0
    for k in range(t.task[MADE, task], t.task[MADE, task + 1]):
        s = t.entries[k]
        fresh += t.storage[NBYTES, s]
        if left[s] == 0 and not t.storage[KEPT, s]:
            lost += t.storage[NBYTES, s]
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        s = t.entries[k]
        if left[s] == 1 and not t.storage[KEPT, s]:
            freed += t.storage[NBYTES, s]
    for k in range(t.task[DONOR, task], t.task[DONOR, task + 1]):
        s = t.entries[k]
        if left[s] == 1 and not t.storage[KEPT, s] and t.storage[NBYTES, s] == fresh:
            joined = fresh
            break
    return live + fresh - joined + t.task[WORKSPACE, task], live + fresh - lost - freed


@kernel
def usage_curve(t: Tables, order: Ints) -> tuple[Ints, Ints]:
    """Live bytes during each step of `order`, and before each step (one entry more)."""
    left = user_counts(t)
    during = np.empty(order.size, np.int64)
    before = np.empty(order.size + 1, np.int64)
    before[0] = start_bytes(t)
    for k in range(order.size):
        task = order[k]
        during[k], before[k + 1] = step_bytes(t, task, left, before[k])
        for j in range(t.task[READ, task], t.task[READ, task + 1]):
            left[t.entries[j]] -= 1
    return during, before


@kernel
def highest(curve: Ints, start: int, stop: int) -> tuple[int, int]:
    """The largest entry of ``curve[start:stop]`` and where it is first; (0, start) if there is none."""
    peak, at = 0, start
    for k in range(start, stop):
        if curve[k] > peak:
            peak, at = curve[k], k
    return peak, at


@kernel
def peak_bytes(t: Tables, order: Ints) -> int:
    """Most live bytes of `order`."""
    during, _ = usage_curve(t, order)
    peak, _ = highest(during, 0, during.size)
    return peak
