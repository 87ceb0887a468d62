"""Buffers of small graphs, step by step."""

from __future__ import annotations

import time

import pytest

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.analysis.inplace import donors
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir import Graph
from lowtide.ir.text import parse_graph


def buffers_of(graph: Graph, inplace: bool = False, order: tuple[int, ...] | None = None) -> list[Buffer]:
    order = order or tuple(node.id for node in graph.nodes)
    return list(lifetimes(graph, order, assumed_facts(graph), inplace))


def spans(buffers: list[Buffer]) -> dict[tuple[int, ...], tuple[int, int]]:
    return {buffer.storages: (buffer.start, buffer.stop) for buffer in buffers}


VIEWED = parse_graph("""
input %0: f32[4,4]
%1: f32[4,4] = aten.relu.default(%0)
%2: f32[4,4](1,4) @s1 = aten.t.default(%1)
%3: f32[4,4] = aten.mm.default(%0, %0)
%4: f32[4,4] output = aten.mm.default(%2, %3)
%5: f32[4] = aten.sum.default(%0)
return %4
""")


def test_a_storage_lives_until_the_last_reader_through_any_view() -> None:
    assert spans(buffers_of(VIEWED)) == {(1,): (0, 4), (3,): (2, 4), (4,): (3, 5), (5,): (4, 5)}


def test_results_are_outputs_and_live_to_the_end() -> None:
    assert [buffer.kind for buffer in buffers_of(VIEWED)] == ["value", "value", "output", "value"]


def test_another_order_gives_other_lifetimes() -> None:
    assert spans(buffers_of(VIEWED, order=(5, 3, 1, 2, 4))) == {
        (5,): (0, 1),
        (3,): (1, 5),
        (1,): (2, 5),
        (4,): (4, 5),
    }


def test_the_caller_owns_resident_storages_and_numbers() -> None:
    graph = parse_graph("""
    input %0: f32[4] param
    input %1: host/f64[] host
    %2: f32[4] = aten.mul.Tensor(%0, %1)
    n3: aten.add_.Tensor(%0!, %2)
    return %0
    """)
    assert spans(buffers_of(graph)) == {(2,): (0, 2)}


def test_a_swapped_copy_has_no_buffer() -> None:
    graph = parse_graph("""
    input %0: f32[4]
    %1: f32[4] = aten.relu.default(%0)
    %2: f32[4] = store("disk", %1)
    %3: f32[4] = load("disk", %2)
    %4: f32[4] output = aten.relu.default(%3)
    return %4
    """)
    assert spans(buffers_of(graph)) == {(1,): (0, 2), (3,): (2, 4), (4,): (3, 4)}


def test_workspace_lives_for_its_step() -> None:
    facts = {**assumed_facts(VIEWED), 3: OperatorFacts((64,), 100)}
    found = lifetimes(VIEWED, (1, 2, 3, 4, 5), facts)
    assert [b for b in found if b.kind == "workspace"] == [Buffer(2, (), 36, 2, 3, "workspace")]


def test_true_bytes_win_over_the_graph() -> None:
    facts = {**assumed_facts(VIEWED), 5: OperatorFacts((4096,), 4096)}
    assert lifetimes(VIEWED, (1, 2, 3, 4, 5), facts)[-1].nbytes == 4096


CHAIN = """
input %0: f32[4,4]
%1: f32[4,4] = aten.mm.default(%0, %0)
%2: f32[4,4] = aten.relu.default(%1)
%3: f32[4,4] = aten.mul.Tensor(%2, %0)
%4: f32[4,4] = aten.mm.default(%3, %3)
%5: f32[4,4] output = aten.exp.default(%4)
return %5
"""


def test_a_pointwise_result_joins_its_dying_input() -> None:
    found = buffers_of(parse_graph(CHAIN), inplace=True)
    assert [(b.storages, b.start, b.stop, b.nbytes) for b in found] == [
        ((1, 2, 3), 0, 4, 64),
        ((4, 5), 3, 5, 64),  # what becomes a result lies where the caller gets it
    ]
    assert [b.kind for b in found] == ["value", "output"]


def test_nothing_is_written_over_a_result() -> None:
    graph = parse_graph("""
    input %0: f32[4]
    %1: f32[4] output = aten.relu.default(%0)
    %2: f32[4] output = aten.neg.default(%1)
    return %1, %2
    """)
    assert donors(graph) == {}
    assert spans(buffers_of(graph, inplace=True)) == {(1,): (0, 2), (2,): (1, 2)}


@pytest.mark.parametrize(
    ("why", "old", "new"),
    [
        (
            "the input is read again",
            "%5: f32[4,4] output = aten.exp.default(%4)",
            "%5: f32[4,4] output = aten.mm.default(%4, %1)",
        ),
        (
            "no pointwise operator",
            "%2: f32[4,4] = aten.relu.default(%1)",
            "%2: f32[4,4] = aten.cumsum.default(%1, 0)",
        ),
        (
            "another element type",
            "%2: f32[4,4] = aten.relu.default(%1)",
            "%2: i32[4,4] = aten.relu.default(%1)",
        ),
        ("another shape", "%1: f32[4,4] =", "%1: f32[16] ="),
        ("other strides", "%1: f32[4,4] =", "%1: f32[4,4](1,4) ="),
        ("part of its storage", "%1: f32[4,4] =", "%1: f32[4,4] 128B ="),
        ("an offset", "%1: f32[4,4] =", "%1: f32[4,4] @s1+4 ="),
    ],
)
def test_no_reuse(why: str, old: str, new: str) -> None:
    assert old in CHAIN
    graph = parse_graph(CHAIN.replace(old, new))
    assert why == "the input is read again" or 2 not in donors(graph), why
    homes = [buffer.storages for buffer in buffers_of(graph, inplace=True)]
    assert (1,) in homes, why


def test_a_layout_that_addresses_a_byte_twice_is_not_reused() -> None:
    text = "input %0: f32[4]\n%1: {0} = aten.neg.default(%0)\n%2: {0} = aten.neg.default(%1)\nreturn"
    assert donors(parse_graph(text.format("f32[2,4]"))) == {2: (1,)}
    assert donors(parse_graph(text.format("f32[2,4](1,2)"))) == {2: (1,)}
    assert donors(parse_graph(text.format("f32[2,4](0,1)"))) == {}
    assert donors(parse_graph(text.format("f32[2,4](8,1)"))) == {}


def test_a_resident_input_is_never_overwritten() -> None:
    graph = parse_graph(
        "input %0: f32[4]\n%1: f32[4] = aten.relu.default(%0)\n%2: f32[] = aten.sum.default(%1)"
    )
    assert donors(graph) == {}


def test_what_a_body_takes_is_not_reused_and_what_it_gives_reuses() -> None:
    graph = parse_graph("""
    input %0: f32[4] temp
    %1: f32[4] = aten.relu.default(%0)
    %2: f32[4] = aten.neg.default(%1)
    %3: f32[4] = aten.exp.default(%2)
    %4: f32[4] = aten.sin.default(%2)
    return %3, %4
    """)
    assert donors(graph) == {2: (1,), 3: (2,), 4: (2,)}
    assert spans(buffers_of(graph, inplace=True)) == {(1, 2, 4): (0, 4), (3,): (2, 4)}


def test_an_input_that_is_also_read_through_another_window_is_kept() -> None:
    graph = parse_graph("""
    input %0: f32[4,4]
    %1: f32[4,4] = aten.relu.default(%0)
    %2: f32[4,4](1,4) @s1 = aten.t.default(%1)
    %3: f32[4,4] = aten.add.Tensor(%1, %2)
    %4: f32[] = aten.sum.default(%3)
    return
    """)
    assert donors(graph) == {}


def test_an_input_through_a_view_of_the_same_layout_is_reused() -> None:
    graph = parse_graph("""
    input %0: f32[4,4]
    %1: f32[4,4] = aten.relu.default(%0)
    %2: f32[16] @s1 = aten.view.default(%1, [16])
    %3: f32[16] = aten.exp.default(%2)
    %4: f32[] = aten.sum.default(%3)
    return
    """)
    assert spans(buffers_of(graph, inplace=True)) == {(1, 3): (0, 4), (4,): (3, 4)}


def test_the_first_of_two_dying_inputs_is_taken_and_the_other_freed() -> None:
    graph = parse_graph("""
    input %0: f32[4]
    %1: f32[4] = aten.mm.default(%0, %0)
    %2: f32[4] = aten.mm.default(%0, %0)
    %3: f32[4] = aten.sub.Tensor(%1, %2)
    %4: f32[] = aten.sum.default(%3)
    return
    """)
    assert spans(buffers_of(graph, inplace=True)) == {(1, 3): (0, 4), (2,): (1, 3), (4,): (3, 4)}


def test_masked_fill_takes_its_first_argument_only() -> None:
    graph = parse_graph("""
    input %0: bool[4]
    %1: bool[4] = aten.logical_not.default(%0)
    %2: bool[4] = aten.logical_not.default(%0)
    %3: bool[4] = aten.masked_fill.Scalar(%1, %2, True)
    %4: bool[] = aten.any.default(%3)
    return
    """)
    assert donors(graph)[3] == (1,)


def test_reuse_needs_equal_true_bytes() -> None:
    graph = parse_graph(CHAIN)
    facts = {**assumed_facts(graph), 1: OperatorFacts((256,), 256)}
    found = lifetimes(graph, (1, 2, 3, 4, 5), facts, inplace=True)
    assert [b.storages for b in found] == [(1,), (2, 3), (4, 5)]


@pytest.mark.parametrize("order", [(1, 2, 3, 4), (1, 2, 3, 4, 4), (1, 2, 3, 4, 6)])
def test_an_order_names_every_node_once(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="the graph has 5"):
        buffers_of(VIEWED, order=order)


def test_a_node_without_facts_is_an_error() -> None:
    with pytest.raises(KeyError, match="no facts for node 1"):
        lifetimes(VIEWED, (1, 2, 3, 4, 5), {})


def test_two_thousand_nodes_take_a_few_milliseconds() -> None:
    """5 ms on a quiet core; the bound leaves room for a busy one and still finds a quadratic step."""
    lines = ["input %0: f32[8,8]"]
    lines += [f"%{k}: f32[8,8] = aten.add.Tensor(%{k - 1}, %{max(0, k - 5)})" for k in range(1, 2001)]
    graph = parse_graph("\n".join(lines))
    facts, order = assumed_facts(graph), tuple(range(1, 2001))
    lifetimes(graph, order, facts, inplace=True)
    took = []
    for _ in range(7):
        start = time.thread_time()
        lifetimes(graph, order, facts, inplace=True)
        took.append(time.thread_time() - start)
    assert min(took) < 0.030
