"""The plain executor of a Fission: slices are views, outputs are allocated once, sums start with a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.ir import Fission, Graph, Merge, Part, Slice
from lowtide.ir.text import parse_graph
from lowtide.run.fission_reference import allocate_outputs, run_fission

BODY = parse_graph(
    """
    input %0: f32[2,3](1,4)
    input %1: f64[] temp
    %2: f32[2,3](1,2) output = aten.mul.Tensor(%0, %0)
    %3: f32[3] output = aten.sum.dim_IntList(%0, [0])
    return %2, %3
    """
)


def halves(*merges: Merge) -> Fission:
    def part(start: int) -> Part:
        piece = Slice(0, start, start + 2)
        return Part(0, (piece, Slice(None)), (piece, Slice(None)))

    return Fission((BODY,), (part(0), part(2)), merges)


def test_parts_read_views_and_are_merged_in_place() -> None:
    x = torch.randn(3, 4).t()
    seen: list[Tensor] = []

    def run(body: Graph, operands: list[Tensor]) -> list[Tensor]:
        assert body is BODY
        assert operands[1] == 0.5  # a number on the host is shared
        seen.append(operands[0])
        return [operands[0] ** 2, operands[0].sum(0)]

    square, total = run_fission(halves(Merge.WRITE, Merge.ADD), [x, 0.5], run)
    assert [each.data_ptr() for each in seen] == [x.data_ptr(), x.data_ptr() + 8]
    torch.testing.assert_close(square, x**2)
    torch.testing.assert_close(total, x.sum(0))


def test_a_sum_of_negative_zeros_stays_one() -> None:
    def run(body: Graph, operands: list[Tensor]) -> list[Tensor]:
        return [operands[0], torch.full((3,), -0.0)]

    _, total = run_fission(halves(Merge.WRITE, Merge.ADD), [torch.zeros(3, 4).t(), 0.5], run)
    assert torch.signbit(total).all()


def test_wholes_lie_in_memory_as_the_parts_do() -> None:
    square, total = allocate_outputs(halves(Merge.WRITE, Merge.ADD))
    assert (tuple(square.shape), square.stride()) == ((4, 3), (1, 4))
    assert (tuple(total.shape), total.dtype) == ((3,), torch.float32)


def test_parts_of_a_log_sum_exp_are_combined() -> None:
    x = torch.randn(3, 4).t()
    _, total = run_fission(
        halves(Merge.WRITE, Merge.LOGSUMEXP),
        [x, 0.5],
        lambda body, operands: [operands[0], operands[0].logsumexp(0)],
    )
    torch.testing.assert_close(total, x.logsumexp(0))
