"""From operations as data to calls and back."""

from __future__ import annotations

import pytest
import torch

from lowtide.ir.aten import call, overload_name, renumber, resolve, tensors_of
from lowtide.ir.ops import Aten, Ref


def test_names_and_operators_are_inverse() -> None:
    assert resolve("aten.add.Tensor") is torch.ops.aten.add.Tensor
    assert overload_name(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert overload_name(torch.ops.aten.relu.default) == "aten.relu.default"


@pytest.mark.parametrize(
    "name", ["aten.no_such_thing.default", "aten.add.NoSuch", "nonsense", "aten.add", ""]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        resolve(name)


def test_call_puts_operands_in_place_of_references() -> None:
    x, y = torch.ones(2), torch.full((2,), 3.0)
    assert torch.equal(call(Aten("aten.add.Tensor", (Ref(0), Ref(1)), (("alpha", 2),)), [x, y]), x + 2 * y)
    stacked = call(Aten("aten.cat.default", ((Ref(1), Ref(0), Ref(1)), 0)), [x, y])
    assert torch.equal(stacked, torch.cat([y, x, y]))


def test_host_numbers_stand_for_scalars() -> None:
    x = torch.ones(2)
    op = Aten("aten.add_.Tensor", (Ref(0), Ref(1)), (("alpha", Ref(2)),))
    call(op, [x, 0.5, 2.0])
    assert torch.equal(x, torch.full((2,), 2.0))


def test_results_are_flattened_without_absent_ones() -> None:
    x = torch.ones(2, 4)
    assert len(tensors_of(torch.ops.aten.split.Tensor(x, 2, 1))) == 2
    assert len(tensors_of((x, None, [x, 3]))) == 2
    assert tensors_of(None) == ()


def test_renumber_reaches_nested_references() -> None:
    op = Aten("aten.cat.default", ((Ref(0), Ref(1)),), (("dim", 0),))
    assert renumber(op, [1, 0]) == Aten("aten.cat.default", ((Ref(1), Ref(0)),), (("dim", 0),))
