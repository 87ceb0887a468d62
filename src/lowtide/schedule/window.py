"""A stretch of an order as a problem of its own.

Problem.  Exact search and polishing are for tens of tasks, not for hundreds.

Method.  With everything outside ``order[start:stop]`` fixed, the stretch is an order problem again: what
is alive on both ends counts as base, what is alive at its start has no maker, what outlives it is kept.

Invariants.  Local task i is ``order[start + i]``.  Any order of the window leaves the rest of the order
valid and its live bytes as they were; live bytes inside are equal to those of the whole.

Not done.  Windows that are not contiguous.
"""

from __future__ import annotations

import numpy as np

from lowtide.kernel import kernel
from lowtide.schedule.tables import (
    AFTER,
    BEFORE,
    KEPT,
    MADE,
    MAKER,
    NBYTES,
    READ,
    USER,
    WORKSPACE,
    Ints,
    Tables,
)

__all__ = ["window"]


@kernel
def _used_outside(t: Tables, local: Ints, ran: Ints, s: int) -> bool:
    """Whether storage `s` outlives the window; `ran[task]` is 1 for the tasks before it."""
    if t.storage[KEPT, s]:
        return True
    for k in range(t.storage[USER, s], t.storage[USER, s + 1]):
        if local[t.entries[k]] < 0 and not ran[t.entries[k]]:
            return True
    return False


@kernel
def _storages(t: Tables, order: Ints, start: int, stop: int, local: Ints, ran: Ints) -> tuple[Ints, Ints]:
    """Local storage numbers (-1: left out, its bytes are the same throughout), and storages by number.

    Kept ones have bit 62 set in the second.
    """
    number = np.full(t.storage.shape[1] - 1, -1, np.int64)
    found = np.empty(number.size, np.int64)
    count = 0
    for i in range(start, stop):
        for k in range(t.task[MADE, order[i]], t.task[MADE, order[i] + 1]):
            s = t.entries[k]
            number[s] = count
            found[count] = s | (1 << 62) if _used_outside(t, local, ran, s) else s
            count += 1
        for k in range(t.task[READ, order[i]], t.task[READ, order[i] + 1]):
            s = t.entries[k]
            if number[s] < 0 and not _used_outside(t, local, ran, s):
                number[s] = count
                found[count] = s
                count += 1
    return number, found[:count]


@kernel
def _copy_row(t: Tables, begin: int, end: int, number: Ints, entries: Ints, filled: int) -> int:
    """Append the entries of one row, renumbered; those numbered -1 are dropped.  The new length."""
    for k in range(begin, end):
        if number[t.entries[k]] >= 0:
            entries[filled] = number[t.entries[k]]
            filled += 1
    return filled


@kernel
def _room(t: Tables, order: Ints, start: int, stop: int, found: Ints) -> int:
    """Enough entries for the rows of a window."""
    room = 0
    for i in range(start, stop):
        for relation in range(WORKSPACE):
            room += t.task[relation, order[i] + 1] - t.task[relation, order[i]]
    for f in found:
        s = f & ~(1 << 62)
        room += t.storage[USER, s + 1] - t.storage[USER, s]
    return room


@kernel
def window(t: Tables, order: Ints, start: int, stop: int, live: int) -> Tables:
    """The problem of ordering ``order[start:stop]``, when `live` bytes are live before step `start`."""
    local = np.full(order.size, -1, np.int64)
    ran = np.zeros(order.size, np.int64)
    for k in range(stop):
        if k < start:
            ran[order[k]] = 1
        else:
            local[order[k]] = k - start
    number, found = _storages(t, order, start, stop, local, ran)
    entries, filled = np.empty(_room(t, order, start, stop, found), np.int64), 0
    task, storage = np.zeros((6, stop - start + 1), np.int64), np.zeros((4, found.size + 1), np.int64)
    for relation in range(WORKSPACE):
        names = local if relation in (BEFORE, AFTER) else number
        for i in range(stop - start):
            task[relation, i] = filled
            row = order[start + i]
            filled = _copy_row(t, t.task[relation, row], t.task[relation, row + 1], names, entries, filled)
            task[WORKSPACE, i] = t.task[WORKSPACE, row]
        task[relation, stop - start] = filled
    for i in range(found.size):
        s = found[i] & ~(1 << 62)
        storage[USER, i] = filled
        filled = _copy_row(t, t.storage[USER, s], t.storage[USER, s + 1], local, entries, filled)
        storage[KEPT, i] = found[i] >> 62
        storage[NBYTES, i] = t.storage[NBYTES, s]
        maker = t.storage[MAKER, s]
        storage[MAKER, i] = local[maker] if maker >= 0 else -1
        if storage[MAKER, i] < 0:
            live -= t.storage[NBYTES, s]
    storage[USER, found.size] = filled
    return Tables(task, storage, entries, live)
