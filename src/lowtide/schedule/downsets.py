"""Search over down-sets: the order with the least peak, exactly.

Problem.  Orders of n tasks are n! many, but what lies ahead depends only on *which* tasks have run (a
down-set of the precedence order), not on how they were ordered.

Method.  A bottleneck shortest path over down-sets.  `level` is a proven lower bound of the peak; states
that are reachable within it are expanded depth first (most progress and fewest live bytes first);
when none is left, `level` rises to the least peak that was put off.  The first time that the full set
comes up, `level` is the optimum.

Three ideas keep it small, each with a switch:
- dominance: a ready task that fits under `level` and leaves no more bytes live than before is run at
  once, alone.  Live bytes are submodular, so whatever an order does later is no worse after that.
- chains: the same for a task followed by tasks that wait for nothing but it; the proof is the same,
  because the down-sets inside a chain are its prefixes.
- forced: a task at whose step the bytes that no order can avoid exceed `level` raises `level` before
  the search starts (`forced_bytes`).

Invariants.  `FOUND` orders are optimal or within `floor`; `NONE` proves that every order reaches
`ceiling`; `LIMIT` proves nothing but that every order reaches the returned level.

Not done.  Cutting the problem into pieces (`exact`).
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
    NBYTES,
    READ,
    USER,
    WORKSPACE,
    Ints,
    Tables,
    end_bytes,
    start_bytes,
    task_count,
)

__all__ = ["FOUND", "LIMIT", "NONE", "search"]

FOUND, NONE, LIMIT = 0, 1, 2

Words = npt.NDArray[np.uint64]

_ONE = np.uint64(1)
_CHAIN = 3


class _States(NamedTuple):
    """Down-sets that were met, and the rows of bits that they are compared with.

    ran, ready: by state, the tasks that ran, and those that wait for nothing.  row: LIVE, PEAK, COUNT,
    PARENT, LAST by state.  slot: an open-addressing table of state numbers plus one.  mask: by task, what
    it waits for; then by storage, what uses it.
    """

    ran: Words
    ready: Words
    row: Ints
    slot: Ints
    mask: Words


LIVE, PEAK, COUNT, PARENT, LAST = range(5)


@kernel
def _masks(t: Tables) -> Words:
    count = task_count(t)
    mask = np.zeros((count + t.storage.shape[1] - 1, (count + 63) // 64), np.uint64)
    for task in range(count):
        for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
            mask[task, t.entries[k] >> 6] |= _ONE << np.uint64(t.entries[k] & 63)
        for k in range(t.task[READ, task], t.task[READ, task + 1]):
            mask[count + t.entries[k], task >> 6] |= _ONE << np.uint64(task & 63)
    return mask


@kernel
def _states(t: Tables, limit: int, level: int) -> _States:
    """Room for `limit` states, the first of which is the empty set."""
    size = 64
    while size < 2 * limit:
        size *= 2
    mask = _masks(t)
    ran, ready = np.empty((limit, mask.shape[1]), np.uint64), np.empty((limit, mask.shape[1]), np.uint64)
    states = _States(ran, ready, np.empty((5, limit), np.int64), np.zeros(size, np.int64), mask)
    for w in range(mask.shape[1]):
        ran[0, w] = ready[0, w] = 0
    for task in range(task_count(t)):
        if t.task[BEFORE, task] == t.task[BEFORE, task + 1]:
            ready[0, task >> 6] |= _ONE << np.uint64(task & 63)
    states.row[LIVE, 0], states.row[PEAK, 0] = start_bytes(t), level
    states.row[COUNT, 0], states.row[PARENT, 0] = 0, -1
    states.slot[_slot_of(states, 0)] = 1
    return states


@kernel
def _waits(states: _States, state: int, task: int) -> bool:
    """Whether something that `task` waits for has not run."""
    missing = np.uint64(0)
    for w in range(states.ran.shape[1]):
        missing |= states.mask[task, w] & ~states.ran[state, w]
    return bool(missing)


@kernel
def _list_ready(states: _States, state: int, ready: Ints) -> int:
    """Fill `ready` with the ready tasks of `state`, ascending; their number."""
    count = 0
    for w in range(states.ready.shape[1]):
        word = states.ready[state, w]
        task = w << 6
        while word:
            if word & _ONE:
                ready[count] = task
                count += 1
            word >>= _ONE
            task += 1
    return count


@kernel
def _is_last(states: _States, state: int, row: int, task: int) -> bool:
    """Whether `task` is the one bit of mask `row` that has not run."""
    for w in range(states.ran.shape[1]):
        rest = states.mask[row, w] & ~states.ran[state, w]
        if w == task >> 6:
            rest &= ~(_ONE << np.uint64(task & 63))
        if rest:
            return False
    return True


@kernel
def _step(t: Tables, states: _States, state: int, task: int) -> tuple[int, int]:
    """`tables.step_bytes` for a down-set."""
    fresh = lost = freed = joined = 0
    users = task_count(t)
    for k in range(t.task[MADE, task], t.task[MADE, task + 1]):
        s = t.entries[k]
        fresh += t.storage[NBYTES, s]
        if t.storage[USER, s] == t.storage[USER, s + 1] and not t.storage[KEPT, s]:
            lost += t.storage[NBYTES, s]
    for k in range(t.task[READ, task], t.task[READ, task + 1]):
        s = t.entries[k]
        if not t.storage[KEPT, s] and _is_last(states, state, users + s, task):
            freed += t.storage[NBYTES, s]
    for k in range(t.task[DONOR, task], t.task[DONOR, task + 1]):
        s = t.entries[k]
        equal = t.storage[NBYTES, s] == fresh and not t.storage[KEPT, s]
        if equal and _is_last(states, state, users + s, task):
            joined = fresh
            break
    live = states.row[LIVE, state]
    return live + fresh - joined + t.task[WORKSPACE, task], live + fresh - lost - freed


@kernel
def _slot_of(states: _States, state: int) -> int:
    """Where the down-set of `state` is, or belongs, in `states.slot`."""
    key = np.uint64(0x9E3779B97F4A7C15)
    for w in range(states.ran.shape[1]):
        key = (key ^ states.ran[state, w]) * np.uint64(0xFF51AFD7ED558CCD)
        key ^= key >> np.uint64(32)
    mask = states.slot.size - 1
    at = np.int64(key & np.uint64(mask))
    while states.slot[at] != 0:
        known = states.slot[at] - 1
        same = True
        for w in range(states.ran.shape[1]):
            if states.ran[known, w] != states.ran[state, w]:
                same = False
                break
        if same:
            break
        at = (at + 1) & mask
    return int(at)


@kernel
def _append(t: Tables, states: _States, used: int, parent: int, task: int, live: int, peak: int) -> None:
    """State number `used`: `parent` and then `task`."""
    bit = _ONE << np.uint64(task & 63)
    for w in range(states.ran.shape[1]):
        states.ran[used, w], states.ready[used, w] = states.ran[parent, w], states.ready[parent, w]
    states.ran[used, task >> 6] |= bit
    states.ready[used, task >> 6] &= ~bit
    for k in range(t.task[AFTER, task], t.task[AFTER, task + 1]):
        after = t.entries[k]
        if not _waits(states, used, after):
            states.ready[used, after >> 6] |= _ONE << np.uint64(after & 63)
    states.row[LIVE, used], states.row[PEAK, used] = live, peak
    states.row[COUNT, used] = states.row[COUNT, parent] + 1
    states.row[PARENT, used], states.row[LAST, used] = parent, task


@kernel
def _helpful(t: Tables, states: _States, state: int, level: int, ready: Ints) -> tuple[int, int]:
    """The ready task that leaves the fewest bytes, no more than there are, under `level`; -1 if none."""
    pick, least = -1, states.row[LIVE, state] + 1
    for k in range(_list_ready(states, state, ready)):
        usage, end = _step(t, states, state, ready[k])
        if usage <= level and end < least:
            pick, least = ready[k], end
    return pick, least


@kernel
def _next_in_chain(t: Tables, states: _States, state: int, level: int) -> tuple[int, int]:
    """Of the tasks that the last one made ready, the one that leaves the fewest bytes under `level`."""
    pick, least = -1, 2**62
    last = states.row[LAST, state]
    for k in range(t.task[AFTER, last], t.task[AFTER, last + 1]):
        if not _waits(states, state, t.entries[k]):
            usage, end = _step(t, states, state, t.entries[k])
            if usage <= level and end < least:
                pick, least = t.entries[k], end
    return pick, least


@kernel
def _helpful_chain(t: Tables, states: _States, state: int, used: int, level: int, ready: Ints) -> int:
    """Append states for a chain that leaves no more bytes than there are; the new number of states."""
    for k in range(_list_ready(states, state, ready)):
        usage, end = _step(t, states, state, ready[k])
        last, length, before = (ready[k] if usage <= level else -1), 0, state
        while last >= 0 and length < _CHAIN:
            _append(t, states, used + length, before, last, end, level)
            before = used + length
            length += 1
            if end <= states.row[LIVE, state]:
                return used + length
            last, end = _next_in_chain(t, states, before, level)
    return used


@kernel
def _commit(
    t: Tables, states: _States, state: int, used: int, level: int, use_chains: bool, ready: Ints
) -> tuple[int, int]:
    """Run what can only help; the state reached and the number of states used."""
    while used + _CHAIN < states.row.shape[1]:
        task, end = _helpful(t, states, state, level, ready)
        if task >= 0:
            _append(t, states, used, state, task, end, level)
            state = used
            used += 1
            continue
        longer = _helpful_chain(t, states, state, used, level, ready) if use_chains else used
        if longer == used:
            break
        state = longer - 1
        used = longer
    return state, used


@kernel
def _push(heap: Ints, size: int, key: int, item: int) -> int:
    """Binary min-heap of rows (key, item): add; the new size."""
    at = size
    while at > 0 and heap[0, (at - 1) >> 1] > key:
        heap[0, at], heap[1, at] = heap[0, (at - 1) >> 1], heap[1, (at - 1) >> 1]
        at = (at - 1) >> 1
    heap[0, at], heap[1, at] = key, item
    return size + 1


@kernel
def _pop(heap: Ints, size: int) -> int:
    """Binary min-heap: remove the least, which the caller has read; the new size."""
    size -= 1
    key, item = heap[0, size], heap[1, size]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[0, child + 1] < heap[0, child]:
            child += 1
        if heap[0, child] >= key:
            break
        heap[0, at], heap[1, at] = heap[0, child], heap[1, child]
        at = child
    heap[0, at], heap[1, at] = key, item
    return size


@kernel
def _recorded(states: _States, used: int) -> int:
    """Record the state that was appended as `used`, if it is new or reached lower than before.

    Its number (that of the same down-set, if that is known), or -1.
    """
    at = _slot_of(states, used)
    known = states.slot[at] - 1
    if known < 0:
        states.slot[at] = used + 1
        return used
    if states.row[PEAK, known] <= states.row[PEAK, used]:
        return -1
    for r in range(5):
        states.row[r, known] = states.row[r, used]
    return int(known)


@kernel
def _expand(
    t: Tables, states: _States, state: int, used: int, level: int, ceiling: int, ready: Ints, fresh: Ints
) -> tuple[int, int]:
    """Add what one ready task leads to from `state`.

    `fresh` receives the states that are new, or were reached lower than before, those with most live
    bytes first; the number of states used, and how many are fresh.
    """
    found = 0
    for r in range(_list_ready(states, state, ready)):
        usage, end = _step(t, states, state, ready[r])
        if max(level, usage) >= ceiling or used == states.row.shape[1]:
            continue
        _append(t, states, used, state, ready[r], end, max(level, usage))
        known = _recorded(states, used)
        if known < 0:
            continue
        used += known == used
        k = found
        while k > 0 and states.row[LIVE, fresh[k - 1]] < end:
            fresh[k] = fresh[k - 1]
            k -= 1
        fresh[k] = known
        found += 1
    return used, found


@kernel
def _path(states: _States, state: int) -> Ints:
    """The tasks that led to `state`, first to last."""
    order = np.empty(states.row[COUNT, state], np.int64)
    while states.row[PARENT, state] >= 0:
        order[states.row[COUNT, state] - 1] = states.row[LAST, state]
        state = states.row[PARENT, state]
    return order


@kernel
def _raise_level(states: _States, heap: Ints, waiting: int, stack: Ints) -> tuple[int, int, int]:
    """Move the lowest states that were put off to `stack`; the new level, heap size and stack size."""
    level, top = heap[0, 0], 0
    while waiting > 0 and heap[0, 0] <= level:
        if states.row[PEAK, heap[1, 0]] == level:
            stack[top] = heap[1, 0]
            top += 1
        waiting = _pop(heap, waiting)
    return level, waiting, top


@kernel
def search(
    t: Tables, floor: int, ceiling: int, limit: int, use_dominance: bool, use_chains: bool
) -> tuple[int, int, Ints]:
    """An order whose peak is least, or at most `floor`; one of FOUND, NONE, LIMIT, the level, the order.

    Only orders under `ceiling` are looked for, with at most `limit` states.  The order is complete if
    FOUND, else it is the longest prefix that was met.
    """
    level = max(floor, start_bytes(t), end_bytes(t))
    if level >= ceiling:
        return NONE, ceiling, np.empty(0, np.int64)
    limit = max(limit, 2 * _CHAIN + 2)
    states = _states(t, limit, level)
    heap, waiting = np.empty((2, limit), np.int64), 0
    stack, top = np.zeros(limit + 1, np.int64), 1
    ready, fresh = np.empty(task_count(t), np.int64), np.empty(task_count(t) + 1, np.int64)
    used, deepest = 1, 0
    while top > 0 or waiting > 0:
        if top == 0:
            level, waiting, top = _raise_level(states, heap, waiting, stack)
            continue
        top -= 1
        state = stack[top]
        if use_dominance:
            reached, used = _commit(t, states, state, used, level, use_chains, ready)
            if reached != state:
                state = _recorded(states, reached)
                if state < 0:
                    continue
        if states.row[COUNT, state] > states.row[COUNT, deepest]:
            deepest = state
        if states.row[COUNT, state] == task_count(t):
            return FOUND, level, _path(states, state)
        used, found = _expand(t, states, state, used, level, ceiling, ready, fresh)
        if used + _CHAIN + 1 >= limit:
            return LIMIT, level, _path(states, deepest)
        for k in range(found):
            if states.row[PEAK, fresh[k]] <= level:
                stack[top] = fresh[k]
                top += 1
            else:
                waiting = _push(heap, waiting, states.row[PEAK, fresh[k]], fresh[k])
    return NONE, ceiling, _path(states, deepest)
