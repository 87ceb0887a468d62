"""What fission refuses, and what it makes."""

from __future__ import annotations

import pytest
import torch

from lowtide.analysis.dims import SUM_OF_SUMS, axes, axis_at
from lowtide.ir import Fission, Graph, Merge, Node, Role, Slice
from lowtide.ir.text import parse_graph
from lowtide.ir.verify import verify
from lowtide.run.eager import run_graph
from lowtide.transforms.fission import (
    FissionCandidate,
    IllegalFission,
    apply,
    candidates,
    check_region,
    even_sizes,
)

CHAIN = """
input %0: f32[6,4]
input %1: f32[4,3] param
%2: f32[6,3] = aten.mm.default(%0, %1)
%3: f32[6,3] = aten.relu.default(%2)
%4: f32[3,6](1,3) @s3+0 = aten.t.default(%3)
%5: f32[6,3] = aten.exp.default(%3)
%6: f32[3] output = aten.sum.dim_IntList(%5, [0])
%7: f32[3,6] output = aten.add.Tensor(%4, %4)
return %6, %7
"""

DIAMOND = """
input %0: f32[6,4]
%1: f32[6,4] = aten.relu.default(%0)
%2: f32[6,4] = aten.{middle}
%3: f32[6,4] output = aten.add.Tensor(%1, %2)
return %3
"""

NORMALISED = """
input %0: f32[6,4]
input %1: f32[4] param
%2: f32[6,4], %3: f32[4], %4: f32[4] = aten._native_batch_norm_legit.no_stats(%0, %1, %1, True, 0.1, 0.0)
%5: f32[6,4] output = aten.relu.default(%2)
return %5
"""


def region(graph: Graph, size: int, *nodes: int) -> tuple[list[str], dict[int, int]]:
    """The faults of `nodes` cut along their axis of extent `size`, and the axes chosen."""
    chosen = {
        number: next(k for k, axis in enumerate(axes(graph, graph.node[number])) if axis.extent == size)
        for number in nodes
        if any(axis.extent == size for axis in axes(graph, graph.node[number]))
    }
    assignment = {number: axes(graph, graph.node[number])[k] for number, k in chosen.items()}
    return check_region(graph, nodes, assignment), chosen


def fission_of(graph: Graph) -> tuple[Node, Fission]:
    node = next(node for node in graph.nodes if isinstance(node.op, Fission))
    assert isinstance(node.op, Fission)
    return node, node.op


# -- refusals ------------------------------------------------------------------------------------------


def test_a_region_that_is_not_convex() -> None:
    graph = parse_graph(DIAMOND.format(middle="_softmax.default(%1, 0, False)"))
    faults, _ = region(graph, 6, 1, 3)
    assert faults == [
        "not convex: node 3 (aten.add.Tensor) waits for node 2 (aten._softmax.default), which is outside"
    ]


def test_a_node_without_that_loop() -> None:
    graph = parse_graph(DIAMOND.format(middle="_softmax.default(%1, 0, False)"))
    faults, _ = region(graph, 6, 1, 2, 3)
    assert faults == ["node 2 (aten._softmax.default) has no axis"]


def test_a_batch_norm_inside() -> None:
    graph = parse_graph(NORMALISED)
    assert region(graph, 6, 2, 5)[0] == ["node 2 (aten._native_batch_norm_legit.no_stats) has no axis"]
    assert region(graph, 4, 2, 5)[0] == []  # channels are independent


def test_a_draw_inside() -> None:
    graph = parse_graph(DIAMOND.format(middle="bernoulli.p(%1, 0.5)"))
    (fault,) = region(graph, 6, 1, 2, 3)[0]
    assert fault == "node 2 (aten.bernoulli.p) draws random numbers, which happens once and whole"


def test_a_sum_that_is_read_inside() -> None:
    graph = parse_graph(
        """
        input %0: f32[6,4]
        %1: f32[6,4] = aten.relu.default(%0)
        %2: f32[4] = aten.sum.dim_IntList(%1, [0])
        %3: f32[6,4] output = aten.add.Tensor(%1, %2)
        return %3
        """
    )
    assert region(graph, 6, 1, 2, 3)[0] == [
        "%2 is a sum over the parts of node 2 (aten.sum.dim_IntList), "
        "but node 3 (aten.add.Tensor) reads it inside"
    ]


SUMS = """
input %0: f32[6,4]
%1: f32[6,4] = aten.relu.default(%0)
%2: f32[4] = aten.sum.dim_IntList(%1, [0])
%3: f32[4] = aten.sum.dim_IntList(%0, [0])
%4: f32[4] output = aten.add.Tensor(%2, %{other})
return %4
"""


def test_two_sums_may_be_added_inside_but_no_whole_to_a_sum() -> None:
    graph = parse_graph(SUMS.format(other=3))
    found = next(each for each in candidates(graph, (3,)) if len(each.nodes) == 4)
    edited = apply(graph, found).graph
    assert [type(node.op) for node in edited.nodes] == [Fission]
    x = torch.randn(6, 4)
    torch.testing.assert_close(run_graph(edited, {0: x})[4], x.relu().sum(0) + x.sum(0))
    both = axis_at(graph, graph.node[4], SUM_OF_SUMS)
    rows = {number: axes(graph, graph.node[number])[0] for number in (1, 2)}
    assert check_region(graph, [1, 2, 4], {**rows, 4: both}) == [
        "node 4 (aten.add.Tensor) adds parts of a sum to %3, which is whole"
    ]


def test_a_value_that_is_cut_in_two_ways() -> None:
    graph = parse_graph(
        """
        input %0: f32[4,4]
        %1: f32[4,4] = aten.relu.default(%0)
        %2: f32[4,4](1,4) @s1+0 = aten.t.default(%1)
        %3: f32[4,4] output = aten.exp.default(%2)
        return %3
        """
    )
    chosen = {1: 0, 2: 0, 3: 0}
    assignment = {number: axes(graph, graph.node[number])[k] for number, k in chosen.items()}
    (fault,) = check_region(graph, [1, 2, 3], assignment)
    assert (
        fault
        == "%2 is cut along dimension 1 by node 2 (aten.t.default), along 0 by node 3 (aten.exp.default)"
    )


def test_a_write_inside_and_an_axis_of_another_node() -> None:
    graph = parse_graph(
        """
        input %0: f32[6,4] param
        %1: f32[6,4] = aten.relu.default(%0)
        n9: aten.copy_.default(%0!, %1)
        %3: f32[6,4] output = aten.exp.default(%1)
        return %3
        """
    )
    assert "node 9 (aten.copy_.default) writes in place" in region(graph, 6, 1, 9, 3)[0]
    product = parse_graph(CHAIN)
    wrong = axes(product, product.node[2])[1]
    faults = check_region(product, [3], {3: wrong})
    assert faults == ["node 3 (aten.relu.default) cannot be cut along the axis given"]


def test_apply_raises_with_every_reason() -> None:
    graph = parse_graph(DIAMOND.format(middle="_softmax.default(%1, 0, False)"))
    with pytest.raises(IllegalFission, match="not convex") as caught:
        apply(graph, FissionCandidate({1: 0, 3: 0}, (3, 3)))
    assert len(caught.value.reasons) == 1
    with pytest.raises(IllegalFission, match=r"parts \(3, 2\) do not sum to 6 units"):
        apply(graph, FissionCandidate({1: 0}, (3, 2)))


# -- what is made --------------------------------------------------------------------------------------


def test_the_parts_are_slices_sums_and_replayed_views() -> None:
    graph = parse_graph(CHAIN)
    faults, chosen = region(graph, 6, 2, 3, 4, 5, 6)
    assert faults == []
    edit = apply(graph, FissionCandidate(chosen, (4, 2)))
    verify(edit.graph)
    node, op = fission_of(edit.graph)
    assert (node.inputs, node.outputs) == ((0, 1), (3, 6))
    assert op.merges == (Merge.WRITE, Merge.ADD)
    assert [part.body for part in op.parts] == [0, 1]
    assert op.parts[1].inputs == (Slice(0, 4, 6), Slice(None))
    assert op.parts[1].outputs == (Slice(0, 4, 6), Slice(None))
    assert [each.id for each in edit.graph.nodes] == [8, 4, 7]  # the view is made again, on the whole
    assert all(4 not in body.node for body in op.bodies)
    assert edit.resolve(2) is None
    assert edit.resolve(3) == 3
    inputs = {0: torch.randn(6, 4), 1: torch.randn(4, 3)}
    for value, tensor in run_graph(edit.graph, inputs).items():
        torch.testing.assert_close(tensor, run_graph(graph, inputs)[value])


def test_a_body_owns_nothing_but_its_inside() -> None:
    graph = parse_graph(CHAIN)
    _, op = fission_of(apply(graph, FissionCandidate(region(graph, 6, 2, 3, 5, 6)[1], (3, 3))).graph)
    (body,) = op.bodies
    assert [body.storage_of(value).role for value in body.inputs] == [Role.INPUT, Role.PARAM]
    assert {body.storage_of(value).role for value in body.outputs} == {Role.OUTPUT}
    assert [body.values[value].meta.shape for value in body.inputs] == [(3, 4), (4, 3)]


def test_a_value_read_cut_and_whole_is_bound_twice() -> None:
    graph = parse_graph(
        """
        input %0: f32[6,6]
        %1: f32[6,6] = aten.relu.default(%0)
        %2: f32[6,6] output = aten.mm.default(%1, %0)
        return %2
        """
    )
    rows = {1: 0, 2: 0}
    edited = apply(graph, FissionCandidate(rows, (3, 3))).graph
    verify(edited)
    node, op = fission_of(edited)
    assert node.inputs == (0, 0)
    assert op.parts[0].inputs == (Slice(0, 0, 3), Slice(None))
    x = torch.randn(6, 6)
    torch.testing.assert_close(run_graph(edited, {0: x})[2], x.relu() @ x)


def test_the_order_of_draws_survives() -> None:
    text = """
    input %0: f32[6,8]
    %1: f32[6,8] = aten.relu.default(%0)
    %2: f32[6,8] = aten.bernoulli.p(%1, 0.5)
    %3: f32[6,8] = aten.mul.Tensor(%1, %2)
    %4: f32[6,8] = aten.rand_like.default(%3)
    %5: f32[6,8] output = aten.mul.Tensor(%3, %4)
    return %5
    """
    graph = parse_graph(text)
    found = next(each for each in candidates(graph, (2,)) if len(each.nodes) >= 3)
    edited = apply(graph, found).graph
    verify(edited)
    x = torch.randn(6, 8)
    torch.manual_seed(1)
    whole = run_graph(graph, {0: x})[5]
    torch.manual_seed(1)
    assert torch.equal(run_graph(edited, {0: x})[5], whole)


def test_a_mask_crosses_the_border_as_bits() -> None:
    text = DIAMOND.format(middle="bernoulli.p(%1, 0.5)").replace("[6,4]", "[6,8]")
    graph = parse_graph(text)
    found = next(each for each in candidates(graph, (2,)) if len(each.nodes) >= 3)
    assert found.masks
    node, _ = fission_of(edited := apply(graph, found).graph)
    sizes = {edited.storage_of(value).nbytes for value in node.inputs if value != 0}
    assert max(sizes) <= 8 * 4  # packed flags, and the powers of two


def test_sizes_are_as_even_as_they_can_be() -> None:
    assert even_sizes(8, 3) == (3, 3, 2)
    assert even_sizes(8, 4) == (2, 2, 2, 2)


def test_candidates_never_exceed_the_extent_and_are_legal() -> None:
    graph = parse_graph(CHAIN)
    found = list(candidates(graph, (2, 4, 64)))
    assert {len(each.sizes) for each in found} == {2, 4}
    for each in found:
        verify(apply(graph, each).graph)
