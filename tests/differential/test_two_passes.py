"""Softmax and BatchNorm as two passes: the same numbers, and parts along what they reduce."""

from __future__ import annotations

import pytest
import torch
from tests.differential.small_steps import captured, outcome

from lowtide.capture import Program
from lowtide.ir import Fission, Graph, Merge
from lowtide.ir.ops import Aten
from lowtide.ir.verify import verify
from lowtide.run.plan import build_plan
from lowtide.transforms import fission
from lowtide.transforms.online import open_reductions


def assert_same(program: Program, graph: Graph) -> None:
    verify(graph)
    for ours, theirs in zip(outcome(program, graph), outcome(program, program.graph), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def merges_of(graph: Graph) -> set[Merge]:
    return {merge for node in graph.nodes if isinstance(node.op, Fission) for merge in node.op.merges}


def batch_regions(graph: Graph) -> list[set[str]]:
    """The operators of each region along the batch."""
    found = []
    for each in fission.candidates(graph, (2,)):
        if each.label == "batch":
            ops = [fission.prepare(graph, each.masks).node[number].op for number in each.nodes]
            found.append({op.overload for op in ops if isinstance(op, Aten)})
    return found


@pytest.mark.parametrize(("name", "merge"), [("normalised", Merge.MOMENTS), ("language", Merge.LOGSUMEXP)])
def test_what_is_reduced_is_split(name: str, merge: Merge) -> None:
    program = captured(name)
    opened = open_reductions(program.graph).graph
    assert_same(program, opened)
    seen: set[Merge] = set()
    for candidate in fission.candidates(opened, (2, 3)):
        graph = fission.apply(opened, candidate).graph
        assert_same(program, graph)
        seen |= merges_of(graph)
    assert merge in seen


def test_regions_end_and_begin_between_the_passes_of_a_batch_norm() -> None:
    program = captured("normalised")
    opened = open_reductions(program.graph).graph
    names = batch_regions(opened)
    assert any({"aten.convolution.default", "aten.var_mean.correction"} <= each for each in names)
    assert any({"aten.native_batch_norm.default", "aten.var_mean.correction"} <= each for each in names)
    assert any({"aten.convolution_backward.default", "aten.sub.Tensor"} <= each for each in names)
    assert not any("batch_norm" in name for each in batch_regions(program.graph) for name in each)


def test_the_arena_combines_moments() -> None:
    program = captured("normalised")
    graph = opened = open_reductions(program.graph).graph
    assert build_plan(program, opened).arena_bytes > 0
    for _ in range(4):
        found = [each for each in fission.candidates(graph, (3,)) if each.label == "batch"]
        if found:
            graph = fission.apply(graph, found[0]).graph
    assert Merge.MOMENTS in merges_of(graph)
    workload = program.workload
    start = [tensor.detach().clone() for tensor in workload.model.state_dict().values()]
    found_states = []
    for each in (program.graph, graph):
        with torch.no_grad():
            for tensor, old in zip(workload.model.state_dict().values(), start, strict=True):
                tensor.copy_(old)
            assert workload.optimizer is not None
            for state in workload.optimizer.state.values():
                state["momentum_buffer"].zero_()
        build_plan(program, each, poison=True).step(*workload.args, *workload.targets)
        found_states.append([tensor.detach().clone() for tensor in workload.model.state_dict().values()])
    for ours, theirs in zip(found_states[1], found_states[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
