"""How parts deliver their outputs, and what a body then holds itself."""

from __future__ import annotations

import pytest

from lowtide.analysis.facts import assumed_facts, workspace_bytes
from lowtide.analysis.parts import body_as_run, deliveries, terms_of
from lowtide.ir import Fission, Graph, Node, Role
from lowtide.ir.text import parse_graph

SPLIT = """
input %0: f32[4,6]
input %1: f32[6,4] param
%2: f32[6,4]{strides}, %3: f32[6,6], %4: f32[6] = fission(%0, %1) merge [write, add, add] {{
  body {{
    input %0: f32[2,6]
    input %1: f32[6,4]
    %2: f32[6,2]{inner} output = aten.{maker}
    %3: f32[6,2](1,6) @s0+0 = aten.t.default(%0)
    %4: f32[6,6] output = aten.mm.default(%3, %0)
    %5: f32[6] output = aten.sum.dim_IntList(%0, [0])
    return %2, %4, %5
  }}
  part 0 [0:0:2, *] -> [1:0:2, *, *]
  part 0 [0:2:4, *] -> [1:2:4, *, *]
}}
return %2
"""


def split(strides: str, inner: str, maker: str) -> tuple[Graph, Node, Fission]:
    text = SPLIT.format(strides=strides, inner=inner, maker=maker).replace("%2: f32[6,4]", "%2: f32[6,4]", 1)
    graph = parse_graph(text.replace("return %2\n", "return %2\n", 1))
    node = graph.nodes[0]
    assert isinstance(node.op, Fission)
    return graph, node, node.op


def test_a_slice_that_is_one_block_is_written_in_place() -> None:
    graph, node, op = split("(1,6) output", "(1,6)", "permute_copy.default(%0, [1, 0])")
    assert deliveries(graph, node) == ("direct", "accumulate", "add")
    run = body_as_run(op.bodies[0], deliveries(graph, node))
    assert run.outputs == (2, 4)
    assert run.storage_of(5).role is Role.TEMP
    assert run.storage_of(2).role is Role.OUTPUT


def test_a_slice_with_other_strides_is_copied() -> None:
    graph, node, op = split(" output", "", "permute_copy.default(%0, [1, 0])")
    assert deliveries(graph, node) == ("copy", "accumulate", "add")
    assert body_as_run(op.bodies[0], deliveries(graph, node)).outputs == (4,)


@pytest.mark.parametrize(("strides", "inner", "held"), [("(1,6) output", "(1,6)", 24), (" output", "", 48)])
def test_a_body_holds_what_does_not_lie_in_the_whole(strides: str, inner: str, held: int) -> None:
    graph, node, _ = split(strides, inner, "permute_copy.default(%0, [1, 0])")
    assert workspace_bytes(graph, node, assumed_facts(graph)) == held


TIED = """
input %0: f32[4,6]
input %1: i64[4]
%2: f32[6,6] = fission(%0, %1) merge [add] {
  body {
    input %0: f32[2,6]
    input %1: i64[2]
    %2: f32[6,2](1,6) @s0+0 = aten.t.default(%0)
    %3: f32[6,6] = aten.mm.default(%2, %0)
    %4: f32[6,6] = aten.embedding_dense_backward.default(%0, %1, 6, -1, False)
    %5: f32[6,6] output = aten.add.Tensor(%4, %3)
    return %5
  }
  part 0 [0:0:2, 0:0:2] -> [*]
  part 0 [0:2:4, 0:2:4] -> [*]
}
return %2
"""


def test_the_terms_of_a_sum_are_delivered_one_by_one() -> None:
    graph = parse_graph(TIED.replace("%2: f32[6,6] = fission", "%2: f32[6,6] output = fission"))
    node = graph.nodes[0]
    assert isinstance(node.op, Fission)
    (body,) = node.op.bodies
    assert deliveries(graph, node) == ("terms",)
    assert terms_of(body, 5) == (4, 3)
    run = body_as_run(body, ("terms",))
    assert [each.id for each in run.nodes] == [2, 3, 4]
    assert run.outputs == (3,)  # the product accumulates, the other term is a temporary
    assert workspace_bytes(graph, node, assumed_facts(graph)) == 36 * 4


def test_a_term_that_is_read_elsewhere_is_no_term() -> None:
    text = TIED.replace("return %5", "%6: f32[6,6] output = aten.relu.default(%4)\n    return %5, %6")
    text = text.replace("%2: f32[6,6] = fission(%0, %1) merge [add]", TWO).replace("-> [*]", "-> [*, *]")
    graph = parse_graph(text)
    assert deliveries(graph, graph.nodes[0]) == ("add", "add")


TWO = "%2: f32[6,6] output, %3: f32[6,6] = fission(%0, %1) merge [add, add]"
