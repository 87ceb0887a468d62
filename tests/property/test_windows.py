"""Every window rule: run an operator on the rows that it says it needs, compare the rows that it makes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.drawing import Draw
from tests.property.test_axis_rules import meta_of, run
from torch import Tensor
from torch.nn.functional import pad

from lowtide.analysis.axis import with_argument
from lowtide.analysis.windows import WINDOW_RULES, Span, WindowAxis, windows_of, with_arguments
from lowtide.ir.ops import Arg, Aten, Merge, Ref

CHEAP = settings(
    max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def _geometry(draw: Draw) -> tuple[int, int, int, int]:
    """Kernel, stride, padding, dilation."""
    kernel = draw.size(1, 4)
    dilation = draw.size(1, 2)
    return kernel, draw.size(1, 3), draw.size(0, (dilation * (kernel - 1) + 1) // 2), dilation


def _convolution(draw: Draw) -> tuple[Arg, ...]:
    (kernel, stride, padding, dilation), groups, transposed = _geometry(draw), draw.one_of(1, 2), draw.flag()
    x = draw.tensor(2, 2 * groups, draw.size(8, 15), draw.size(7, 8))
    w = draw.tensor(2 * groups, 2, kernel, draw.size(1, 2))
    bias = draw.tensor(2 * groups * (groups if transposed and groups == 1 else 1)) if draw.flag() else None
    if transposed:
        bias = draw.tensor(2 * groups) if bias is not None else None
    extra = draw.size(0, max(stride, dilation) - 1) if transposed else 0
    lists = ((stride, 1), (padding, 0), (dilation, 1))
    return (x, w, bias, *lists, transposed, (extra, 0), groups)


def _weight_gradient(draw: Draw) -> tuple[Arg, ...]:
    kernel, stride, padding, dilation = _geometry(draw)
    x, w = torch.randn(2, 3, draw.size(8, 15), 5, dtype=torch.float64), torch.randn(2, 3, kernel, 2).double()
    lists = ((stride, 1), (padding, 0), (dilation, 1))
    made = torch.ops.aten.convolution(x, w, None, *lists, False, (0, 0), 1)
    draw.tensors[:] = [torch.randn_like(made), x, w]
    return (Ref(0), Ref(1), Ref(2), (2,), *lists, False, (0, 0), 1, (False, True, draw.flag()))


def _max_pool(draw: Draw) -> tuple[Arg, ...]:
    kernel, stride, padding, dilation = _geometry(draw)
    x = draw.tensor(2, 2, draw.size(8, 15), 6)
    return (x, (kernel, 1), draw.one_of((stride, 1), ()), (min(padding, kernel // 2), 0), (dilation, 1))


def _average_pool(draw: Draw) -> tuple[Arg, ...]:
    kernel, stride, padding, _ = _geometry(draw)
    x = draw.tensor(2, 2, draw.size(8, 15), 6)
    return (x, (kernel, 1), (stride, 1), (min(padding, kernel // 2), 0), False, draw.flag())


def _nearest(draw: Draw) -> tuple[Arg, ...]:
    rows, factor = draw.size(5, 9), draw.size(1, 3)
    return (draw.tensor(2, 2, rows, 3), (rows * factor, 6), draw.one_of(None, float(factor)), 2.0)


def _bilinear(draw: Draw) -> tuple[Arg, ...]:
    x, size, *scales = _nearest(draw)
    return (x, size, False, *scales)


def _constant_pad(draw: Draw) -> tuple[Arg, ...]:
    return (draw.tensor(2, 2, draw.size(6, 9), 3), (1, 0, draw.size(0, 7), draw.size(0, 7)), 0.5)


CALLS: dict[str, Callable[[Draw], tuple[Arg, ...]]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _weight_gradient,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.upsample_nearest2d.default": _nearest,
    "aten.upsample_bilinear2d.default": _bilinear,
    "aten.constant_pad_nd.default": _constant_pad,
}


def rows(tensor: Tensor, dim: int | None, span: Span) -> Tensor:
    return tensor if dim is None else tensor.narrow(dim, span[0], span[1] - span[0])


def run_part(op: Aten, axis: WindowAxis, tensors: list[Tensor], out: Span, more: Span) -> list[Tensor | None]:
    """The rows `out` of each result (a sum: what they add), from the rows needed and `more` of them."""
    given, made = [], out
    for tensor, dim, window in zip(tensors, axis.inputs, axis.windows, strict=True):
        if dim is None or window is None:
            given.append(rows(tensor, dim, out))
            continue
        start, stop = window.need(out)
        there = (max(start - more[0], 0), min(stop + more[1], tensor.shape[dim]))
        taken = window.take(out, there)
        assert there[0] <= taken.used[0] <= taken.used[1] <= there[1]
        assert taken.made[0] <= out[0] < out[1] <= taken.made[1]
        zeros = [0, 0] * (tensor.dim() - dim - 1) + list(taken.zeros)
        given.append(pad(rows(tensor, dim, taken.used), zeros))
        op, made = with_arguments(op, taken.arguments), taken.made
    found: list[Tensor | None] = []
    for result, dim, merge in zip(run(op, given), axis.outputs, axis.merges, strict=True):
        if dim is not None:
            assert result.shape[dim] == made[1] - made[0]
        kept = rows(result, dim, (out[0] - made[0], out[1] - made[0]))
        found.append(None if merge is None else kept)
    return found


def test_every_window_rule_is_exercised() -> None:
    assert set(WINDOW_RULES) == set(CALLS)


@pytest.mark.parametrize("overload", sorted(CALLS))
def test_parts_with_halos_make_the_whole(overload: str) -> None:
    seen: set[int] = set()

    @CHEAP
    @given(st.data())
    def check(data: st.DataObject) -> None:
        draw = Draw(data)
        op = Aten(overload, CALLS[overload](draw))
        tensors = draw.tensors
        try:
            whole = run(op, tensors)
        except RuntimeError:
            return  # no such convolution: the kernel is larger than the image
        for axis in windows_of(op, tuple(map(meta_of, tensors)), tuple(map(meta_of, whole))):
            seen.add(axis.inputs[0] or 0)
            count = min(draw.size(2, 5), axis.extent)
            inner = data.draw(
                st.sets(st.integers(1, axis.extent - 1), min_size=count - 1, max_size=count - 1)
            )
            edges = [0, *sorted(inner), axis.extent]
            more = (draw.size(0, 3), draw.size(0, 3))
            parts = [run_part(op, axis, tensors, part, more) for part in itertools.pairwise(edges)]
            for position, result in enumerate(whole):
                pieces = [part[position] for part in parts if part[position] is not None]
                dim = axis.outputs[position]
                if axis.merges[position] is Merge.WRITE:
                    torch.testing.assert_close(torch.cat(pieces, dim or 0), result, rtol=1e-9, atol=1e-9)
                elif axis.merges[position] is Merge.ADD:
                    torch.testing.assert_close(sum(pieces), result, rtol=1e-9, atol=1e-9)

    check()
    assert 2 in seen


def test_what_has_no_whole_rows_has_no_window() -> None:
    x = torch.randn(1, 1, 7, 7)
    for op in (
        Aten("aten.upsample_bilinear2d.default", (Ref(0), (14, 14), True)),
        Aten("aten.upsample_nearest2d.default", (Ref(0), (10, 10))),
        Aten("aten.max_pool2d_with_indices.default", (Ref(0), (2, 2), (2, 2), (0, 0), (1, 1), True)),
    ):
        assert windows_of(op, (meta_of(x),), tuple(map(meta_of, run(op, [x])))) == ()


def test_an_inner_part_has_no_padding() -> None:
    x, w = torch.randn(1, 1, 12, 12), torch.randn(1, 1, 3, 3)
    lists: tuple[Arg, ...] = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    op = Aten("aten.convolution.default", (Ref(0), Ref(1), None, *lists))
    window = windows_of(op, (meta_of(x), meta_of(w)), (meta_of(x),))[0].windows[0]
    assert window is not None
    assert window.need((4, 8)) == (3, 9)
    taken = window.take((4, 8), (3, 9))
    assert (taken.used, taken.made) == ((3, 9), (4, 8))
    assert with_arguments(op, taken.arguments) == with_argument(op, "padding", (0, 1))
