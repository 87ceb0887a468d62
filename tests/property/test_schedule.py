"""Schedulers on random graphs of real operators, and on random order problems, against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.order_problems import best_peak_of_all, order_tables
from tests.strategies import facts_of, graphs, orders

from lowtide.analysis.timeline import timeline
from lowtide.schedule import (
    SCHEDULERS,
    Incremental,
    Schedule,
    best_order,
    best_schedule,
    check_order,
    exact_order,
    order_problem,
    reorder,
    reschedule,
)
from lowtide.schedule.downsets import FOUND, search
from lowtide.schedule.front import (
    CHAIN,
    END,
    HILL,
    LENGTH,
    READY,
    STALE,
    WAITS,
    Front,
    back,
    front,
    refresh,
    refresh_back,
    run,
    run_back,
)
from lowtide.schedule.incremental import merge
from lowtide.schedule.judge import judged_peak_bytes
from lowtide.schedule.listing import BACKWARD, DEPTH, FORWARD, backward, depth_first, forward
from lowtide.schedule.polish import advance, delay, polish
from lowtide.schedule.relation import cuts, floor_bytes, narrow_waist, relate
from lowtide.schedule.tables import BEFORE, Ints, Tables, peak_bytes, task_count, usage_curve
from lowtide.schedule.window import window

SOME = settings(max_examples=100, deadline=None)
FEW = settings(max_examples=40, deadline=None)


def befores(tables: Tables) -> list[set[int]]:
    starts = tables.task[BEFORE]
    return [set(tables.entries[a:b].tolist()) for a, b in pairwise(starts.tolist())]


def is_valid(tables: Tables, order: Ints) -> bool:
    ran: set[int] = set()
    for task in order.tolist():
        if task in ran or not befores(tables)[task] <= ran:
            return False
        ran.add(task)
    return len(ran) == task_count(tables)


@st.composite
def orders_of(draw: st.DrawFn, tables: Tables) -> Ints:
    priority = draw(st.permutations(range(task_count(tables))))
    waits, done = befores(tables), list[int]()
    while len(done) < task_count(tables):
        done.append(next(task for task in priority if task not in done and waits[task] <= set(done)))
    return np.array(done, np.int64)


@SOME
@given(st.data(), st.booleans())
def test_every_scheduler_gives_an_order_that_the_judge_accepts(data: st.DataObject, inplace: bool) -> None:
    graph = data.draw(graphs())
    facts = data.draw(facts_of(graph))
    problem = order_problem(graph, facts, inplace)
    found = [scheduler(problem) for scheduler in SCHEDULERS.values()]
    best = best_schedule(graph, facts, inplace)
    for schedule in (*found, best):
        assert check_order(graph, schedule.order) == []
    peaks = [timeline(graph, s.order, facts, inplace).peak_above_bytes for s in found]
    assert timeline(graph, best.order, facts, inplace).peak_above_bytes <= min(peaks)


@SOME
@given(st.data(), st.booleans())
def test_the_problems_peak_is_the_timelines(data: st.DataObject, inplace: bool) -> None:
    graph = data.draw(graphs())
    facts = data.draw(facts_of(graph))
    problem = order_problem(graph, facts, inplace)
    tasks = problem.tasks(data.draw(orders(graph)))
    schedule = problem.schedule(tasks)
    assert check_order(graph, schedule.order) == []
    assert problem.peak_bytes(tasks) == timeline(graph, schedule.order, facts, inplace).peak_above_bytes
    if not inplace:
        assert problem.peak_bytes(tasks) == judged_peak_bytes(graph, schedule.order, facts)


@SOME
@given(st.data())
def test_rescheduling_is_accepted_whatever_the_old_order_was(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    facts = data.draw(facts_of(graph))
    old = data.draw(st.lists(st.sampled_from([*graph.node, -1]), unique=True))
    changed = data.draw(st.lists(st.sampled_from(list(graph.node)), unique=True, max_size=3))
    for how in (Incremental(), Incremental("narrow-waist")):
        schedule = reschedule(graph, facts, Schedule(tuple(old)), changed, how=how)
        assert check_order(graph, schedule.order) == []


@SOME
@given(order_tables(max_tasks=7))
def test_exact_search_equals_brute_force(tables: Tables) -> None:
    best = best_peak_of_all(tables)
    exact = exact_order(tables)
    assert is_valid(tables, exact.order)
    assert exact.peak_bytes == exact.lower_bound_bytes == best
    for switches in ((False, False), (True, False), (True, True)):
        status, level, order = search(tables, 0, 1 << 60, 20_000, *switches)
        assert (status, level, peak_bytes(tables, order)) == (FOUND, best, best)


@FEW
@given(order_tables(max_tasks=14))
def test_heuristics_are_valid_and_never_under_the_exact_peak(tables: Tables) -> None:
    exact = exact_order(tables)
    assert exact.proven
    orders_found = [forward(tables, rule) for rule in FORWARD.values()]
    orders_found += [backward(tables, rule) for rule in BACKWARD.values()]
    orders_found += [depth_first(tables, rule) for rule in DEPTH.values()]
    orders_found.append(best_order(tables)[0])
    for order in orders_found:
        assert is_valid(tables, order)
        assert peak_bytes(tables, order) >= exact.peak_bytes


@SOME
@given(st.data())
def test_kept_answers_of_the_front_equal_fresh_ones(data: st.DataObject) -> None:
    tables = data.draw(order_tables(max_tasks=12))
    f, waiting = front(tables)
    while waiting:
        refresh(tables, f, waiting, CHAIN)
        fresh = Front(f.task.copy(), f.left.copy())
        fresh.task[STALE] = 1
        refresh(tables, fresh, waiting, CHAIN)
        ready = f.task[READY, :waiting]
        for row in (END, HILL, LENGTH):
            assert f.task[row, ready].tolist() == fresh.task[row, ready].tolist()
        assert (f.task[WAITS] == fresh.task[WAITS]).all()
        assert (f.left == fresh.left).all()
        waiting = run(tables, f, data.draw(st.integers(0, waiting - 1)), waiting)


@SOME
@given(st.data())
def test_kept_answers_of_the_back_equal_fresh_ones(data: st.DataObject) -> None:
    tables = data.draw(order_tables(max_tasks=12))
    b, waiting = back(tables)
    while waiting:
        refresh_back(tables, b, waiting)
        fresh = Front(b.task.copy(), b.left.copy())
        fresh.task[STALE] = 1
        refresh_back(tables, fresh, waiting)
        ready = b.task[READY, :waiting]
        for row in (END, HILL):
            assert b.task[row, ready].tolist() == fresh.task[row, ready].tolist()
        waiting = run_back(tables, b, data.draw(st.integers(0, waiting - 1)), waiting)


@SOME
@given(st.data())
def test_polishing_never_raises_the_peak(data: st.DataObject) -> None:
    tables = data.draw(order_tables(max_tasks=12))
    order = data.draw(orders_of(tables))
    peak = peak_bytes(tables, order)
    until = data.draw(st.integers(0, 14))
    for level in (peak, 2 * peak + 1):
        for polished in (
            advance(tables, order, level),
            delay(tables, order, level),
            advance(tables, order, level, until),
            delay(tables, order, level, until),
        ):
            assert is_valid(tables, polished)
            assert peak_bytes(tables, polished) <= level
    polished, found = polish(tables, order, 4)
    assert is_valid(tables, polished)
    assert peak_bytes(tables, polished) == found <= peak


@SOME
@given(st.data())
def test_a_window_sees_the_live_bytes_of_the_whole(data: st.DataObject) -> None:
    tables = data.draw(order_tables(max_tasks=10))
    order = data.draw(orders_of(tables))
    start = data.draw(st.integers(0, order.size))
    stop = data.draw(st.integers(start, order.size))
    during, before = usage_curve(tables, order)
    local = window(tables, order, start, stop, before[start])
    local_during, local_before = usage_curve(local, np.arange(stop - start))
    assert local_during.tolist() == during[start:stop].tolist()
    assert local_before.tolist() == before[start : stop + 1].tolist()
    inner = data.draw(orders_of(local))
    moved = order.copy()
    moved[start:stop] = order[start + inner]
    assert is_valid(tables, moved)
    assert usage_curve(local, inner)[0].tolist() == usage_curve(tables, moved)[0][start:stop].tolist()


@SOME
@given(order_tables(max_tasks=9))
def test_relations_and_bounds_against_all_prefixes(tables: Tables) -> None:
    relation = relate(tables, np.arange(task_count(tables)))
    waits = befores(tables)
    ancestors: list[set[int]] = []
    for task in range(task_count(tables)):
        ancestors.append(waits[task].union(*(ancestors[other] for other in waits[task])))
    count = task_count(tables)
    for task, waist in enumerate(narrow_waist(relation)):
        comparable = len(ancestors[task]) + sum(task in row for row in ancestors)
        assert waist == count - 1 - comparable
    prefixes = {frozenset[int]()}
    by_size = {0: 1}
    for size in range(1, count + 1):
        prefixes = {p | {v} for p in prefixes for v in range(count) if v not in p and waits[v] <= p}
        by_size[size] = len(prefixes)
    # The kernel finds cuts next to a narrow waist of 0: every one of them is real.
    assert all(by_size[step] == 1 for step in cuts(relation).tolist())
    assert floor_bytes(tables, relation) <= best_peak_of_all(tables)


@SOME
@given(st.data())
def test_merge_keeps_an_order_that_is_still_valid(data: st.DataObject) -> None:
    tables = data.draw(order_tables(max_tasks=10))
    order = data.draw(orders_of(tables))
    assert merge(tables, order).tolist() == order.tolist()
    missing = data.draw(st.sets(st.sampled_from(range(task_count(tables))), max_size=3))
    old = np.array([task for task in order.tolist() if task not in missing], np.int64)
    merged = merge(tables, old)
    assert is_valid(tables, merged)
    assert [task for task in merged.tolist() if task not in missing] == old.tolist()


@pytest.mark.parametrize("variant", ["peak", "narrow-waist"])
def test_reordering_after_merge_never_raises_the_peak(variant: str) -> None:
    @FEW
    @given(st.data())
    def check(data: st.DataObject) -> None:
        tables = data.draw(order_tables(max_tasks=12))
        order = data.draw(orders_of(tables))
        how = Incremental("peak" if variant == "peak" else "narrow-waist", width=5, states=50)
        found = reorder(tables, order, [int(order[0])], how)
        assert is_valid(tables, found)
        if variant == "peak":
            assert peak_bytes(tables, found) <= peak_bytes(tables, order)

    check()
