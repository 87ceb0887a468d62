"""Axis rules by example, and the graph-level dimensions that they make."""

from __future__ import annotations

import pytest
import torch

from lowtide.analysis.axis import at_part
from lowtide.analysis.axis_rules import dense_inputs
from lowtide.analysis.dims import axes, axes_of, dimensions, opaque_operators
from lowtide.ir import Aten, Merge, Ref, TensorMeta
from lowtide.ir.text import parse_graph


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    empty = torch.empty(shape, device="meta")
    return TensorMeta(shape, empty.stride(), dtype)


def cuts(op: Aten, inputs: list[TensorMeta], *outputs: TensorMeta) -> list[tuple[object, ...]]:
    """Extent, input and output dimensions of every axis."""
    return [(axis.extent, axis.inputs, axis.outputs) for axis in axes_of(op, tuple(inputs), outputs)]


def test_a_matrix_product_has_three_loops_one_of_them_a_sum() -> None:
    found = axes_of(Aten("aten.mm.default", (Ref(0), Ref(1))), (meta(2, 3), meta(3, 4)), (meta(2, 4),))
    assert [(axis.inputs, axis.outputs, axis.merges) for axis in found] == [
        ((0, None), (0,), (Merge.WRITE,)),
        ((1, 0), (None,), (Merge.ADD,)),
        ((None, 1), (1,), (Merge.WRITE,)),
    ]


def test_a_bias_makes_the_contracted_dimension_whole() -> None:
    op = Aten("aten.addmm.default", (Ref(0), Ref(1), Ref(2)))
    assert cuts(op, [meta(4), meta(2, 3), meta(3, 4)], meta(2, 4)) == [
        (4, (0, None, 1), (1,)),
        (2, (None, 0, None), (0,)),
    ]


def test_an_operand_that_is_used_twice_is_cut_once_or_not_at_all() -> None:
    square = Aten("aten.mm.default", (Ref(0), Ref(0)))
    assert cuts(square, [meta(3, 3)], meta(3, 3)) == []
    product = Aten("aten.mul.Tensor", (Ref(0), Ref(0)))
    assert cuts(product, [meta(3)], meta(3)) == [(3, (0,), (0,))]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((4, 6), (24,), [(4, (0,), (0,))]),
        ((24,), (4, 6), [(4, (0,), (0,))]),
        ((2, 3, 5), (6, 5), [(2, (0,), (0,)), (5, (2,), (1,))]),
        ((4, 6), (8, 3), [(4, (0,), (0,))]),
        ((1, 4, 5), (4, 5), [(4, (1,), (0,)), (5, (2,), (1,))]),
        ((6, 5), (6, 1, 5), [(6, (0,), (0,)), (5, (1,), (2,))]),
        ((3, 4), (4, 3), []),
    ],
)
def test_reshape_cuts_the_leading_dimensions_of_a_group(
    before: tuple[int, ...], after: tuple[int, ...], expected: object
) -> None:
    assert cuts(Aten("aten.view.default", (Ref(0), after)), [meta(*before)], meta(*after)) == expected


def test_sizes_in_arguments_shrink_with_the_part() -> None:
    view = Aten("aten.view.default", (Ref(0), (24, 5)))
    (batch, _) = axes_of(view, (meta(4, 6, 5),), (meta(24, 5),))
    assert at_part(view, batch, 1, 4).args == (Ref(0), (6, 5))
    open_view = Aten("aten.view.default", (Ref(0), (-1, 5)))
    assert at_part(open_view, batch, 1, 4).args == (Ref(0), (-1, 5))
    with pytest.raises(ValueError, match="cannot be cut to 1/5"):
        at_part(view, batch, 1, 5)


def test_training_batch_norm_is_cut_by_channel_only() -> None:
    def call(training: bool) -> list[tuple[object, ...]]:
        op = Aten(
            "aten.native_batch_norm.default",
            (Ref(0), Ref(1), Ref(2), Ref(3), Ref(4), training, 0.1, 1e-5),
        )
        saved = meta(3) if training else meta(0)
        return cuts(op, [meta(4, 3, 5), *[meta(3)] * 4], meta(4, 3, 5), saved, saved)

    assert call(True) == [(3, (1, 0, 0, 0, 0), (1, 0, 0))]
    assert [extent for extent, *_ in call(False)] == [4, 3, 5]


def test_a_mean_loss_has_no_rule_and_a_sum_has() -> None:
    def call(reduction: int) -> int:
        op = Aten("aten.nll_loss_forward.default", (Ref(0), Ref(1), None, reduction, -100))
        return len(cuts(op, [meta(4, 3), meta(4, dtype=torch.int64)], meta(), meta()))

    assert (call(1), call(2)) == (0, 1)


def test_random_and_unknown_operators_are_never_cut() -> None:
    assert cuts(Aten("aten.bernoulli.p", (Ref(0), 0.5)), [meta(4)], meta(4)) == []
    assert cuts(Aten("aten.as_strided.default", (Ref(0), (2,), (1,))), [meta(4)], meta(2)) == []


def test_kernels_that_ignore_strides_are_known() -> None:
    args = (Ref(0), Ref(1), (4,), Ref(2), Ref(3), Ref(4), Ref(5), (True, True, True))
    assert dense_inputs(Aten("aten.native_layer_norm_backward.default", args)) == (2, 3)


BATCHED = """
input %0: f32[8,4]
input %1: f32[4,6] param
%2: f32[8,6] = aten.mm.default(%0, %1)
%3: f32[2,4,6] @s2+0 = aten.view.default(%2, [2, 4, 6])
%4: f32[2,4,6] = aten.relu.default(%3)
%5: f32[8,6] @s4+0 = aten.view.default(%4, [8, 6])
%6: f32[6] output = aten.sum.dim_IntList(%5, [0])
%7: f32[8,4] output = aten.as_strided.default(%5, [8, 4], [6, 1])
return %6
"""


def test_a_dimension_follows_values_through_the_graph() -> None:
    graph = parse_graph(
        BATCHED.replace("%7: f32[8,4] output = aten.as_strided.default(%5, [8, 4], [6, 1])\n", "")
    )
    batch = next(each for each in dimensions(graph) if each.values.get(0) == (0,))
    assert batch.values == {0: (0,), 2: (0,), 3: (0,), 4: (0,), 5: (0,)}
    assert batch.extent == 2  # rows in groups of four
    assert set(batch.nodes) == {2, 3, 4, 5, 6}
    features = next(each for each in dimensions(graph) if each.values.get(1) == (1,))
    assert features.values[6] == (0,)
    assert axes(graph, graph.node[6])[batch.nodes[6][0]].merges == (Merge.ADD,)
    assert opaque_operators(graph) == ()


def test_a_coupled_operator_keeps_a_dimension_together() -> None:
    graph = parse_graph(
        """
        input %0: f32[4,3]
        %1: f32[4,3] = aten.relu.default(%0)
        %2: f32[4,3] = aten._softmax.default(%1, 0, False)
        %3: f32[4,3] output = aten.relu.default(%2)
        return %3
        """
    )
    rows = next(each for each in dimensions(graph) if each.values.get(0) == (0,))
    assert rows.values[3] == (0,)
    assert 2 not in rows.nodes
