"""BatchNorm statistics that move twice, or late, where its forward is recomputed (pytorch#96136)."""

from __future__ import annotations

import torch
from tests.issues.ladder import build, climb, parts_of, plan_trace, recomputed, rungs
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture import capture
from lowtide.ir.graph import Role
from lowtide.ir.ops import Aten
from lowtide.run.plan import Plan
from lowtide.workload import Workload


class Net(nn.Module):
    """Norms of one, two and three dimensions, one used twice, one frozen in eval, one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(w, 4, 3, padding=1) for w in (2, 4, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4, momentum=m) for m in (0.1, 0.5))
        self.frozen = nn.BatchNorm2d(4).eval()
        self.bare = nn.BatchNorm2d(4, track_running_stats=False)
        self.rows = nn.BatchNorm1d(4, affine=False)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for convolve, norm in zip(self.convolutions, [*self.norms, self.norms[0]], strict=True):
            x = functional.relu(norm(convolve(x)), inplace=True)
        return self.rows(self.bare(self.frozen(x)).mean((2, 3)))


def workload() -> Workload:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 2, 5, 5).double()
    return Workload(
        model, (x,), targets=(torch.randn(4, 4).double(),), loss=functional.mse_loss, optimizer=optimizer
    )


def writes_of_buffers(plan: Plan) -> list[int]:
    graph = plan.graph
    return [
        graph.values[value].storage
        for node in graph
        for value in node.writes
        if graph.storage_of(value).role is Role.BUFFER
    ]


def test_every_rung() -> None:
    """Statistics and counts after each step are among what is compared."""
    plans = climb(workload(), (2,), steps=3)
    for name, plan in plans.items():
        written = writes_of_buffers(plan)
        assert len(written) == len(set(written)) == 9, name  # mean, variance and count of three norms
    assert parts_of(plans["2 parts"].graph)


def test_a_recomputed_norm_is_the_form_without_statistics() -> None:
    graph = recomputed(capture(workload()).graph)
    names = [node.op.overload for node in graph if isinstance(node.op, Aten)]
    assert names.count("aten._native_batch_norm_legit.no_stats") >= 3


def test_statistics_are_visible_right_after_the_step() -> None:
    step = workload()
    program = capture(step)
    for rung in rungs(program, (2,)):
        plan = build(program, rung)
        trace = plan_trace(plan, step, 2)
        assert trace.tensors["step 0: norms.0.num_batches_tracked"] == 2  # it is used twice
        assert trace.tensors["step 1: norms.0.num_batches_tracked"] == 4
        assert trace.tensors["step 1: norms.1.num_batches_tracked"] == 2
