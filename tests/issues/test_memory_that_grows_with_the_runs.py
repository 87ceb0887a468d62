"""Memory that grows with the runs of a plan, or with the shapes that it meets.

(onnxruntime#14477: 132 MiB in the first run, 266 in the fortieth; pytorch#117106)
"""

from __future__ import annotations

import gc
import importlib

import pytest
import torch
from tests.issues.ladder import recomputed, split
from torch import nn

from lowtide.capture import capture
from lowtide.run.events import peak_bytes, record_with_profiler
from lowtide.run.measure import plan_step
from lowtide.run.native import run_step
from lowtide.run.plan import build_plan
from lowtide.search.cache import PlanCache
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
    return len(alive())


def alive() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def bytes_of(found: list[torch.Tensor]) -> int:
    """Bytes of all storages among them; one of symbolic size, which a tracer left behind, has none."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}
    return sum(nbytes for nbytes in storages.values() if isinstance(nbytes, int))


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


@pytest.mark.parametrize("training", [True, False])
def test_fifty_shapes(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded number of plans, one arena, and eager's numbers at every shape (pytorch#117106)."""
    # Half a second for each shape, and both ways of recording are tested elsewhere.
    door = importlib.import_module("lowtide.capture.door")
    monkeypatch.setattr(door, "record_exported", lambda workload: None)
    torch.manual_seed(0)
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]

    def make(x: torch.Tensor, index: int = 0) -> Workload:
        model = (ours, theirs)[index]
        if not training:
            return Workload(model, (x,))
        return Workload(model, (x,), loss=torch.mean, optimizer=optimizers[index])

    cache = PlanCache(make, lambda workload: build_plan(capture(workload), poison=True), max_plans=4)
    run = cache.step if training else cache
    counts, beside = {}, {}
    for step, rows in enumerate((*range(1, 51), 50, 49, 1)):
        x = torch.randn(rows, 2)
        assert torch.equal(run(x), run_step(make(x, 1)))
        assert len(cache) <= 4
        assert sum(plan._executor._prepared is not None for plan in cache._plans.values()) == 1
        if step in (20, 30, 49):  # each takes a third of a second
            found, plans = alive(), list(cache._plans.values())
            arena = next(plan._executor.prepare()[0].arena for plan in plans if plan._executor._prepared)
            known = [arena, *(plan.program.workload.args[0] for plan in plans)]
            counts[step], beside[step] = len(found), bytes_of(found) - bytes_of(known)
            del found, plans, arena, known
    assert len(set(counts.values())) == 1, counts
    assert len(set(beside.values())) == 1, beside
