"""Every region that fission proposes, split every way, gives what the whole graph gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.differential.small_steps import STEPS, captured, outcome

from lowtide.analysis.parts import deliveries
from lowtide.capture import Program
from lowtide.ir import Fission, Graph
from lowtide.ir.verify import verify
from lowtide.run.plan import build_plan
from lowtide.transforms import fission
from lowtide.transforms.fission import FissionCandidate

WHOLE = [name for name in STEPS if name != "normalised"]


def largest(program: Program, count: int) -> FissionCandidate:
    return next(each for each in fission.candidates(program.graph, (count,)) if each.label == "batch")


def assert_same(program: Program, graph: Graph) -> None:
    verify(graph)
    ours, theirs = outcome(program, graph), outcome(program, program.graph)
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", STEPS)
def test_every_region_in_two_and_in_three(name: str) -> None:
    program = captured(name)
    seen = 0
    for candidate in fission.candidates(program.graph, (2, 3)):
        assert_same(program, fission.apply(program.graph, candidate).graph)
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("name", WHOLE)
def test_one_region_spans_forward_loss_and_backward(name: str) -> None:
    program = captured(name)
    graph = fission.apply(program.graph, largest(program, 2)).graph
    left = {node.origin.phase for node in graph.nodes if not isinstance(node.op, Fission)}
    inside = {node.origin.phase for node in _fission(graph).op.bodies[0].nodes}  # type: ignore[union-attr]
    assert {"forward", "loss", "backward"} <= inside
    assert "update" in left
    assert len(graph) < len(program.graph) / 2 + 8


@pytest.mark.parametrize("sizes", [(1, 4, 1), (5, 1), (2, 2, 2), (1,) * 6])
@pytest.mark.parametrize("name", ["language-dropout", "planes"])
def test_uneven_parts(name: str, sizes: tuple[int, ...]) -> None:
    program = captured(name)
    candidate = replace(largest(program, 2), sizes=sizes)
    graph = fission.apply(program.graph, candidate).graph
    assert len(_fission(graph).op.bodies) == len(set(sizes))  # type: ignore[union-attr]
    assert_same(program, graph)


@pytest.mark.parametrize("name", ["perceptron-dropout", "language-dropout", "planes", "normalised"])
def test_the_arena_runs_it_without_reading_what_is_dead(name: str) -> None:
    program = captured(name)
    graph = (
        fission.apply(program.graph, replace(largest(program, 2), sizes=(4, 2))).graph
        if name != ("perceptron-dropout")
        else fission.apply(program.graph, largest(program, 3)).graph
    )
    workload = program.workload
    before = [tensor.detach().clone() for tensor in workload.model.state_dict().values()]
    torch.manual_seed(5)
    expected = build_plan(program).step(*workload.args, *workload.targets)
    wanted = _take_back(program, before)
    torch.manual_seed(5)
    loss = build_plan(program, graph, poison=True).step(*workload.args, *workload.targets)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(_take_back(program, before), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_weight_gradients_accumulate_without_a_temporary() -> None:
    program = captured("language")
    graph = fission.apply(program.graph, largest(program, 2)).graph
    ways = deliveries(graph, _fission(graph))
    assert ways.count("accumulate") >= 4  # qkv and projection of two layers
    assert ways.count("terms") == 1  # the tied weight: embedding and head
    assert "copy" not in ways


def test_a_fission_is_split_beside_another() -> None:
    program = captured("normalised")
    graph = program.graph
    done = 0
    while (candidate := next(iter(fission.candidates(graph, (2,))), None)) is not None and done < 4:
        graph = fission.apply(graph, candidate).graph
        assert_same(program, graph)
        done += 1
    assert sum(isinstance(node.op, Fission) for node in graph.nodes) == done == 4


@pytest.mark.parametrize("name", ["language", "planes"])
def test_regions_inside_a_region_start_and_end_at_one_value(name: str) -> None:
    program = captured(name)
    found = list(fission.nested_candidates(program.graph, (3,)))
    assert found
    for candidate in found:
        assert_same(program, fission.apply(program.graph, candidate).graph)
    normal = fission.prepare(program.graph)
    phases = [{normal.node[node].origin.phase for node in each.nodes} for each in found]
    assert any(each >= {"loss", "backward"} for each in phases)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_late_layers_are_cut_finer_than_early_ones(sizes: tuple[int, int]) -> None:
    program = captured("language-dropout")
    outer = fission.apply(program.graph, replace(largest(program, 2), sizes=sizes)).graph
    body = _fission(outer).op.bodies[0]  # type: ignore[union-attr]
    inner = next(each for each in fission.nested_candidates(body, (2,)) if len(each.nodes) < len(body) / 2)
    graph = fission.apply_inside(outer, _fission(outer).id, inner).graph
    assert all(_fission(each) is not None for each in _fission(graph).op.bodies)  # type: ignore[union-attr]
    assert_same(program, graph)
    workload = program.workload
    before = [tensor.detach().clone() for tensor in workload.model.state_dict().values()]
    torch.manual_seed(5)
    expected = build_plan(program).step(*workload.args, *workload.targets)
    _take_back(program, before)
    torch.manual_seed(5)
    loss = build_plan(program, graph, poison=True).step(*workload.args, *workload.targets)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-11)


def _fission(graph: Graph):  # type: ignore[no-untyped-def]
    return next(node for node in graph.nodes if isinstance(node.op, Fission))


def _take_back(program: Program, before: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's tensors now; then put the old ones back, and the optimizer's state to zero."""
    now = [tensor.detach().clone() for tensor in program.workload.model.state_dict().values()]
    with torch.no_grad():
        for tensor, old in zip(program.workload.model.state_dict().values(), before, strict=True):
            tensor.copy_(old)
        assert program.workload.optimizer is not None
        for state in program.workload.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
    return now
