"""Random order problems: how far from the exact optimum schedulers end, and what rescheduling costs.

``python -m benchmarks.order [--count 200] [--tasks 20]``
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import numpy as np

from lowtide.schedule import best_order, exact_order, reorder
from lowtide.schedule.heuristics import KERNELS
from lowtide.schedule.incremental import Incremental
from lowtide.schedule.tables import (
    BEFORE,
    KEPT,
    MADE,
    NBYTES,
    READ,
    WORKSPACE,
    Ints,
    Tables,
    as_order,
    peak_bytes,
    tables_of,
    task_count,
)

__all__ = ["breadth_first", "random_tables", "recompute_one", "rows_of", "training_tables"]

Rows = dict[str, list[list[int]]]
Result = TypeVar("Result")


def random_tables(count: int, seed: int, operands: int = 3, span: int = 0) -> Tables:
    """A random DAG of `count` tasks with one result each, sizes log-uniform in 1..1024.

    A task reads 1 to `operands` results among the last `span` tasks (0: all earlier ones); about a
    tenth of the tasks read nothing.  Results that nobody reads are kept: they are the graph's outputs.
    """
    rng = random.Random(seed)
    reads: list[list[int]] = []
    for task in range(count):
        low = max(0, task - span) if span else 0
        wanted = 0 if task == 0 or rng.random() < 0.1 else rng.randint(1, operands)
        reads.append(sorted(rng.sample(range(low, task), min(wanted, task - low))))
    read = {storage for row in reads for storage in row}
    return tables_of(
        before=reads,
        reads=reads,
        makes=[[task] for task in range(count)],
        nbytes=[int(2 ** rng.uniform(0, 10)) for _ in range(count)],
        kept=[task not in read for task in range(count)],
    )


def training_tables(layers: int, seed: int) -> Tables:
    """A training step of residual layers: per layer four forward, four backward tasks and two updates.

    Weight gradients come late in program order and wait for their updates at its end, as frameworks
    emit them.  About ``10 * layers`` tasks.
    """
    rng = random.Random(seed)
    reads: list[list[int]] = []
    nbytes: list[int] = []

    def add(size: float, *operands: int) -> int:
        reads.append(sorted(set(operands)))
        nbytes.append(int(size))
        return len(reads) - 1

    width = [2 ** rng.uniform(6, 10) for _ in range(layers)]
    hidden = [add(width[0])]
    saved: list[tuple[int, int, int]] = []
    for layer in range(layers):
        first = add(width[layer] * rng.choice((1, 2, 4)), hidden[-1])
        act = add(nbytes[first], first)
        second = add(width[layer], act)
        hidden.append(add(width[layer], hidden[-1], second))
        saved.append((hidden[-2], first, act))
    grad = add(width[-1], hidden[-1])
    weights: list[int] = []
    for layer in reversed(range(layers)):
        before, first, act = saved[layer]
        inner = add(nbytes[act], grad)
        weights.append(add(2 ** rng.uniform(8, 13), act, grad))
        outer = add(nbytes[first], inner, first)
        weights.append(add(2 ** rng.uniform(8, 13), before, outer))
        grad = add(width[layer], grad, outer)
    for weight in weights:
        add(0, weight)
    return tables_of(before=reads, reads=reads, makes=[[t] for t in range(len(reads))], nbytes=nbytes)


def rows_of(tables: Tables) -> Rows:
    """`before`, `reads`, `makes` as lists, and `nbytes`, `kept`, `workspace` as one row each."""
    count, total = task_count(tables), tables.storage.shape[1] - 1

    def rows(relation: int) -> list[list[int]]:
        return [tables.entries[a:b].tolist() for a, b in pairwise(tables.task[relation].tolist())]

    return {
        "before": rows(BEFORE),
        "reads": rows(READ),
        "makes": rows(MADE),
        "nbytes": [tables.storage[NBYTES, :total].tolist()],
        "kept": [tables.storage[KEPT, :total].tolist()],
        "workspace": [tables.task[WORKSPACE, :count].tolist()],
    }


def tables_from(rows: Rows) -> Tables:
    """The inverse of `rows_of`."""
    return tables_of(
        before=rows["before"],
        reads=rows["reads"],
        makes=rows["makes"],
        nbytes=rows["nbytes"][0],
        kept=[bool(kept) for kept in rows["kept"][0]],
        workspace=rows["workspace"][0],
    )


def recompute_one(rows: Rows, order: Sequence[int], rng: random.Random) -> tuple[Rows, Ints, list[int]]:
    """A random edit: some later readers of a random value read a second copy of it instead.

    The new rows (numbered by the edited order), the old tasks in their old order, and the changed tasks.
    """
    place = {task: step for step, task in enumerate(order)}
    maker = {made[0]: task for task, made in enumerate(rows["makes"]) if len(made) == 1}
    users: dict[int, list[int]] = {}
    for task in order:
        for storage in rows["reads"][task]:
            users.setdefault(storage, []).append(task)
    able = [s for s, found in users.items() if len(found) > 1 and s in maker and rows["reads"][maker[s]]]
    storage = rng.choice(able)
    late = users[storage][rng.randrange(1, len(users[storage])) :]
    clone, copy, source = len(order), len(rows["nbytes"][0]), maker[storage]
    new = {name: [list(row) for row in found] for name, found in rows.items()}
    for name in ("before", "reads"):
        new[name].append(list(rows[name][source]))
    new["makes"].append([copy])
    for name, value in (("nbytes", rows["nbytes"][0][storage]), ("kept", 0)):
        new[name][0].append(value)
    new["workspace"][0].append(rows["workspace"][0][source])
    for task in late:
        new["reads"][task] = [copy if s == storage else s for s in new["reads"][task]]
        new["before"][task] = [clone if t == source else t for t in new["before"][task]]
    first = min(late, key=place.__getitem__)
    sequence = [t for task in order for t in ((clone, task) if task == first else (task,))]
    number = {task: step for step, task in enumerate(sequence)}
    moved = {name: [new[name][task] for task in sequence] for name in ("before", "reads", "makes")}
    moved["before"] = [sorted(number[task] for task in row) for row in moved["before"]]
    moved["workspace"] = [[new["workspace"][0][task] for task in sequence]]
    rows = {**new, **moved}
    return rows, as_order([number[task] for task in order]), [number[task] for task in (clone, *late)]


def breadth_first(tables: Tables) -> Ints:
    """Inductor's `topological_sort_bfs`: the ready task whose operands ran earliest."""
    before = rows_of(tables)["before"]
    step: dict[int, int] = {}
    while len(step) < len(before):
        ready = [t for t, row in enumerate(before) if t not in step and all(b in step for b in row)]
        step[min(ready, key=lambda t: (sorted(step[b] for b in before[t]), t))] = len(step)
    return as_order(list(step))


def inductor_best(tables: Tables) -> int:
    """The least peak of the four orders that Inductor's `reorder_for_peak_memory` tries."""
    names = ("program", "forward:lpmf", "depth-first:program")
    orders = [KERNELS[name](tables) for name in names]
    return min(int(peak_bytes(tables, order)) for order in (*orders, breadth_first(tables)))


def timed(function: Callable[[], Result], times: int = 5) -> tuple[Result, float]:
    """The result, and the least of `times` runs in milliseconds."""
    found, least = function(), float("inf")
    for _ in range(times):
        started = perf_counter()
        found = function()
        least = min(least, perf_counter() - started)
    return found, least * 1e3


def print_gaps(count: int, tasks: int) -> None:
    """Peaks over the exact optimum on random DAGs."""
    gaps: dict[str, list[float]] = {}
    proven = 0
    for seed in range(count):
        tables = random_tables(tasks, seed)
        exact = exact_order(tables)
        proven += exact.proven
        peaks = {name: int(peak_bytes(tables, kernel(tables))) for name, kernel in KERNELS.items()}
        peaks["Inductor's best of four"] = inductor_best(tables)
        peaks["best of all, unpolished"] = min(peaks[name] for name in KERNELS)
        peaks["best_order without windows"] = int(peak_bytes(tables, best_order(tables, windows=False)[0]))
        peaks["best_order (default)"] = int(peak_bytes(tables, best_order(tables)[0]))
        for name, peak in peaks.items():
            gaps.setdefault(name, []).append(peak / exact.peak_bytes - 1)
    print(f"\n{count} random DAGs of {tasks} nodes, {proven} optima proven; peak above the optimum:\n")
    print("| scheduler | mean | 95th percentile | optimal |\n|---|---|---|---|")
    for name, found in gaps.items():
        optimal = np.mean([gap == 0 for gap in found])
        print(f"| {name} | {np.mean(found):.1%} | {np.percentile(found, 95):.1%} | {optimal:.0%} |")


def print_incremental(tables: Tables, name: str, edits: int) -> None:
    """Random recomputations, one on top of the other: full scheduling against rescheduling."""
    rng, rows = random.Random(0), rows_of(tables)
    order = best_order(tables)[0]
    ways: tuple[Incremental, ...] = (Incremental(), Incremental("narrow-waist"))
    ratios: list[list[float]] = [[] for _ in ways]
    times: list[list[float]] = [[] for _ in (*ways, "full")]
    for _ in range(edits):
        rows, old, changed = recompute_one(rows, order.tolist(), rng)
        edited = tables_from(rows)
        (full, _), spent = timed(partial(best_order, edited))
        times[-1].append(spent)
        for number, how in enumerate(ways):
            found, spent = timed(partial(reorder, edited, old, changed, how))
            times[number].append(spent)
            ratios[number].append(peak_bytes(edited, found) / peak_bytes(edited, full))
            order = found if number == 0 else order
    for number, how in enumerate(ways):
        faster = np.median(times[-1]) / np.median(times[number])
        print(
            f"| {name} | {task_count(tables)} | {how.variant} | {np.mean(ratios[number]):.4f} "
            f"| {max(ratios[number]):.3f} | {np.median(times[number]):.2f} | {np.median(times[-1]):.2f} "
            f"| {faster:.1f}x |"
        )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many DAGs")
    parser.add_argument("--tasks", type=int, default=20, help="nodes of each")
    parser.add_argument("--edits", type=int, default=40, help="edits per graph")
    options = parser.parse_args()
    print_gaps(options.count, options.tasks)
    print("\nrandom edits, rescheduled from the old order:\n")
    print("| graph | tasks | variant | peak / full's | worst | ms | full, ms | faster |")
    print("|---|---|---|---|---|---|---|---|")
    print_incremental(training_tables(80, 0), "training", options.edits)
    print_incremental(random_tables(800, 0, span=20), "random", options.edits)


if __name__ == "__main__":
    main()
