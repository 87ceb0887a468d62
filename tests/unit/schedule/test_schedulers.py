"""Schedulers on problems whose best order is known by thought."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Literal

import numpy as np
import pytest
from benchmarks.order import random_tables, recompute_one, rows_of, tables_from, training_tables

from lowtide.schedule import Incremental, best_order, exact_order, reorder
from lowtide.schedule.downsets import FOUND, LIMIT, NONE, search
from lowtide.schedule.listing import FORWARD, forward
from lowtide.schedule.polish import advance, delay
from lowtide.schedule.relation import cuts, floor_bytes, narrow_waist, relate
from lowtide.schedule.tables import Tables, peak_bytes, tables_of, usage_curve
from lowtide.schedule.windows import improve


def chain_of(reads: list[list[int]], nbytes: list[int], kept: Collection[int] = ()) -> Tables:
    """One result per task; task i makes storage i."""
    return tables_of(
        before=reads,
        reads=reads,
        makes=[[task] for task in range(len(reads))],
        nbytes=nbytes,
        kept=[task in kept for task in range(len(reads))],
    )


# 0 activation, 1 loss gradient, 2 its weight gradient, 3 update, 4 next gradient, 5 weight gradient, 6 update
BACKWARD = chain_of([[], [0], [0, 1], [2], [1], [4], [5]], [50, 30, 40, 0, 30, 40, 0])


def test_the_curve_of_an_order() -> None:
    during, before = usage_curve(BACKWARD, np.arange(7))
    assert during.tolist() == [50, 80, 120, 70, 60, 70, 40]
    assert before.tolist() == [0, 50, 80, 70, 30, 30, 40, 0]


def test_advance_runs_a_weight_gradient_with_its_update_at_once() -> None:
    late = np.array([0, 1, 4, 2, 5, 3, 6])
    assert peak_bytes(BACKWARD, late) == 150
    assert advance(BACKWARD, late, 150).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_delay_puts_a_recomputed_value_directly_before_its_reader() -> None:
    # 0 input of the program that stays, 1 recomputed from it, 2..3 other work, 4 reads 1 and 3
    tables = chain_of([[], [0], [0], [2], [0, 1, 3]], [8, 16, 4, 4, 1], kept={0, 4})
    assert peak_bytes(tables, np.arange(5)) == 32
    found = delay(tables, np.arange(5), 32)
    assert found.tolist() == [0, 2, 3, 1, 4]
    assert peak_bytes(tables, found) == 29


def test_forward_rules_differ_where_they_should() -> None:
    # A large value whose chain ends small (0-1), and a small value (2).
    tables = chain_of([[], [0], [], [1, 2]], [10, 1, 2, 1], kept={3})
    assert forward(tables, FORWARD["release"]).tolist() == [2, 0, 1, 3]
    assert forward(tables, FORWARD["lookahead"]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dominance", [False, True])
@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_every_combination_of_switches_finds_the_same_optimum(
    dominance: bool, chains: bool, seed: int
) -> None:
    tables = random_tables(14, seed)
    exact = exact_order(tables)
    status, level, order = search(tables, 0, 1 << 60, 200_000, dominance, chains)
    assert (status, level, peak_bytes(tables, order)) == (FOUND, exact.peak_bytes, exact.peak_bytes)


def test_dominance_saves_states() -> None:
    tables = random_tables(20, 2)
    assert search(tables, 0, 1 << 60, 64, True, True)[0] == FOUND
    assert search(tables, 0, 1 << 60, 64, True, False)[0] == LIMIT
    assert search(tables, 0, 1 << 60, 128, True, False)[0] == FOUND
    assert search(tables, 0, 1 << 60, 256, False, False)[0] == LIMIT


def test_search_proves_that_a_ceiling_cannot_be_beaten() -> None:
    tables = random_tables(16, 1)
    best = exact_order(tables).peak_bytes
    assert search(tables, 0, best, 100_000, True, True)[0] == NONE
    assert search(tables, 0, best + 1, 100_000, True, True)[:2] == (FOUND, best)
    assert search(tables, best + 5, best + 9, 100_000, True, True)[0] == FOUND


def test_a_limit_is_reported_with_a_valid_bound() -> None:
    tables = random_tables(40, 0)
    status, level, prefix = search(tables, 0, 1 << 60, 200, True, True)
    assert status == LIMIT
    assert floor_bytes(tables, relate(tables, np.arange(40))) <= peak_bytes(tables, best_order(tables)[0])
    assert level <= peak_bytes(tables, best_order(tables, seconds=0.2)[0])
    assert 0 < prefix.size < 40


def test_cuts_are_next_to_tasks_that_everything_else_depends_on() -> None:
    # two diamonds joined at task 3
    tables = chain_of([[], [0], [0], [1, 2], [3], [3], [4, 5]], [1] * 7)
    relation = relate(tables, np.arange(7))
    assert narrow_waist(relation).tolist() == [0, 1, 1, 0, 1, 1, 0]
    assert cuts(relation).tolist() == [0, 1, 3, 4, 6, 7]


def test_windows_prove_optimality_piece_by_piece() -> None:
    tables = random_tables(60, 7)
    order, _ = best_order(tables)
    status, improved = improve(tables, order, 1024, 20_000, float("inf"))
    assert status == NONE
    assert peak_bytes(tables, improved) == floor_bytes(tables, relate(tables, order))


def gaps(count: int, tasks: int) -> tuple[list[float], list[float]]:
    """How far best_order and best_order without exact windows are above the optimum."""
    default, heuristics = [], []
    for seed in range(count):
        tables = random_tables(tasks, seed)
        exact = exact_order(tables)
        assert exact.proven
        default.append(peak_bytes(tables, best_order(tables)[0]) / exact.peak_bytes - 1)
        heuristics.append(peak_bytes(tables, best_order(tables, windows=False)[0]) / exact.peak_bytes - 1)
    return default, heuristics


def test_random_dags_of_20_nodes_are_within_two_percent_of_the_optimum() -> None:
    default, heuristics = gaps(60, 20)
    assert np.mean(default) <= 0.001
    assert np.mean(heuristics) <= 0.02


def test_narrow_waist_changes_nothing_outside_its_interval() -> None:
    tables = random_tables(300, 2, span=20)
    order = np.arange(300)
    found = reorder(tables, order, [100, 104], Incremental("narrow-waist", extend=10))
    moved = np.flatnonzero(found != order)
    assert moved.size > 0
    assert moved[0] >= 90 and moved[-1] <= 114
    assert reorder(tables, order, [], Incremental("narrow-waist")).tolist() == order.tolist()


def test_rescheduling_around_the_peak_lowers_it() -> None:
    tables = training_tables(12, 0)
    order = np.arange(tables.task.shape[1] - 1)
    found = reorder(tables, order, [])
    assert peak_bytes(tables, found) == peak_bytes(tables, best_order(tables)[0]) < peak_bytes(tables, order)


@pytest.mark.parametrize("variant", ["peak", "narrow-waist"])
def test_rescheduling_after_edits_is_as_good_as_scheduling_again(
    variant: Literal["peak", "narrow-waist"],
) -> None:
    rng, rows = random.Random(0), rows_of(training_tables(20, 0))
    order = best_order(tables_from(rows))[0]
    ratios = []
    for _ in range(25):
        rows, old, changed = recompute_one(rows, order.tolist(), rng)
        tables = tables_from(rows)
        order = reorder(tables, old, changed, Incremental(variant))
        ratios.append(peak_bytes(tables, order) / peak_bytes(tables, best_order(tables)[0]))
    assert np.mean(ratios) <= 1.01


def test_a_training_step_runs_its_updates_where_they_free_most() -> None:
    tables = training_tables(12, 0)
    order, _ = best_order(tables)
    floor = floor_bytes(tables, relate(tables, order))
    assert peak_bytes(tables, order) <= 1.02 * floor
    assert peak_bytes(tables, np.arange(order.size)) >= 1.3 * floor
