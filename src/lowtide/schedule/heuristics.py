"""The default schedulers: run all, keep the best.

Problem.  No single rule is good on every graph, and each costs less than a millisecond.

Method.  `SCHEDULERS` is the visible list.  `best_schedule` runs all of it, polishes the program's own
order and the best few others, and, where the graph is small or time is given, improves the winner by
exact search in windows around its peak.

Invariants.  Never worse than program order.  Without a time limit the result depends on the problem only.

Not done.  Latency: an order changes it only through copies that overlap with work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType

import numpy as np

from lowtide.analysis.facts import Facts
from lowtide.ir.graph import Graph
from lowtide.schedule.downsets import NONE
from lowtide.schedule.listing import BACKWARD, DEPTH, FORWARD, backward, depth_first, forward
from lowtide.schedule.polish import polish
from lowtide.schedule.relation import floor_bytes, relate
from lowtide.schedule.schedule import OrderProblem, Schedule, order_problem
from lowtide.schedule.tables import Ints, Tables, peak_bytes, task_count
from lowtide.schedule.windows import ROUNDS, improve

__all__ = ["SCHEDULERS", "best_order", "best_schedule"]


def _program(tables: Tables) -> Ints:
    return np.arange(task_count(tables))


KERNELS: Mapping[str, Callable[[Tables], Ints]] = MappingProxyType(
    {
        "program": _program,
        **{f"depth-first:{name}": partial(depth_first, rule=rule) for name, rule in DEPTH.items()},
        **{f"forward:{name}": partial(forward, rule=rule) for name, rule in FORWARD.items()},
        **{f"backward:{name}": partial(backward, rule=rule) for name, rule in BACKWARD.items()},
    }
)


def _scheduler(name: str) -> Callable[[OrderProblem], Schedule]:
    return lambda problem: problem.schedule(KERNELS[name](problem.tables), name)


SCHEDULERS: Mapping[str, Callable[[OrderProblem], Schedule]] = MappingProxyType(
    {name: _scheduler(name) for name in KERNELS}
)

SMALL_TASKS = 64  # up to here, every order is polished and windows are part of the quick path
QUICK_STATES = 2000  # of one exact search on the quick path
FIRST_STATES = 2000  # of one exact search in the first round when time is given; then it doubles
WIDEST = 1024


@dataclass(frozen=True, eq=False)
class _Ranked:
    """An order with its peak and the name of the scheduler that it started from."""

    peak_bytes: int
    order: Ints
    name: str


def _polished(tables: Tables, entry: _Ranked, rounds: int) -> _Ranked:
    order, peak = polish(tables, entry.order, rounds)
    return _Ranked(peak, order, entry.name)


def _rank(tables: Tables) -> list[_Ranked]:
    """Polished orders, the least peak first; among equals in the order of `SCHEDULERS`.

    In large graphs only the program's own order and the best of each family are polished.
    """
    best: dict[str, _Ranked] = {}
    seen: set[bytes] = set()
    for name, kernel in KERNELS.items():
        order = kernel(tables)
        if (key := order.tobytes()) in seen:
            continue
        seen.add(key)
        entry = _Ranked(int(peak_bytes(tables, order)), order, name)
        family = name if task_count(tables) <= SMALL_TASKS else name.partition(":")[0]
        if family not in best or entry.peak_bytes < best[family].peak_bytes:
            best[family] = entry
    ranked = sorted((_polished(tables, entry, 1) for entry in best.values()), key=_peak_of)
    ranked[0] = _polished(tables, ranked[0], ROUNDS)
    return ranked


def _peak_of(entry: _Ranked) -> int:
    return entry.peak_bytes


def best_order(tables: Tables, seconds: float | None = None, windows: bool = True) -> tuple[Ints, str]:
    """The best order found and the name of the scheduler that it started from.

    With `seconds`, exact windows improve it until it is optimal or the time is out; without, they do so
    in small graphs (`SMALL_TASKS`), unless `windows` is off.
    """
    deadline = perf_counter() + (seconds or 0.0)
    ranked = _rank(tables)
    best = ranked[0]
    if seconds is not None:
        best = _improve_in_turn(tables, ranked, deadline)
    elif windows and task_count(tables) <= SMALL_TASKS:
        best = _improved(tables, best, QUICK_STATES, float("inf"))[1]
    return best.order, best.name


def _improved(tables: Tables, entry: _Ranked, limit: int, deadline: float) -> tuple[int, _Ranked]:
    status, order = improve(tables, entry.order, WIDEST, limit, deadline)
    return status, _Ranked(int(peak_bytes(tables, order)), order, entry.name)


def _improve_in_turn(tables: Tables, ranked: list[_Ranked], deadline: float) -> _Ranked:
    """Improve each order with more and more states, until one is optimal or the time is out."""
    if not task_count(tables):
        return ranked[0]
    floor = floor_bytes(tables, relate(tables, ranked[0].order))
    best, limit = ranked[0], FIRST_STATES
    while best.peak_bytes > floor and perf_counter() < deadline:
        started = perf_counter()
        for number, entry in enumerate(ranked):
            status, ranked[number] = _improved(tables, entry, limit, deadline)
            best = min(best, ranked[number], key=_peak_of)
            if status == NONE or best.peak_bytes <= floor:
                return best
        # A search is not interrupted: do not start a round that would end after the deadline.
        if perf_counter() + 2 * (perf_counter() - started) > deadline:
            break
        limit *= 2
    return best


def best_schedule(graph: Graph, facts: Facts, inplace: bool = True, seconds: float | None = None) -> Schedule:
    """The schedule of `graph` with the least peak that was found; see `best_order`.

    With `inplace`, outputs may take the room of dying inputs.  Raises KeyError if `facts` lacks a node
    that allocates.
    """
    problem = order_problem(graph, facts, inplace)
    order, name = best_order(problem.tables, seconds)
    return problem.schedule(order, name)
