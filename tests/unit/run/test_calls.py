"""Prepared calls and the out= overloads that are worth using."""

import pytest
import torch

from lowtide.ir.aten import call as call_plainly
from lowtide.ir.ops import Aten, Ref
from lowtide.run.allocator import load_hook
from lowtide.run.calls import from_first_element, out_variant, prepare_call, prepare_out_call
from lowtide.run.events import record_with_hook


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


WHOLE_AND_PART = (Ref(0), Ref(1))


@pytest.mark.parametrize(
    ("op", "part"),
    [
        (Aten("aten.copy.default", WHOLE_AND_PART), (6,)),
        (Aten("aten.select_scatter.default", (*WHOLE_AND_PART, 0, -1)), (6,)),
        (Aten("aten.slice_scatter.default", (*WHOLE_AND_PART, 1, 1, 9, 2)), (4, 3)),
        (Aten("aten.slice_scatter.default", WHOLE_AND_PART, (("dim", 0), ("end", -1))), (3, 6)),
        (Aten("aten.diagonal_scatter.default", (*WHOLE_AND_PART, 1)), (4,)),
        (Aten("aten.as_strided_scatter.default", (*WHOLE_AND_PART, (3,), (5,), 2)), (3,)),
        (Aten("aten.as_strided_scatter.default", (*WHOLE_AND_PART, (3,), (5,))), (3,)),
    ],
)
def test_scatters_write_in_place_and_do_not_clone_the_arena(op: Aten, part: tuple[int, ...]) -> None:
    """PyTorch's own clone the storage behind their operand, and count offsets from its start."""
    whole, part_tensor = torch.rand(4, 6), torch.rand(part)
    wanted = call_plainly(op, (whole, part_tensor))
    arena = torch.zeros(1 << 16)
    window, out = arena[96:120].view(4, 6).copy_(whole), arena[240:264].view(4, 6)
    variant, hook = out_variant(op.overload), load_hook()
    assert variant is not None and hook is not None
    call = prepare_out_call(op, variant)
    call.bind(0, window)
    call.bind(1, part_tensor)
    call.kwargs["out"] = out
    _, log = record_with_hook(hook, call)
    assert log.events == ()
    assert torch.equal(out, wanted)
    assert torch.equal(window, whole) and not arena[264:].any()


def test_absolute_offsets_are_made_relative() -> None:
    op = Aten("aten.as_strided_scatter.default", (*WHOLE_AND_PART, (3,), (5,), 12))
    assert from_first_element(op, 10).args[4] == 2
    other = Aten("aten.select_scatter.default", (*WHOLE_AND_PART, 0, 1))
    assert from_first_element(other, 10) is other
