"""Keys tell apart what differs, and only that."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

from lowtide.analysis.key import canonical_order, graph_key, node_key
from lowtide.ir import Graph
from lowtide.ir.text import parse_graph


def remat(assignment: tuple[int, ...], copies: int) -> Graph:
    """`copies` relus of one input; reader k takes the copy that `assignment` names."""
    lines = ["input %0: f32[8]"]
    lines += [f"%{10 + c}: f32[8] = aten.relu.default(%0)" for c in range(copies)]
    lines += [
        f"%{20 + k}: f32[8] output = aten.mul.Tensor(%{10 + c}, {k}.5)" for k, c in enumerate(assignment)
    ]
    lines.append("return " + ", ".join(f"%{20 + k}" for k in range(len(assignment))))
    return parse_graph("\n".join(lines))


def test_all_ways_to_share_out_a_recomputed_value_differ() -> None:
    ways = {(0, 0, 0): 1, (0, 0, 1): 2, (0, 1, 0): 2, (1, 0, 0): 2, (0, 1, 2): 3}
    keys = {graph_key(remat(way, copies)) for way, copies in ways.items()}
    assert len(keys) == len(ways)


def test_exchanging_the_copies_changes_nothing() -> None:
    assert graph_key(remat((0, 0, 1), 2)) == graph_key(remat((1, 1, 0), 2))
    assert graph_key(remat((0, 1, 2), 3)) == graph_key(remat((2, 0, 1), 3))


def test_equal_readers_of_equal_copies_are_told_apart_by_what_follows() -> None:
    text = """
    input %0: f32[8]
    %1: f32[8] = aten.relu.default(%0)
    %2: f32[8] = aten.relu.default(%0)
    %3: f32[8] = aten.exp.default(%1)
    %4: f32[8] = aten.exp.default(%2)
    %5: f32[8] = aten.sin.default(%{})
    %6: f32[8] = aten.sin.default(%{})
    %7: f32[8] = aten.add.Tensor(%3, %5)
    %8: f32[8] = aten.add.Tensor(%4, %6)
    %9: f32[8] output = aten.sub.Tensor(%7, %8)
    return %9
    """
    assert graph_key(parse_graph(text.format(1, 2))) != graph_key(parse_graph(text.format(2, 1)))


BASE = """
input %0: f32[8,4]
input %1: f32[4] buffer
input %6: f32[8,4] param
%2: f32[8,4] = aten.sub.Tensor(%0, %6)
%3: f32[8,4] = fission(%2) merge [write] {
  body {
    input %0: f32[4,4] temp
    %1: f32[4,4] = aten.relu.default(%0)
    return %1
  }
  part 0 [0:0:4] -> [0:0:4]
  part 0 [0:4:8] -> [0:4:8]
}
%4: f32[4] = aten.sum.default(%3, [0])
n5: aten.copy_.default(%1!, %4)
%7: f32[8,4] = fused "kernel"(%3) {
  input %0: f32[8,4] temp
  %1: f32[8,4] = aten.exp.default(%0)
  return %1
}
%8: f32[8,4] output = aten.bernoulli.p(%7, 0.5)
%9: f32[8,4] output = aten.bernoulli.p(%7, 0.5)
return %8, %9
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(%0, %6)", "(%6, %0)"),
        ("0.5", "0.25"),
        ("part 0 [0:0:4] -> [0:0:4]\n", "part 0 [0:0:4] -> [0:4:8]\n"),
        ("merge [write]", "merge [add]"),
        ("aten.relu.default(%0)", "aten.neg.default(%0)"),
        ("aten.exp.default(%0)", "aten.neg.default(%0)"),
        ('"kernel"', '"update"'),
        ("%2: f32[8,4] =", "%2: f32[8,4] 256B ="),
        ("%2: f32[8,4] =", "%2: f32[8,4](1,8) ="),
        ("input %1: f32[4] buffer", "input %1: f32[4] state"),
        ("return %8, %9", "return %8"),
        ("return %8, %9", "return %9, %8"),
    ],
)
def test_what_differs_has_another_key(old: str, new: str) -> None:
    assert old in BASE
    assert graph_key(parse_graph(BASE.replace(old, new))) != graph_key(parse_graph(BASE))


def test_the_order_of_random_draws_is_content() -> None:
    one, other = (
        "%8: f32[8,4] output = aten.bernoulli.p(%7, 0.5)\n",
        "%9: f32[8,4] output = aten.bernoulli.p(%7, 0.5)\n",
    )
    assert graph_key(parse_graph(BASE.replace(one + other, other + one))) != graph_key(parse_graph(BASE))


def test_a_read_before_a_write_is_not_a_read_after_it() -> None:
    text = "input %0: f32[4] buffer\ninput %1: f32[4]\n{}\nreturn %2"
    read, write = "%2: f32[4] output = aten.relu.default(%0)", "n9: aten.copy_.default(%0!, %1)"
    before, after = (parse_graph(text.format("\n".join(lines))) for lines in ((read, write), (write, read)))
    assert graph_key(before) != graph_key(after)


def test_writes_are_placed_by_what_they_write() -> None:
    text = "input %0: f32[4] buffer\ninput %1: f32[4] buffer\ninput %2: f32[4]\n{}\nreturn"
    one, other = "n8: aten.copy_.default(%0!, %2)", "n9: aten.copy_.default(%1!, %2)"
    first, second = (parse_graph(text.format("\n".join(lines))) for lines in ((one, other), (other, one)))
    assert graph_key(first) == graph_key(second)


def test_canonical_order_follows_the_results() -> None:
    assert canonical_order(remat((1, 0), 2)) == (11, 20, 10, 21)


def test_canonical_order_takes_inputs_in_order() -> None:
    graph = parse_graph("""
    input %0: f32[8]
    %1: f32[8] = aten.relu.default(%0)
    %2: f32[8] = aten.relu.default(%0)
    %3: f32[8] output = aten.sub.Tensor(%2, %1)
    return %3
    """)
    assert canonical_order(graph) == (2, 1, 3)


def test_node_key_sees_the_call_and_nothing_else() -> None:
    graph = parse_graph("""
    input %0: f32[8,4]
    input %1: f32[8,4]
    input %2: f32[8,4](1,8)
    %3: f32[8,4] = aten.add.Tensor(%0, %1)  # a b.py:1
    %4: f32[8,4] = aten.add.Tensor(%1, %3)
    %5: f32[8,4] = aten.add.Tensor(%1, %1)
    %6: f32[8,4] = aten.add.Tensor(%0, %1, alpha=2)
    %7: f32[8,4] = aten.add.Tensor(%0, %2)
    %8: f32[8,4] = aten.sub.Tensor(%0, %1)
    return
    """)
    key = {node.id: node_key(graph, node) for node in graph.nodes}
    assert key[3] == key[4]
    for one, other in combinations((3, 5, 6, 7, 8), 2):
        assert key[one] != key[other]


def test_keys_are_the_same_in_every_process() -> None:
    code = "from tests.unit.analysis.test_key import BASE\nfrom lowtide.ir.text import parse_graph\n"
    code += "from lowtide.analysis.key import graph_key\nprint(graph_key(parse_graph(BASE)))"
    path = {"PYTHONPATH": ":".join(["src", "."]), "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == graph_key(parse_graph(BASE))
