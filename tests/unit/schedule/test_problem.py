"""From graphs to order problems and back: views, writes, random nodes, workspace."""

from __future__ import annotations

import pytest

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph
from lowtide.ir.text import parse_graph
from lowtide.schedule import Schedule, best_schedule, check_order, order_problem
from lowtide.schedule.tables import BEFORE, KEPT, WORKSPACE


def before(graph: Graph) -> dict[int, set[int]]:
    """Node id -> ids of the tasks that must run earlier."""
    problem = order_problem(graph, assumed_facts(graph))
    tables, ids = problem.tables, problem.node_ids
    rows = zip(tables.task[BEFORE, :-1], tables.task[BEFORE, 1:], strict=True)
    return {node: {ids[t] for t in tables.entries[a:b]} for node, (a, b) in zip(ids, rows, strict=True)}


VIEWED = parse_graph("""
input %0: f32[4,4]
%1: f32[4,4] = aten.relu.default(%0)
%2: f32[4,4](1,4) @s1 = aten.t.default(%1)
%3: f32[16] @s1 = aten.view.default(%2, [16])
%4: f32[4,4] = aten.mm.default(%0, %0)
%5: f32[16] = aten.exp.default(%3)
%6: f32[4,4] output = aten.mm.default(%1, %4)
return %6
""")


def test_views_are_no_tasks_and_edges_go_through_them() -> None:
    assert before(VIEWED) == {1: set(), 4: set(), 5: {1}, 6: {1, 4}}


def test_views_come_directly_before_the_first_node_that_needs_them() -> None:
    problem = order_problem(VIEWED, assumed_facts(VIEWED))
    schedule = problem.schedule(problem.tasks([4, 1, 6, 5]))
    assert schedule.order == (4, 1, 6, 2, 3, 5)
    assert check_order(VIEWED, schedule.order) == []


def test_a_storage_lives_until_its_last_reader_through_a_view() -> None:
    problem = order_problem(VIEWED, assumed_facts(VIEWED))
    early, late = problem.tasks([1, 5, 4, 6]), problem.tasks([1, 4, 6, 5])
    assert (problem.peak_bytes(early), problem.peak_bytes(late)) == (192, 192)
    assert problem.peak_bytes(problem.tasks([1, 4, 5, 6])) == 192


def test_views_that_no_task_needs_stand_behind_what_they_view() -> None:
    graph = parse_graph("""
    input %0: f32[4,4]
    %1: f32[4,4](1,4) @s0 = aten.t.default(%0)
    %2: f32[4,4] output = aten.relu.default(%0)
    %3: f32[4,4](1,4) @s2 = aten.t.default(%2)
    %4: f32[16] @s2 = aten.view.default(%3, [16])
    %5: f32[4,4] = aten.exp.default(%0)
    return %4
    """)
    problem = order_problem(graph, assumed_facts(graph))
    assert problem.schedule(problem.tasks([5, 2])).order == (1, 5, 2, 3, 4)


UPDATED = parse_graph("""
input %0: f32[4]
input %1: f32[4] param
%2: f32[4] = aten.mul.Tensor(%0, %1)
%3: f32[4] = aten.exp.default(%0)
n10: aten.add_.Tensor(%1!, %3)
%4: f32[4] output = aten.add.Tensor(%2, %1)
return %4
""")


def test_a_write_waits_for_earlier_readers_and_later_readers_wait_for_it() -> None:
    assert before(UPDATED) == {2: set(), 3: set(), 10: {2, 3}, 4: {2, 10}}


def test_random_nodes_keep_their_order() -> None:
    graph = parse_graph("""
    input %0: f32[4]
    %1: f32[4] output = aten.bernoulli.p(%0, 0.5)
    %2: f32[4] output = aten.exp.default(%0)
    %3: f32[4] output = aten.rand_like.default(%0)
    return %1, %2, %3
    """)
    assert before(graph) == {1: set(), 2: set(), 3: {1}}
    assert check_order(graph, (3, 1, 2)) == ["random nodes 1 and 3 changed their order"]


def test_results_are_kept_and_workspace_is_what_exceeds_the_outputs() -> None:
    facts = assumed_facts(VIEWED) | {4: OperatorFacts((128,), 300)}
    problem = order_problem(VIEWED, facts)
    assert problem.storage_ids == (1, 4, 5, 6)
    assert problem.tables.storage[KEPT, :4].tolist() == [0, 0, 0, 1]
    assert problem.tables.task[WORKSPACE, :4].tolist() == [0, 172, 0, 0]
    assert problem.peak_bytes(problem.tasks([4, 1, 5, 6])) == 300


def test_missing_facts_are_named() -> None:
    with pytest.raises(KeyError, match="no facts for node 4, which allocates: probe it first"):
        order_problem(VIEWED, {n: f for n, f in assumed_facts(VIEWED).items() if n != 4})


def test_reuse_of_a_dying_input_is_counted_only_when_asked_for() -> None:
    graph = parse_graph("""
    input %0: f32[4,4]
    %1: f32[4,4] = aten.mm.default(%0, %0)
    %2: f32[4,4] = aten.relu.default(%1)
    %3: f32[4,4] output = aten.mm.default(%2, %2)
    return %3
    """)
    for inplace, peak in ((False, 128), (True, 128)):
        problem = order_problem(graph, assumed_facts(graph), inplace)
        assert problem.peak_bytes([0, 1, 2]) == peak
    reuse = order_problem(graph, assumed_facts(graph), True)
    assert reuse.peak_bytes([0, 1]) == 64


def test_a_dead_branch_that_could_wait_runs_when_least_is_alive() -> None:
    graph = parse_graph("""
    input %0: f32[8,8]
    %1: f32[8,8] = aten.mm.default(%0, %0)
    %2: f32[8,8] = aten.mm.default(%0, %0)
    %3: f32[] = aten.sum.default(%1)
    %4: f32[] = aten.sum.default(%2)
    %5: f32[] output = aten.add.Tensor(%3, %4)
    return %5
    """)
    facts = assumed_facts(graph)
    best = best_schedule(graph, facts)
    assert timeline(graph, [1, 2, 3, 4, 5], facts).peak_above_bytes == 516
    assert timeline(graph, best.order, facts).peak_above_bytes == 264
    assert isinstance(best, Schedule)


def test_an_empty_graph_has_an_empty_schedule() -> None:
    graph = parse_graph("input %0: f32[4]\nreturn %0")
    assert best_schedule(graph, {}).order == ()
    assert best_schedule(graph, {}, seconds=0.1).order == ()


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ((2, 3, 10), "node 4 never runs"),
        ((2, 3, 10, 4, 2), "node 2 runs 2 times"),
        ((2, 3, 10, 4, 7), "node 7 is not in the graph"),
        ((2, 10, 3, 4), "node 10 reads value 3 before node 3 makes it"),
        ((3, 10, 2, 4), "nodes 2 and 10 changed sides, one of them writes storage 1"),
        ((2, 3, 4, 10), "nodes 10 and 4 changed sides, one of them writes storage 1"),
    ],
)
def test_the_judge_names_what_is_wrong(order: tuple[int, ...], complaint: str) -> None:
    assert complaint in check_order(UPDATED, order)
    assert check_order(UPDATED, (3, 2, 10, 4)) == []
