"""List schedulers: one task after the other, by a rule that looks at the bytes.

Problem.  A good order in about a millisecond.

Method.  `forward` takes a ready task by one of `FORWARD`; `backward` builds the order from its end by
one of `BACKWARD`, so that what is only needed late (a recomputed value) is made late; `depth_first` is
a post-order walk from the tasks that nobody waits for.

Invariants.  Each returns a valid order of all tasks; ties are broken by task number, so results do not
depend on anything but the problem.

Not done.  Guarantees: `polish` and `exact` improve on these orders.
"""

from __future__ import annotations

import numpy as np

from lowtide.kernel import kernel
from lowtide.schedule.front import (
    CHAIN,
    END,
    HILL,
    READY,
    Front,
    back,
    front,
    refresh,
    refresh_back,
    run,
    run_back,
)
from lowtide.schedule.tables import (
    AFTER,
    BEFORE,
    MADE,
    NBYTES,
    READ,
    WORKSPACE,
    Ints,
    Tables,
    end_bytes,
    start_bytes,
    step_bytes,
    task_count,
)

__all__ = ["BACKWARD", "DEPTH", "FORWARD", "backward", "depth_first", "forward"]

FORWARD = {
    "release": 0,  # least live bytes after the task
    "lpmf": 1,  # least peak first, then least live bytes after (Inductor's rule)
    "release-late": 2,  # as release; among equals the task that became ready last
    "hill": 3,  # what brings bytes down first, else the smallest rise
    "lookahead": 4,  # as release, for the best chain that a task starts
}
BACKWARD = {
    "release": 0,  # least live bytes before the task
    "lpmf": 1,  # least peak first, then least live bytes before
}
DEPTH = {
    "program": 0,  # operands in program order
    "large": 1,  # the operand with the largest result first
    "need": 2,  # the operand whose own evaluation needs most first (Sethi and Ullman)
}


@kernel
def _score(f: Front, task: int, slack: int, since: int, rule: int) -> tuple[int, int, int]:
    """What rule number `rule` minimises, most important first; `slack` is peak minus live bytes."""
    end, hill = f.task[END, task], f.task[HILL, task]
    if rule == 1:
        return max(hill, slack), end, task
    if rule == 2:
        return end, -since, task
    if rule == 3:
        return (0, end, hill) if end <= 0 else (1, hill, end)
    return end, hill, task


@kernel
def forward(t: Tables, rule: int) -> Ints:
    """The order that takes, step by step, the ready task with the least score."""
    f, waiting = front(t)
    since = np.zeros(task_count(t), np.int64)
    order = np.empty(task_count(t), np.int64)
    live = peak = start_bytes(t)
    for step in range(order.size):
        refresh(t, f, waiting, CHAIN if rule == 4 else 1)
        pick, best = 0, (2**62, 0, 0)
        for k in range(waiting):
            task = f.task[READY, k]
            score = _score(f, task, peak - live, since[task], rule)
            if score < best:
                pick, best = k, score
        task = f.task[READY, pick]
        usage, live = step_bytes(t, task, f.left, live)
        peak = max(peak, usage)
        order[step] = task
        old = waiting - 1
        waiting = run(t, f, pick, waiting)
        for k in range(old, waiting):
            since[f.task[READY, k]] = step + 1
    return order


@kernel
def backward(t: Tables, rule: int) -> Ints:
    """The order that is built from its end, taking the task with the least score whose dependents ran."""
    b, waiting = back(t)
    order = np.empty(task_count(t), np.int64)
    live = peak = end_bytes(t)
    for step in range(order.size - 1, -1, -1):
        refresh_back(t, b, waiting)
        pick, best = 0, (2**62, 0, 0)
        for k in range(waiting):
            task = b.task[READY, k]
            start, hill = b.task[END, task], b.task[HILL, task]
            score = (max(hill, peak - live), start, -task) if rule == 1 else (start, hill, -task)
            if score < best:
                pick, best = k, score
        task = b.task[READY, pick]
        peak = max(peak, live + b.task[HILL, task])
        live += b.task[END, task]
        order[step] = task
        waiting = run_back(t, b, pick, waiting)
    return order


@kernel
def _keys(t: Tables, rule: int) -> Ints:
    """Per task, what `depth_first` sorts operands by: the one with the least key is walked first."""
    key = np.zeros(task_count(t), np.int64)
    for task in range(key.size):
        own = 0
        for k in range(t.task[MADE, task], t.task[MADE, task + 1]):
            own += t.storage[NBYTES, t.entries[k]]
        need = own + t.task[WORKSPACE, task]
        for k in range(t.task[READ, task], t.task[READ, task + 1]):
            need += t.storage[NBYTES, t.entries[k]]
        if rule == 2:
            for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
                need = max(need, -key[t.entries[k]])
        key[task] = task if rule == 0 else -own if rule == 1 else -need
    return key


@kernel
def _push_operands(t: Tables, task: int, key: Ints, state: Ints, stack: Ints, top: int) -> int:
    """Put the unseen operands of `task` on the stack, the one with the least key on top; the new top."""
    bottom = top
    for k in range(t.task[BEFORE, task], t.task[BEFORE, task + 1]):
        operand = t.entries[k]
        if state[operand] != 0:
            continue
        at = top
        while at > bottom and key[stack[at - 1]] < key[operand]:
            stack[at] = stack[at - 1]
            at -= 1
        stack[at] = operand
        top += 1
    return top


@kernel
def depth_first(t: Tables, rule: int) -> Ints:
    """Post-order walk from the tasks without dependents, in program order; operands by `DEPTH` rule."""
    count = task_count(t)
    key = _keys(t, rule)
    state = np.zeros(count, np.int64)  # 0 unseen, 1 on the stack with its operands above, 2 emitted
    stack = np.empty(t.entries.size + 1, np.int64)
    order = np.empty(count, np.int64)
    length = 0
    for root in range(count):
        if t.task[AFTER, root] != t.task[AFTER, root + 1]:
            continue
        stack[0] = root
        top = 1
        while top > 0:
            task = stack[top - 1]
            if state[task] == 0:
                state[task] = 1
                top = _push_operands(t, task, key, state, stack, top)
                continue
            top -= 1
            if state[task] == 1:
                state[task] = 2
                order[length] = task
                length += 1
    return order
