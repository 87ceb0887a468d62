"""What operators are assumed to allocate when nothing was measured."""

from __future__ import annotations

import pytest

from lowtide.analysis.facts import OperatorFacts, assumed_facts, fresh_bytes, fresh_outputs, workspace_bytes
from lowtide.ir.text import parse_graph

GRAPH = parse_graph("""
input %0: f32[8,4]
input %1: f32[4,4] param
%2: f32[4,4](1,4) @s1 = aten.t.default(%1)
%3: f32[8,4] = aten.mm.default(%0, %2)
%4: f32[8,4], %5: i64[8,4] = aten.two.default(%3)
%6: f32[4], %7: f32[4] @s6 = aten.pair.default(%3)
%8: f32[] 128B = aten.mse_loss.default(%3, %4)
return
""")


def test_outputs_are_as_large_as_their_storages() -> None:
    facts = assumed_facts(GRAPH)
    assert facts[2] == OperatorFacts((0,), 0)
    assert facts[3] == OperatorFacts((128,), 128, assumed=True)
    assert facts[4] == OperatorFacts((128, 256), 384, assumed=True)
    assert facts[8].output_bytes == (128,)


def test_two_outputs_on_one_fresh_storage_are_counted_once() -> None:
    facts = assumed_facts(GRAPH)
    assert facts[6].output_bytes == (16, 0)
    assert fresh_outputs(GRAPH, GRAPH.node[6]) == {6: (0, 1)}
    assert fresh_bytes(GRAPH, GRAPH.node[6], {6: OperatorFacts((16, 16), 16)}) == {6: 16}


def test_workspace_is_what_the_outputs_do_not_explain() -> None:
    node = GRAPH.node[3]
    assert workspace_bytes(GRAPH, node, {3: OperatorFacts((128,), 200)}) == 72
    assert workspace_bytes(GRAPH, node, {3: OperatorFacts((128,), 100)}) == 0
    assert workspace_bytes(GRAPH, GRAPH.node[2], {}) == 0


def test_a_node_that_allocates_needs_facts() -> None:
    with pytest.raises(KeyError, match="no facts for node 3"):
        fresh_bytes(GRAPH, GRAPH.node[3], {})


def test_an_update_holds_the_temporaries_of_its_body() -> None:
    graph = parse_graph("""
    input %0: f32[8] param
    input %1: f32[8]
    input %9: f32[8] state
    n2: fused "update"(%0!, %1, %9!) {
      input %0: f32[8] param
      input %1: f32[8] temp
      input %2: f32[8] state
      aten.lerp_.Scalar(%2!, %1, 0.1)
      %3: f32[8] = aten.sqrt.default(%2)
      %4: f32[8] = aten.div.Scalar(%3, 2.0)
      aten.add_.Scalar(%4!, 1e-08)
      aten.addcdiv_.default(%0!, %2, %4)
      %5: f32[8] = aten.neg.default(%1)
      return
    }
    return
    """)
    assert assumed_facts(graph)[2] == OperatorFacts(
        (), 64, assumed=True
    )  # the root and the quotient; the input is not its own


def test_a_kernel_stores_no_intermediate() -> None:
    graph = parse_graph("""
    input %0: f32[8]
    %1: f32[8] output = fused "kernel"(%0) {
      input %0: f32[8] temp
      %1: f32[8] = aten.exp.default(%0)
      %2: f32[8] = aten.neg.default(%1)
      return %2
    }
    return %1
    """)
    assert assumed_facts(graph)[1].transient_bytes == 32


def test_a_fission_holds_one_part_beside_its_outputs() -> None:
    graph = parse_graph("""
    input %0: f32[8]
    %1: f32[8] output = fission(%0) merge [write] {
      body {
        input %0: f32[4] temp
        %1: f32[4] = aten.exp.default(%0)
        %2: f32[4] = aten.neg.default(%1)
        return %2
      }
      part 0 [0:0:4] -> [0:0:4]
      part 0 [0:4:8] -> [0:4:8]
    }
    return %1
    """)
    found = assumed_facts(graph)[1]
    assert found.output_bytes == (32,)
    half = 16  # the inner exponential; the part of the result may be written where it belongs
    assert 32 + half <= found.transient_bytes <= 32 + 2 * half


def test_a_copy_on_another_tier_takes_nothing_here() -> None:
    graph = parse_graph("""
    input %0: f32[8]
    %1: f32[8] = store("disk", %0)
    %2: f32[8] = load("disk", %1)
    return
    """)
    facts = assumed_facts(graph)
    assert facts[1] == OperatorFacts((0,), 0)
    assert facts[2].output_bytes == (32,)
