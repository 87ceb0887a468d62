"""Regions with halos: images split in rows give what the whole gives, in inference and in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.differential.small_steps import outcome
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.ir import Fission, Graph, Node
from lowtide.ir.verify import verify
from lowtide.run.plan import build_plan
from lowtide.transforms import halo
from lowtide.transforms.halo import HaloCandidate
from lowtide.transforms.rows import row_candidates
from lowtide.workload import Workload

CHEAP = settings(
    max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Hourglass(nn.Module):
    """Down and up again with a skip: pools, BatchNorm in evaluation, transposed and bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.deep = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        deep = F.relu(self.deep(F.max_pool2d(x, 3, 2, 1)))
        wide = F.interpolate(F.avg_pool2d(x, 4), scale_factor=2, mode="bilinear")
        wide = wide + F.interpolate(self.up(deep)[:, :, : wide.shape[2], : wide.shape[3]], scale_factor=1.0)
        return self.last(torch.cat([x, F.interpolate(wide, scale_factor=2.0)], 1))


class Restoration(nn.Module):
    """Convolutions that keep the size, a residual: forward, loss and backward are one region of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in ((2, 4, 3), (4, 4, 5)))
        self.last = nn.Conv2d(4, 2, 3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = F.gelu(layer(y))
        return x + self.last(y)


def inference(model: nn.Module, *shape: int) -> Program:
    torch.manual_seed(4)
    return capture(Workload(model.double().eval(), args=(torch.randn(*shape).double(),)))


def training() -> Program:
    torch.manual_seed(5)
    model = Restoration().double()
    x, y = torch.randn(2, 2, 36, 5).double(), torch.randn(2, 2, 36, 5).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = capture(Workload(model, args=(x,), targets=(y,), loss=F.mse_loss, optimizer=optimizer))
    program.ensure_state()
    return program


def fissions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Fission)]


def assert_same(program: Program, graph: Graph) -> None:
    verify(graph)
    for ours, theirs in zip(outcome(program, graph), outcome(program, program.graph), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_a_whole_network_in_rows_and_in_columns_of_any_count() -> None:
    program = inference(Hourglass(), 1, 2, 32, 16)
    regions = [found[0] for found in row_candidates(program.graph, (2, 3, 4), most_work=9)]
    assert max(len(candidates[0].nodes) for candidates in regions) >= 14
    for candidates in regions:
        for candidate in candidates:
            assert_same(program, halo.apply(program.graph, candidate).graph)


def test_inner_parts_share_a_body_and_only_border_parts_are_padded() -> None:
    program = inference(
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)), 1, 2, 40, 8
    )
    ((candidates,),) = row_candidates(program.graph, (5,))
    op = fissions(halo.apply(program.graph, candidates[0]).graph)[0].op
    assert isinstance(op, Fission)
    first, *inner, last = (part.body for part in op.parts)
    assert len(set(inner)) == 1 and len({first, inner[0], last}) == 3
    assert len(op.bodies) == 3
    assert [(p.inputs[0].start, p.inputs[0].stop) for p in op.parts][1:4] == [(6, 18), (14, 26), (22, 34)]
    assert all(
        [node.id for node in body.nodes] == [node.id for node in op.bodies[0].nodes] for body in op.bodies
    )


@pytest.mark.parametrize("count", [2, 3, 5])
def test_gradients_along_rows_a_halo_for_the_data_and_a_sum_for_the_weight(count: int) -> None:
    program = training()
    found = [
        candidates[0]
        for regions in row_candidates(program.graph, (count,), most_work=9)
        for candidates in regions
    ]
    graph = halo.prepare(program.graph)
    phases = [{graph.node[node].origin.phase for node in each.nodes} for each in found]
    assert {"forward", "loss", "backward"} in phases
    for candidate in found:
        assert_same(program, halo.apply(program.graph, candidate).graph)


def test_the_arena_runs_parts_with_halos_without_reading_what_is_dead() -> None:
    program = inference(Hourglass(), 1, 2, 32, 16)
    candidate = next(row_candidates(program.graph, (3,), most_work=9))[0][0]
    graph = halo.apply(program.graph, candidate).graph
    plan = build_plan(program, graph, poison=True)
    (x,) = program.workload.args
    with torch.no_grad():
        expected = program.workload.model(x)
    for _ in range(2):
        torch.testing.assert_close(plan(x), expected, rtol=1e-9, atol=1e-11)
    assert plan.arena_bytes < build_plan(program).arena_bytes


def test_the_arena_sums_gradients_over_rows() -> None:
    program = training()
    candidate = next(row_candidates(program.graph, (3,), most_work=9))[0][0]
    before = [tensor.detach().clone() for tensor in program.workload.model.parameters()]
    losses, steps = [], []
    for graph in (program.graph, halo.apply(program.graph, candidate).graph):
        with torch.no_grad():
            for tensor, old in zip(program.workload.model.parameters(), before, strict=True):
                tensor.copy_(old)
        assert program.workload.optimizer is not None
        program.workload.optimizer.state.clear()
        plan = build_plan(program, graph, poison=True)
        losses.append(plan.step(*program.workload.args, *program.workload.targets))
        steps.append([tensor.detach().clone() for tensor in program.workload.model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-9, atol=1e-11)


@CHEAP
@given(st.data())
def test_chains_of_random_windows(data: st.DataObject) -> None:
    def size(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    layers: list[nn.Module] = []
    for _ in range(size(1, 4)):
        kind = data.draw(st.sampled_from(["convolution", "transposed", "max", "average", "nearest", "pad"]))
        kernel, stride = size(1, 4), size(1, 2)
        if kind == "convolution":
            layers += [nn.Conv2d(2, 2, kernel, stride, size(0, kernel), dilation=size(1, 2)), nn.ReLU()]
        elif kind == "transposed":
            layers.append(
                nn.ConvTranspose2d(2, 2, kernel, stride, size(0, (kernel - 1) // 2), size(0, stride - 1))
            )
        elif kind == "max":
            layers.append(nn.MaxPool2d(kernel, stride, size(0, kernel // 2)))
        elif kind == "average":
            layers.append(
                nn.AvgPool2d(kernel, stride, size(0, kernel // 2), count_include_pad=bool(size(0, 1)))
            )
        elif kind == "nearest":
            layers.append(nn.Upsample(scale_factor=2))
        else:
            layers.append(nn.ConstantPad2d((1, 0, size(0, 3), size(0, 3)), 0.25))
    try:
        program = inference(nn.Sequential(*layers), 1, 2, size(17, 40), 11)
    except RuntimeError:
        return  # the image got too small
    for candidates in row_candidates(program.graph, (size(2, 5),), most_work=9):
        for (candidate,) in candidates:
            assert_same(program, halo.apply(program.graph, candidate).graph)


def test_what_cannot_be_split_in_rows_is_refused() -> None:
    program = training()
    graph = halo.prepare(program.graph)
    candidate = next(row_candidates(program.graph, (3,), most_work=9))[0][0]
    loops = halo.assignment_of(graph, candidate.axes)
    nodes = candidate.nodes
    assert halo.check_rows(graph, nodes, loops, (1, 1, 1)) == []
    assert "do not make a whole" in halo.check_rows(graph, nodes, loops, (1,))[0]
    assert any("no rows in a part" in each for each in halo.check_rows(graph, nodes, loops, (1,) * 50))
    update = next(node.id for node in graph.nodes if node.writes)
    assert "writes in place" in halo.check_rows(graph, (*nodes, update), loops, (1, 1))[0]
    missing = {node: loop for node, loop in loops.items() if node != nodes[0]}
    assert "has no loop" in halo.check_rows(graph, nodes, missing, (1, 1))[0]
    middle = tuple(node for node in nodes if node != nodes[len(nodes) // 2])
    assert any("not convex" in each for each in halo.check_rows(graph, middle, loops, (1, 1)))
    with pytest.raises(halo.IllegalFission):
        halo.apply(program.graph, HaloCandidate({node: candidate.axes[node] for node in middle}, (1, 1)))


def test_a_sum_over_rows_is_not_read_inside() -> None:
    program = training()
    graph = halo.prepare(program.graph)
    candidate = next(row_candidates(program.graph, (2,)))[0][0]
    loops = dict(halo.assignment_of(graph, candidate.axes))
    wrong = next(
        node
        for node in candidate.nodes
        if len(halo.loops(graph, graph.node[node])) > 1 and 2 in loops[node].outputs
    )
    other = next(loop for loop in halo.loops(graph, graph.node[wrong]) if 2 not in loop.outputs)
    faults = halo.check_rows(graph, candidate.nodes, {**loops, wrong: other}, (1, 1))
    assert any("is cut along dimension" in each or "is a sum" in each for each in faults)
