"""Prepared calls and the out= overloads that are worth using."""

import pytest
import torch

from lowtide.ir.ops import Aten, Ref
from lowtide.run.calls import out_variant, prepare_call, prepare_out_call


@pytest.mark.parametrize(
    ("overload", "names"),
    [
        ("aten.add.Tensor", ("out",)),
        ("aten.gelu_backward.default", ("grad_input",)),
        ("aten.max_pool2d_with_indices.default", ("out", "indices")),
        ("aten.native_batch_norm.default", ("out", "save_mean", "save_invstd")),
    ],
)
def test_out_variant_with_a_kernel_is_found(overload: str, names: tuple[str, ...]) -> None:
    variant = out_variant(overload)
    assert variant is not None and variant.names == names


@pytest.mark.parametrize(
    "overload", ["aten.native_layer_norm.default", "aten.convolution.default", "aten.clone.default"]
)
def test_out_variant_that_only_copies_is_left_alone(overload: str) -> None:
    assert out_variant(overload) is None


def test_operands_are_bound_wherever_they_occur() -> None:
    op = Aten("aten.cat.default", ((Ref(0), Ref(1), Ref(0)), 0))
    call = prepare_call(op)
    call.bind(0, torch.ones(2))
    call.bind(1, torch.zeros(1))
    assert call().tolist() == [1, 1, 0, 1, 1]
    call.bind(0, torch.full((1,), 5.0))
    assert call().tolist() == [5, 0, 5]


def test_out_call_writes_into_what_it_is_given() -> None:
    op = Aten("aten.mul.Tensor", (Ref(0), Ref(0)))
    variant = out_variant(op.overload)
    assert variant is not None
    call, out = prepare_out_call(op, variant), torch.empty(3)
    call.bind(0, torch.tensor([1.0, 2.0, 3.0]))
    call.kwargs["out"] = out
    assert call().data_ptr() == out.data_ptr()
    assert out.tolist() == [1, 4, 9]
