"""Parts of a log-sum-exp and of mean and variance, combined in both executors."""

from __future__ import annotations

import pytest
import torch
from tests.differential.small_steps import outcome
from torch import Tensor, nn

from lowtide.analysis.merging import combinations
from lowtide.capture import Program, capture
from lowtide.ir import Fission, Merge
from lowtide.ir.verify import verify
from lowtide.run.plan import build_plan
from lowtide.transforms import fission
from lowtide.transforms.fission import FissionCandidate, check_region
from lowtide.workload import Workload


class Evidence(nn.Module):
    """The log-sum-exp of logits that are made in parts of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (torch.logsumexp(30 * self.head(x), 1),)


class Moments(nn.Module):
    """Mean and variance over the batch and both axes of a plane."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.var_mean(torch.tanh(x) + 100, (0, 2, 3), correction=0)


def program_of(model: nn.Module, *shape: int) -> Program:
    torch.manual_seed(2)
    return capture(Workload(model.double(), args=(torch.randn(*shape).double(),)))


def with_merge(program: Program, merge: Merge, count: int) -> list[FissionCandidate]:
    found = []
    for candidate in fission.candidates(program.graph, (count,)):
        graph = fission.apply(program.graph, candidate).graph
        op = next(node.op for node in graph.nodes if isinstance(node.op, Fission))
        if merge in op.merges:
            found.append(candidate)
    return found


@pytest.mark.parametrize("sizes", [(6, 6), (1, 10, 1), (2, 3, 7), (4, 4, 4)])
@pytest.mark.parametrize(
    ("model", "shape", "merge"),
    [(Evidence, (5, 4), Merge.LOGSUMEXP), (Moments, (12, 3, 2, 4), Merge.MOMENTS)],
)
def test_parts_are_combined_to_the_whole(
    model: type[nn.Module], shape: tuple[int, ...], merge: Merge, sizes: tuple[int, ...]
) -> None:
    program = program_of(model(), *shape)
    found = [each for each in with_merge(program, merge, 2) if sum(each.sizes) == 12]
    assert found
    graph = fission.apply(program.graph, FissionCandidate(found[0].axes, sizes)).graph
    verify(graph)
    expected = outcome(program, program.graph)
    for ours, theirs in zip(outcome(program, graph), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    results = build_plan(program, graph, poison=True)(*program.workload.args)
    for ours, theirs in zip(results, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_part_without_evidence_adds_nothing() -> None:
    program = program_of(Evidence(), 5, 4)
    candidate = with_merge(program, Merge.LOGSUMEXP, 2)[0]
    graph = fission.apply(program.graph, candidate).graph
    op = next(node.op for node in graph.nodes if isinstance(node.op, Fission))
    (step,) = combinations(op, 1)
    assert (step.target, step.value, step.op.overload) == (0, 0, "aten.logaddexp.out")
    left = torch.tensor([float("-inf"), 1.0])
    torch.logaddexp(left, torch.tensor([float("-inf"), float("-inf")]), out=left)
    assert left.tolist() == [float("-inf"), 1.0]


def test_a_corrected_variance_has_no_parts() -> None:
    class Corrected(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return torch.var_mean(x.tanh(), 0)

    assert not with_merge(program_of(Corrected(), 12, 3), Merge.MOMENTS, 2)


def test_a_variance_without_its_mean_is_not_combined() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.var_mean(x.tanh(), 0, correction=0)[0]

    program = program_of(Alone(), 12, 3)
    assert not with_merge(program, Merge.MOMENTS, 2)
    graph = program.graph
    nodes = [node.id for node in graph.nodes]
    loops = {
        node.id: axis for node in graph.nodes for axis in fission.axes(graph, node) if axis.inputs == (0,)
    }
    faults = check_region(graph, nodes, loops)
    assert any("its mean and variance are needed together" in each for each in faults)
