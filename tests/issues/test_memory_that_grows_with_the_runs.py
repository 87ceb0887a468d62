"""Forty runs of one plan: the fortieth uses what the first did (onnxruntime#14477: 132 -> 266 MiB)."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.issues.ladder import recomputed, split
from torch import nn

from lowtide.capture import capture
from lowtide.run.events import peak_bytes, record_with_profiler
from lowtide.run.measure import plan_step
from lowtide.run.plan import build_plan
from lowtide.workload import Workload


def workload(training: bool) -> Workload:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(288, 5),
    ]
    model = nn.Sequential(*layers)
    x = torch.randn(8, 3, 8, 8)
    if not training:
        return Workload(model.eval(), (x,))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = nn.functional.cross_entropy
    return Workload(model, (x,), targets=(torch.randint(5, (8,)),), loss=loss, optimizer=optimizer)


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("training", [True, False])
def test_forty_runs(training: bool) -> None:
    step = workload(training)
    program = capture(step)
    graph = recomputed(split(program.graph, 2))
    plan = build_plan(program, graph)
    run = plan_step(plan, step)
    run()
    before = tensors()
    arena = plan._executor.prepare()[0].arena
    peaks = []
    for _ in range(40):
        result, log = record_with_profiler(run)
        del result
        peaks.append(peak_bytes(log))
    assert len(set(peaks[1:])) == 1 and peaks[0] == peaks[-1]
    assert tensors() == before
    assert plan._executor.prepare()[0].arena is arena and arena.numel() == plan.arena_bytes
    assert plan.count_allocations(*step.args, *step.targets).missed == 0


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_a_call_is_kept(training: bool) -> None:
    """Neither arguments nor results of an earlier call stay alive in the plan."""
    step = workload(training)
    plan = build_plan(capture(step))
    before = tensors()
    for _ in range(3):
        fresh = [argument.clone() for argument in (*step.args, *step.targets)]
        result = plan.step(*fresh) if training else plan(*fresh)
        del fresh, result
    state = 3 * sum(1 for _ in step.model.parameters()) if training else 0
    prepared = tensors() - before - state
    for _ in range(3):
        fresh = [argument.clone() for argument in (*step.args, *step.targets)]
        result = plan.step(*fresh) if training else plan(*fresh)
        del fresh, result
    assert tensors() - before - state == prepared


def test_plans_that_come_and_go_leave_nothing() -> None:
    """Fifty plans of one program, one after the other: their arenas go with them."""
    step = workload(training=False)
    program = capture(step)
    plan = build_plan(program)
    plan(*step.args)
    del plan
    before = tensors()
    for _ in range(50):
        plan = build_plan(program)
        plan(*step.args)
        del plan
    assert tensors() == before
