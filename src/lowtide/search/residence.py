"""Where values spend the gap between their early and their late readers: one evaluation of all decisions.

Problem.  A value of the forward that the backward reads is kept, computed again, or stored on the host and
loaded back.  A search tries thousands of such assignments per second on one fixed order, with regions that
run in parts, and needs the exact peak and latency of each under a device with two engines, one that
computes and one that copies.

Method.  A `Program` is the order as flat arrays: steps make and read values, a region is the steps between
an *enter* and an *exit*, which repeat in time but not in bytes.  `evaluate` (1) emits clones before the
first late reader that needs them, (2) drops what nobody reads any more, (3) plans each load as late as its
transfer still hides, backwards, one after the other, (4) runs the two clocks forwards: a load starts when
it is due, a store whenever the copy engine is idle and the transfer ends before the next load, the next
region and the end, (5) counts the bytes along these events, which decide nothing about time.

Invariants.  A transfer sets both clocks to the later one, a region owns both engines, transfers of a region
stay inside it.  A swap whose store finds no room before its load is due is no swap: the value is kept.
Bytes are allocated when a step starts and freed when the last reader ends.  Deterministic.

Not done.  Choosing (`residence_search`), order, what a file format or an executor makes of the events.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.kernel import kernel

__all__ = [
    "CLONE", "ENTER", "EXIT", "KEEP", "LATE", "LOAD", "MAKES", "NBYTES", "OP", "OWNER", "PARTS", "PINNED",
    "REMAT", "RUN", "STORE", "SWAP", "TYPE", "Floats", "Ints", "Outcome", "Program", "evaluate", "judge",
    "program_of",
]  # fmt: skip

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

KEEP, REMAT, SWAP = 0, 1, 2
"""Decisions per value."""
OP, ENTER, EXIT = 0, 1, 2
"""Types of steps."""
RUN, CLONE, STORE, LOAD = 0, 1, 2, 3
"""Kinds of events."""
TYPE, MAKES, LATE, PINNED, PARTS, READ = range(6)
"""Rows of `Program.step`; READ: where a step's values begin in `reads`."""
NBYTES, OWNER = 0, 1
"""Rows of `Program.value`."""

_NEVER = 1 << 60
_DEEPEST = 16


class Program(NamedTuple):
    """Steps 0..n-1 in order and values 0..m-1.

    `seconds` per step (a region's are its body's), `transfer` per value: seconds of one copy, 0 if it
    cannot be swapped.  An exit reads what its region read and all values of the body that nothing in the
    body reads.
    """

    step: Ints
    value: Ints
    reads: Ints
    seconds: Floats
    transfer: Floats


class Outcome(NamedTuple):
    """What an assignment gives.

    live[k]: bytes while event `running[k]` runs.  `events`: kind and number (a step, or a value for
    transfers). last_early, first_late: per value the places in `live` between which only late readers wait
    (-1: none).
    """

    peak_bytes: int
    latency_s: float
    excess: float
    live: Ints
    events: Ints
    last_early: Ints
    first_late: Ints
    swapped: Ints


def program_of(
    types: list[int],
    makes: list[int],
    late: list[bool],
    pinned: list[bool],
    parts: list[int],
    reads: list[list[int]],
    seconds: list[float],
    nbytes: list[int],
    transfer: list[float],
) -> Program:
    """A Program from one entry per step and per value."""
    step = np.zeros((6, len(types) + 1), np.int64)
    for row, entries in ((TYPE, types), (MAKES, makes), (LATE, late), (PINNED, pinned), (PARTS, parts)):
        step[row, : len(types)] = entries
    step[READ, 1:] = np.cumsum([len(row) for row in reads])
    value = np.zeros((2, len(nbytes)), np.int64)
    value[NBYTES], value[OWNER] = nbytes, -1
    for number, made in enumerate(makes):
        if made >= 0:
            value[OWNER, made] = number
    flat = np.array([each for row in reads for each in row], np.int64)
    return Program(step, value, flat, np.array(seconds), np.array(transfer))


@kernel
def _emit(p: Program, mode: Ints) -> tuple[Ints, Ints]:
    """Steps with clones before the first late reader that needs them; which of them are clones."""
    count, total = p.step.shape[1] - 1, p.value.shape[1]
    steps, copy = np.empty(2 * count, np.int64), np.zeros(2 * count, np.int64)
    have = np.zeros(total, np.int64)
    stack = np.empty(p.reads.size + total + 1, np.int64)
    length = 0
    for s in range(count):
        if p.step[LATE, s] and p.step[TYPE, s] != EXIT:
            for r in range(p.step[READ, s], p.step[READ, s + 1]):
                top = 0
                if mode[p.reads[r]] == REMAT and not have[p.reads[r]]:
                    stack[0] = p.reads[r]
                    top = 1
                while top > 0:
                    v = stack[top - 1]
                    if have[v]:
                        top -= 1
                        continue
                    maker, before = p.value[OWNER, v], top
                    for q in range(p.step[READ, maker], p.step[READ, maker + 1]):
                        if mode[p.reads[q]] == REMAT and not have[p.reads[q]]:
                            stack[top] = p.reads[q]
                            top += 1
                    if top == before:
                        steps[length], copy[length] = maker, 1
                        length += 1
                        have[v] = 1
                        top -= 1
        steps[length] = s
        length += 1
    return steps[:length], copy[:length]


@kernel
def _drop_dead(p: Program, mode: Ints, steps: Ints, copy: Ints) -> Ints:
    """Which steps still run: pinned ones, borders of regions, and those whose result is read."""
    total = p.value.shape[1]
    live = np.zeros(2 * total, np.int64)
    runs = np.zeros(steps.size, np.int64)
    for k in range(steps.size - 1, -1, -1):
        s = steps[k]
        made = p.step[MAKES, s]
        needed = (p.step[PINNED, s] or p.step[TYPE, s] != OP) and not copy[k]
        if not needed and made >= 0 and not live[made + total * copy[k]]:
            continue
        runs[k] = 1
        for r in range(p.step[READ, s], p.step[READ, s + 1]):
            v = p.reads[r]
            from_copy = mode[v] == REMAT and (copy[k] or p.step[LATE, s])
            live[v + (total if from_copy else 0)] = 1
    return runs


@kernel
def _clock(p: Program, steps: Ints) -> tuple[Floats, Floats]:
    """When each step starts, from its region's start, if nothing waits, the end last; when regions end."""
    start, stop = np.empty(steps.size + 1), np.zeros(steps.size)
    clock = np.zeros(_DEEPEST)
    depth = 0
    for k in range(steps.size):
        s = steps[k]
        if p.step[TYPE, s] == EXIT:
            stop[k] = clock[depth]
            spent = clock[depth] * p.step[PARTS, s]
            depth -= 1
            start[k] = clock[depth]
            clock[depth] += spent
        else:
            start[k] = clock[depth]
            if p.step[TYPE, s] == ENTER:
                depth += 1
                clock[depth] = 0.0
            else:
                clock[depth] += p.seconds[s]
    start[steps.size] = clock[0]
    return start, stop


@kernel
def _plan_loads(
    p: Program, mode: Ints, steps: Ints, copy: Ints, start: Floats, end: Floats, first_late: Ints
) -> tuple[Ints, Ints, Ints, Floats]:
    """Before which step each load starts (-1: it does not fit), as lists: first per step, next per value.

    limit[k]: until when a store that starts before step k has to end.
    """
    total = p.value.shape[1]
    head, following = np.full(steps.size, -1, np.int64), np.full(total, -1, np.int64)
    place = np.full(total, -1, np.int64)
    limit = np.empty(steps.size)
    # Per depth: loads that are planned and not placed, latest first; what the next one must end before.
    pending, planned = np.empty((_DEEPEST, total), np.int64), np.empty(total)
    first, stop = np.zeros(_DEEPEST, np.int64), np.zeros(_DEEPEST, np.int64)
    before, bound = np.zeros(_DEEPEST), np.zeros(_DEEPEST)
    depth = 0
    before[0] = bound[0] = start[steps.size]
    for k in range(steps.size - 1, -1, -1):
        s = steps[k]
        if p.step[TYPE, s] == EXIT:
            depth += 1
            first[depth] = stop[depth] = 0
            before[depth] = bound[depth] = end[k]
            limit[k] = bound[depth]
            continue
        if p.step[TYPE, s] == ENTER:
            depth -= 1
            before[depth] = min(before[depth], start[k])
            bound[depth] = min(bound[depth], start[k])
            for j in range(first[depth], stop[depth]):
                v = pending[depth, j]
                planned[v] = min(planned[v], before[depth] - p.transfer[v])
                before[depth] = planned[v]
        now = start[k]
        while first[depth] < stop[depth] and planned[pending[depth, first[depth]]] >= now:
            v = pending[depth, first[depth]]
            following[v] = head[k]
            head[k] = v
            place[v] = k
            bound[depth] = min(bound[depth], now)
            first[depth] += 1
        limit[k] = bound[depth]
        if copy[k] or p.step[LATE, s]:
            for r in range(p.step[READ, s], p.step[READ, s + 1]):
                v = p.reads[r]
                if mode[v] == SWAP and first_late[v] == k:
                    before[depth] = min(before[depth], now) - p.transfer[v]
                    planned[v] = before[depth]
                    pending[depth, stop[depth]] = v
                    stop[depth] += 1
    return place, head, following, limit


@kernel
def _uses(p: Program, mode: Ints, steps: Ints, copy: Ints) -> tuple[Ints, Ints, Ints]:
    """Last early, first late and last late reader of each value; its maker counts as an early one."""
    total = p.value.shape[1]
    last_early, first_late = np.full(total, -1, np.int64), np.full(total, -1, np.int64)
    last_late = np.full(total, -1, np.int64)
    for k in range(steps.size):
        s = steps[k]
        for r in range(p.step[READ, s], p.step[READ, s + 1]):
            v = p.reads[r]
            if copy[k] or p.step[LATE, s]:
                last_late[v] = k
                if first_late[v] < 0:
                    first_late[v] = k
            else:
                last_early[v] = k
        if p.step[MAKES, s] >= 0 and not copy[k]:
            last_early[p.step[MAKES, s]] = k
    return last_early, first_late, last_late


class _Plan(NamedTuple):
    """What is known of an assignment before the clocks run; rows as `_uses` and `_plan_loads` say."""

    mode: Ints
    steps: Ints
    copy: Ints
    last_early: Ints
    first_late: Ints
    last_late: Ints
    start: Floats
    place: Ints
    head: Ints
    following: Ints
    limit: Floats


@kernel
def _plan(p: Program, mode: Ints) -> _Plan:
    """The steps that run, and for each swap when it has to be back."""
    steps, copy = _emit(p, mode)
    kept = np.flatnonzero(_drop_dead(p, mode, steps, copy))
    steps, copy = steps[kept], copy[kept]
    last_early, first_late, last_late = _uses(p, mode, steps, copy)
    start, end = _clock(p, steps)
    place, head, following, limit = _plan_loads(p, mode, steps, copy, start, end, first_late)
    return _Plan(mode, steps, copy, last_early, first_late, last_late, start, place, head, following, limit)


@kernel
def _take_store(p: Program, plan: _Plan, waiting: Ints, k: int) -> int:
    """The first of the waiting values whose store fits at step k, those behind it moved up; -1: none."""
    for j in range(waiting.size):
        v = waiting[j]
        if plan.start[k] + p.transfer[v] <= plan.limit[k] and plan.place[v] > k:
            for i in range(j, waiting.size - 1):
                waiting[i] = waiting[i + 1]
            return int(v)
    return -1


@kernel
def _run_clocks(p: Program, plan: _Plan) -> tuple[Ints, Floats, Floats, float]:
    """Events, when they start, when the store of each value ends (-1: none), when all has ended."""
    count, total = plan.steps.size, p.value.shape[1]
    events, starts = np.empty((2, count + 2 * total), np.int64), np.empty(count + 2 * total)
    length = 0
    compute, copying, entered = np.zeros(_DEEPEST), np.zeros(_DEEPEST), np.zeros(_DEEPEST)
    depth = 0
    queue, waiting = np.empty((_DEEPEST, total), np.int64), np.zeros(_DEEPEST, np.int64)
    stored, ready = np.full(total, -1.0), np.full(total, -1.0)  # -1: not stored, the original is read
    for k in range(count):
        s = plan.steps[k]
        kind, made = p.step[TYPE, s], p.step[MAKES, s]
        v = plan.head[k]
        while v >= 0:  # loads that are due
            if stored[v] >= 0.0:
                compute[depth] = starts[length] = max(compute[depth], copying[depth])
                copying[depth] = ready[v] = compute[depth] + p.transfer[v]
                events[0, length], events[1, length] = LOAD, v
                length += 1
            v = plan.following[v]
        if kind != EXIT and waiting[depth] > 0 and copying[depth] <= compute[depth]:
            v = _take_store(p, plan, queue[depth, : waiting[depth]], k)
            if v >= 0:
                waiting[depth] -= 1
                starts[length] = compute[depth]
                stored[v] = copying[depth] = compute[depth] + p.transfer[v]
                events[0, length], events[1, length] = STORE, v
                length += 1
        now = max(compute[depth], copying[depth]) if kind == ENTER else compute[depth]
        if kind != EXIT and (p.step[LATE, s] or plan.copy[k]):
            for r in range(p.step[READ, s], p.step[READ, s + 1]):
                now = max(now, ready[p.reads[r]])
        starts[length] = now
        events[0, length], events[1, length] = plan.copy[k], s
        length += 1
        if kind == OP:
            compute[depth] = now + p.seconds[s]
            if made >= 0 and plan.mode[made] == SWAP and not plan.copy[k] and plan.place[made] > k:
                queue[depth, waiting[depth]] = made
                waiting[depth] += 1
        elif kind == ENTER:
            entered[depth] = now
            depth += 1
            compute[depth] = copying[depth] = now
            waiting[depth] = 0
        else:
            depth -= 1
            spent = max(compute[depth + 1], copying[depth + 1]) - entered[depth]
            compute[depth] = copying[depth] = entered[depth] + spent * p.step[PARTS, s]
    return events[:, :length], starts[:length], stored, max(compute[0], copying[0])


@kernel
def _freed_after(p: Program, plan: _Plan, stored: Floats) -> Ints:
    """Bytes to free after each step: it reads them last, or makes them for nobody.  Not those that leave."""
    freed = np.zeros(plan.steps.size, np.int64)
    for v in range(stored.size):
        early, late = plan.last_early[v], plan.last_late[v]
        if plan.mode[v] == REMAT and early >= 0:
            freed[early] += p.value[NBYTES, v]  # the original; its copy ends with the late readers
        last = late if plan.mode[v] == REMAT or stored[v] >= 0.0 else max(early, late)
        # What a region makes for nobody is not freed.
        if last >= 0 and p.step[TYPE, plan.steps[last]] != ENTER:
            freed[last] += p.value[NBYTES, v]
    return freed


@kernel
def _count_bytes(p: Program, plan: _Plan, events: Ints, starts: Floats, stored: Floats) -> tuple[Ints, int]:
    """Bytes while each step runs, and the most at any event."""
    freed = _freed_after(p, plan, stored)
    live_at = np.empty(plan.steps.size, np.int64)
    leaving, left = np.empty(p.value.shape[1], np.int64), 0  # stores begun, original still on the device
    live = peak = k = 0
    for e in range(starts.size):
        kind, number = events[0, e], events[1, e]
        if kind == STORE:
            leaving[left] = number
            left += 1
            continue
        j = 0
        while j < left:
            v = leaving[j]
            if stored[v] <= starts[e] and plan.last_early[v] < k:
                live -= p.value[NBYTES, v]
                left -= 1
                leaving[j] = leaving[left]
            else:
                j += 1
        made = number if kind == LOAD else p.step[MAKES, number]
        if made >= 0:
            live += p.value[NBYTES, made]
        peak = max(peak, live)
        if kind != LOAD:
            live_at[k] = live
            live -= freed[k]
            k += 1
    return live_at, peak


@kernel
def judge(p: Program, mode: Ints, target: int) -> Outcome:
    """`evaluate` for other kernels."""
    plan = _plan(p, mode)
    events, starts, stored, latency = _run_clocks(p, plan)
    live, peak = _count_bytes(p, plan, events, starts, stored)
    excess = 0.0
    for nbytes in live:
        if nbytes > target:
            excess += nbytes - target
    swapped = np.flatnonzero(stored >= 0.0)
    return Outcome(peak, latency, excess, live, events, plan.last_early, plan.first_late, swapped)


def evaluate(program: Program, mode: Ints, target: int = _NEVER) -> Outcome:
    """Peak, latency and events of an assignment; `excess` sums the bytes above `target` over the steps."""
    return judge(program, mode, target)
