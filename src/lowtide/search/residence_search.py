"""Choosing where values spend the gap: annealing on two limits that tighten in turn.

Problem.  Given a `residence.Program` and a limit on latency (or on bytes), find decisions with the least
peak (or latency).  Single flips rarely pay alone, and layers repeat.

Method.  A state violates a target of bytes by its excess (bytes above it, summed over the steps: it falls
with every useful change, where the peak does not) and a target of seconds by the difference.  A move sets
one decision for a run of neighbours in a group of like values, or for one value.  Annealing lowers the
weighted violation; when a state keeps the user's limit and is the best so far, the other target is drawn
tighter.

Invariants.  Anytime: the best state that keeps the limit is kept.  Deterministic for a seed and a number of
states.

Not done.  Order and regions: a program comes with both fixed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.kernel import kernel
from lowtide.search.residence import KEEP, REMAT, SWAP, Ints, Outcome, Program, evaluate, judge

__all__ = ["Choice", "Found", "Limit", "anneal", "choice_of", "descend"]

_CHUNK = 256
_TIME_WEIGHT, _BYTES_WEIGHT = 40.0, 0.05
_LEAST_COST = 2e-4
"""Part of the latency below which costs count alike."""
_TIGHTER_BYTES, _TIGHTER_TIME = 0.985, 0.9985


class Choice(NamedTuple):
    """What may be decided: values that may be computed again or swapped; groups of like values, in program
    order.

    ``members[start[g]:start[g + 1]]`` are the values of group g.
    """

    can_remat: Ints
    can_swap: Ints
    start: Ints
    members: Ints


class Limit(NamedTuple):
    """`seconds` is the limit and bytes are lowered, or the other way round; the other one is the target."""

    seconds: float
    nbytes: int
    on_time: bool


@dataclass(frozen=True)
class Found:
    """The best state that keeps the limit, else the least violating one; states judged so far."""

    mode: Ints
    peak_bytes: int
    latency_s: float
    feasible: bool
    states: int


def choice_of(can_remat: Ints, can_swap: Ints, groups: Sequence[Sequence[int]]) -> Choice:
    """A Choice from lists."""
    start = np.zeros(len(groups) + 1, np.int64)
    start[1:] = np.cumsum([len(group) for group in groups])
    return Choice(can_remat, can_swap, start, np.array([v for group in groups for v in group], np.int64))


@kernel
def _violation(outcome: Outcome, seconds: float, nbytes: int) -> float:
    over = max(0.0, outcome.latency_s / seconds - 1.0)
    return _TIME_WEIGHT * over + _BYTES_WEIGHT * outcome.excess / nbytes


@kernel
def _decide(choice: Choice, value: int, now: int) -> int:
    """Another decision that the value allows; the same if there is none."""
    allowed = np.zeros(2, np.int64)
    count = 0
    for decision in (KEEP, REMAT, SWAP):
        legal = decision == KEEP or (decision == REMAT and choice.can_remat[value])
        legal = legal or (decision == SWAP and choice.can_swap[value] > 0)
        if legal and decision != now:
            allowed[count] = decision
            count += 1
    return int(allowed[np.random.randint(count)]) if count else now


@kernel
def _move(choice: Choice, mode: Ints) -> Ints:
    """A neighbour of a state."""
    group = np.random.randint(choice.start.size - 1)
    begin, end = choice.start[group], choice.start[group + 1]
    first = np.random.randint(begin, end)
    last = first + 1 if np.random.random() < 0.5 else np.random.randint(first, end) + 1
    changed = mode.copy()
    changed[choice.members[first:last]] = _decide(choice, choice.members[first], mode[choice.members[first]])
    return changed


@kernel
def _chunk(
    p: Program,
    choice: Choice,
    limit: Limit,
    mode: Ints,
    best: Ints,
    score: tuple[float, float],
    seed: int,
    warmth: float,
) -> tuple[Ints, Ints, tuple[float, float], Limit]:
    """`_CHUNK` states from `mode`; `score` is what is minimised and the other one, of `best`."""
    np.random.seed(seed)
    seconds, nbytes = limit.seconds, limit.nbytes
    energy = _violation(judge(p, mode, nbytes), seconds, nbytes)
    for _ in range(_CHUNK):
        candidate = _move(choice, mode)
        outcome = judge(p, candidate, nbytes)
        after = _violation(outcome, seconds, nbytes)
        if after <= energy or np.random.random() < np.exp((energy - after) / warmth):
            mode, energy = candidate, after
        if limit.on_time:
            kept, ours = outcome.latency_s <= limit.seconds, (float(outcome.peak_bytes), outcome.latency_s)
        else:
            kept, ours = outcome.peak_bytes <= limit.nbytes, (outcome.latency_s, float(outcome.peak_bytes))
        if kept and ours < score:
            best, score = candidate, ours
            if limit.on_time:
                nbytes = min(nbytes, int(outcome.peak_bytes * _TIGHTER_BYTES))
            else:
                seconds = min(seconds, outcome.latency_s * _TIGHTER_TIME)
            energy = _violation(judge(p, mode, nbytes), seconds, nbytes)
    return mode, best, score, Limit(seconds, nbytes, limit.on_time)


@kernel
def _descend(p: Program, choice: Choice, start: Ints, seconds: float, nbytes: int) -> Ints:
    """Decisions one by one, most excess bytes per second first, while the latency stays within `seconds`."""
    mode = start.copy()
    now = judge(p, mode, nbytes)
    floor = _LEAST_COST * now.latency_s
    while now.excess > 0.0:
        most, value, decision = 0.0, -1, KEEP
        above = np.cumsum(now.live > nbytes)
        for v in choice.members:
            first, last = now.last_early[v], now.first_late[v]
            old = mode[v]
            waits = old == KEEP and last > first >= 0 and above[last] > above[first]
            if not waits and old != SWAP:
                continue
            for other in (REMAT, SWAP):
                if other == old or not (choice.can_remat[v] if other == REMAT else choice.can_swap[v]):
                    continue
                mode[v] = other
                after = judge(p, mode, nbytes)
                gain = (now.excess - after.excess) / max(after.latency_s - now.latency_s, floor)
                if after.latency_s <= seconds and gain > most:
                    most, value, decision = gain, v, other
            mode[v] = old
        if value < 0:
            break
        mode[value] = decision
        now = judge(p, mode, nbytes)
    return mode


def descend(program: Program, choice: Choice, start: Ints, limit: Limit, rounds: int = 6) -> Found:
    """The best of greedy descents: to the limit of bytes, or to the least bytes, found by bisection."""
    best = _found(limit, start, evaluate(program, start), 1)
    if not limit.on_time:
        mode = _descend(program, choice, start, float("inf"), limit.nbytes)
        return _found(limit, mode, evaluate(program, mode), 1)
    low, high = 0, evaluate(program, start).peak_bytes
    for _ in range(rounds):
        target = (low + high) // 2
        mode = _descend(program, choice, start, limit.seconds, target)
        outcome = evaluate(program, mode)
        found = _found(limit, mode, outcome, 1)
        if found.feasible and (not best.feasible or found.peak_bytes < best.peak_bytes):
            best = found
        low, high = (low, target) if outcome.peak_bytes <= target else (target, high)
    return best


def anneal(
    program: Program,
    choice: Choice,
    start: Ints,
    limit: Limit,
    *,
    states: int = 1 << 40,
    deadline: float = float("inf"),
    seed: int = 0,
    heat: float = 0.02,
) -> Found:
    """Lower the peak under a limit of seconds, or the latency under one of bytes.

    Stops after `states` states or at `deadline` (of `time.perf_counter`); `heat` falls to nothing by then.
    """
    first = evaluate(program, start)
    if not choice.members.size:
        return _found(limit, start, first, 0)
    target = _first_target(limit, first)
    mode, best, score = start, start, (float("inf"), float("inf"))
    if _keeps(limit, first):
        score = _score(limit, first)
    done, began = 0, time.perf_counter()
    while done < states and time.perf_counter() < deadline:
        used = done / states
        if deadline < float("inf"):
            used = max(used, (time.perf_counter() - began) / max(deadline - began, 1e-9))
        warmth = max(heat * (1.0 - min(used, 1.0)) ** 2, 1e-9)
        mode, best, score, target = _chunk(
            program, choice, target, mode, best, score, seed * 1_000_003 + done, warmth
        )
        done += _CHUNK
    chosen = best if score[0] < float("inf") else mode
    return _found(limit, chosen, evaluate(program, chosen), done)


def _first_target(limit: Limit, first: Outcome) -> Limit:
    """The limit with a first target for what is lowered."""
    if limit.on_time:
        return limit._replace(nbytes=int(first.peak_bytes * 0.9))
    loose = 1.1 if first.peak_bytes > limit.nbytes else 0.997
    return limit._replace(seconds=first.latency_s * loose)


def _keeps(limit: Limit, outcome: Outcome) -> bool:
    return outcome.latency_s <= limit.seconds if limit.on_time else outcome.peak_bytes <= limit.nbytes


def _score(limit: Limit, outcome: Outcome) -> tuple[float, float]:
    pair = (float(outcome.peak_bytes), outcome.latency_s)
    return pair if limit.on_time else pair[::-1]


def _found(limit: Limit, mode: Ints, outcome: Outcome, states: int) -> Found:
    return Found(mode, outcome.peak_bytes, outcome.latency_s, _keeps(limit, outcome), states)
