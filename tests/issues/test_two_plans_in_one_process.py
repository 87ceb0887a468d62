"""Two plans in one process, a plan called from threads, a plan called while another runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.issues.ladder import build, rungs, split
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.run.native import run_step
from lowtide.run.plan import Plan, build_plan
from lowtide.workload import Workload


def inference(width: int) -> Workload:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Conv1d(2, width, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(8 * width, 3))
    return Workload(model, (torch.randn(4, 2, 8),))


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(k)` in threads that run at once; what one raises is raised here."""
    found: list[Any] = [None] * count

    def run(k: int) -> None:
        try:
            found[k] = work(k)
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def test_plans_and_threads_do_not_meet() -> None:
    """Four threads, two plans of unlike size, each called by two threads at once."""
    workloads = [inference(3), inference(5)]
    programs = [capture(workload) for workload in workloads]
    plans = [build(program, list(rungs(program, (2,)))[-1]) for program in programs]
    expected = [plan(*w.args) for plan, w in zip(plans, workloads, strict=True)]

    def work(k: int) -> int:
        ours = [plans[k % 2](*workloads[k % 2].args) for _ in range(6)]
        return sum(not torch.equal(one, expected[k % 2]) for one in ours)

    assert in_threads(4, work) == [0] * 4


def test_a_training_plan_in_a_thread() -> None:
    """Made here, run there: the numbers, the random draws and the generator are this process's."""

    def workload() -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return Workload(model, (torch.randn(6, 4),), loss=torch.mean, optimizer=optimizer)

    ours, theirs = workload(), workload()
    plan = build_plan(capture(ours), poison=True)
    torch.manual_seed(1)
    found = [in_threads(1, lambda k: plan.step(*ours.args))[0] for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    expected = [run_step(theirs) for _ in range(3)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, found, expected))
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_two_plans_of_one_model_take_turns() -> None:
    """Two batch sizes train one model; the optimizer's state is shared, as with eager."""

    def both() -> tuple[Workload, Workload]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batches = torch.randn(6, 4), torch.randn(4, 4)
        first, second = (Workload(model, (x,), loss=torch.mean, optimizer=optimizer) for x in batches)
        return first, second

    ours, theirs = both(), both()
    plans = [build_plan(capture(workload), poison=True) for workload in ours]
    for turn in (0, 1, 1, 0, 1):
        assert torch.equal(plans[turn].step(*ours[turn].args), run_step(theirs[turn]))
    for mine, other in zip(ours[0].model.parameters(), theirs[0].model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_an_error_in_one_call_does_not_break_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = inference(3)
    program = capture(workload)
    graph = split(program.graph, 2)
    plan = build_plan(program, graph, poison=True)
    expected = plan(*workload.args)
    runs = list(plan._executor.prepare()[1].runs)

    def fail() -> None:
        raise RuntimeError("on purpose")

    prepared = plan._executor.prepare()[1]
    object.__setattr__(prepared, "runs", (*runs[:-1], fail))
    with pytest.raises(RuntimeError, match="on purpose"):
        plan(*workload.args)
    object.__setattr__(prepared, "runs", tuple(runs))
    assert torch.equal(plan(*workload.args), expected)
    assert isinstance(expected, Tensor) and isinstance(plan, Plan)
