"""Every axis rule: cut real inputs along each axis, run the parts, merge, compare with the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.operator_calls import CALLS, make_call
from torch import Tensor

from lowtide.analysis.axis import Axis, at_part
from lowtide.analysis.axis_rules import AXIS_RULES, dense_inputs
from lowtide.analysis.dims import axes_of
from lowtide.ir.aten import call
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Aten, Merge

# Uninitialised memory has no values to compare; both are covered by zeros.
_UNCOMPARABLE = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}


CHEAP = settings(
    max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def run(op: Aten, tensors: list[Tensor]) -> list[Tensor]:
    result = call(op, tensors)
    flat = result if isinstance(result, tuple | list) else (result,)
    return [tensor for tensor in flat if isinstance(tensor, Tensor)]


def cuts(data: st.DataObject, extent: int) -> list[tuple[int, int]]:
    """[start, stop) of two or more uneven parts of `extent`."""
    inner = data.draw(st.sets(st.integers(1, extent - 1), min_size=1, max_size=2))
    edges = [0, *sorted(inner), extent]
    return list(itertools.pairwise(edges))


def piece(tensor: Tensor, dim: int | None, start: int, stop: int, extent: int) -> Tensor:
    if dim is None:
        return tensor
    unit = tensor.shape[dim] // extent
    assert unit * extent == tensor.shape[dim], "a size is no multiple of the axis's extent"
    return tensor.narrow(dim, start * unit, (stop - start) * unit)


def split_and_merge(
    op: Aten, axis: Axis, tensors: list[Tensor], parts: list[tuple[int, int]]
) -> list[Tensor]:
    results = []
    for start, stop in parts:
        pairs = zip(tensors, axis.inputs, strict=True)
        inputs = [piece(tensor, dim, start, stop, axis.extent) for tensor, dim in pairs]
        for position in dense_inputs(op):
            inputs[position] = inputs[position].contiguous()
        results.append(run(at_part(op, axis, stop - start, axis.extent), inputs))
    merged = []
    for position, (dim, merge) in enumerate(zip(axis.outputs, axis.merges, strict=True)):
        pieces = [each[position] for each in results]
        if merge is Merge.WRITE:
            assert dim is not None
            merged.append(torch.cat(pieces, dim))
        elif merge is Merge.ADD:
            merged.append(sum(pieces[1:], pieces[0]))
        elif merge is Merge.LOGSUMEXP:
            merged.append(torch.stack(pieces).logsumexp(0))
        elif merge is Merge.MOMENTS:
            merged.append(_moments(results, parts)[position])
        else:
            assert merge is None
            merged.append(torch.empty(0))
    return merged


def _moments(results: list[list[Tensor]], parts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Variance and mean of all parts together, from the raw moments."""
    weights = [(stop - start) / parts[-1][1] for start, stop in parts]
    mean = sum(weight * each[1] for weight, each in zip(weights, results, strict=True))
    square = sum(weight * (each[0] + each[1] ** 2) for weight, each in zip(weights, results, strict=True))
    assert isinstance(mean, Tensor)
    return square - mean**2, mean


def test_every_rule_is_exercised() -> None:
    assert set(AXIS_RULES) - set(CALLS) == _UNCOMPARABLE


@pytest.mark.parametrize("overload", sorted(CALLS))
def test_parts_make_the_whole(overload: str) -> None:
    found = 0

    @settings(CHEAP)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal found
        op, tensors = make_call(overload, data)
        whole = run(op, tensors)
        outputs = tuple(meta_of(each) for each in whole)
        for axis in axes_of(op, tuple(meta_of(each) for each in tensors), outputs):
            found += 1
            parts = cuts(data, axis.extent)
            for position, result in enumerate(split_and_merge(op, axis, tensors, parts)):
                if axis.merges[position] is not None:
                    torch.testing.assert_close(result, whole[position], rtol=1e-9, atol=1e-9, equal_nan=True)

    check()
    assert found > 0, "the rule never offered an axis"


def test_an_axis_never_exceeds_the_data() -> None:
    op = Aten("aten.view.default", ((0, 4),))
    assert math.gcd(0, 4) == 4
    assert axes_of(op, (TensorMeta((0, 4), (4, 1), torch.float32),), ()) == ()
