"""A loss trace that drifts from eager's over 200 steps; rates that change on the way (DeepSpeed#6811)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.issues.ladder import Rung, ordered, recomputed, recomputed_inside, split
from torch import nn

from lowtide.capture import capture
from lowtide.errors import Stale
from lowtide.ir import Graph
from lowtide.run.native import run_step
from lowtide.run.plan import Plan, build_plan
from lowtide.workload import Workload

STEPS = 200


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(),
        nn.Dropout(0.1), nn.Linear(16, 3),
    )  # fmt: skip
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3)
    x, target = torch.randn(12, 6), torch.randint(3, (12,))
    return Workload(
        model,
        (x,),
        targets=(target,),
        loss=nn.functional.cross_entropy,
        optimizer=optimizer,
        clip_grad_norm=1.0,
    )


def change_rates(step: Workload, number: int) -> None:
    """As schedulers and people do: every group, rates, betas, decay, epsilon; a step without any movement."""
    assert step.optimizer is not None
    for index, group in enumerate(step.optimizer.param_groups):
        group["lr"] = (0.0 if number == 7 else 1e-2 / (1 + number % 20)) * (1 + index)
        group["betas"] = (0.9 - 0.001 * (number % 10), 0.99)
        group["weight_decay"] = 0.01 * (1 + number % 5) * (1 - index)
        group["eps"] = 1e-8 * (1 + number % 3)


def trace(
    step: Workload, run: Callable[[], torch.Tensor], steps: int = STEPS, rates: bool = False
) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for number in range(steps):
        if rates:
            change_rates(step, number)
        losses.append(run().item())
    return losses


def eager_losses(threads: int, rates: bool = False, steps: int = STEPS) -> list[float]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = workload()
        return trace(step, lambda: run_step(step), steps, rates)
    finally:
        torch.set_num_threads(before)


def plan_of(step: Workload, change: Callable[[Graph], Graph]) -> Plan:
    program = capture(step)
    graph = change(program.graph)
    rung = Rung("", graph, ordered(graph))
    return build_plan(program, rung.graph, rung.order, poison=True)


def plan_losses(change: Callable[[Graph], Graph], rates: bool = False, steps: int = STEPS) -> list[float]:
    step = workload()
    plan = plan_of(step, change)
    return trace(step, lambda: plan.step(*step.args, *step.targets), steps, rates)


def test_order_placement_and_recomputation_are_bit_equal() -> None:
    assert plan_losses(recomputed) == eager_losses(torch.get_num_threads())


def test_parts_stay_within_three_times_eagers_own_gap() -> None:
    """The scale is eager against itself at one and two threads."""

    def change(graph: Graph) -> Graph:
        return recomputed_inside(split(graph, 3))

    one, two = eager_losses(1), eager_losses(2)
    ours = plan_losses(change)
    own = max(abs(a - b) / abs(b) for a, b in zip(one, two, strict=True))
    theirs = eager_losses(torch.get_num_threads())
    gap = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    assert 0 < gap <= 3 * own
    assert max(abs(a - b) / abs(b) for a, b in zip(ours[:20], theirs[:20], strict=True)) <= 1e-4


@pytest.mark.parametrize("change", [recomputed, lambda graph: graph])
def test_changed_rates_are_seen_by_the_next_step(change: Callable[[Graph], Graph]) -> None:
    assert plan_losses(change, True, 60) == eager_losses(torch.get_num_threads(), True, 60)


def test_a_decay_that_is_switched_off_is_refused_before_anything_happens() -> None:
    step = workload()
    plan = plan_of(step, recomputed)
    plan.step(*step.args, *step.targets)
    before, state = copy.deepcopy(step.model.state_dict()), torch.get_rng_state()
    step.optimizer.param_groups[0]["weight_decay"] = 0.0  # type: ignore[union-attr]
    with pytest.raises(Stale, match="group 0"):
        plan.step(*step.args, *step.targets)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], now) for name, now in step.model.state_dict().items())
    step.optimizer.param_groups[0]["weight_decay"] = 0.1  # type: ignore[union-attr]
    plan.step(*step.args, *step.targets)


def test_eager_and_plan_take_turns_on_one_model() -> None:
    """Step counts and moments are the optimizer's own, so the two may alternate."""
    ours, theirs = workload(), workload()
    plan = plan_of(ours, recomputed)
    losses: list[tuple[float, float]] = []
    torch.manual_seed(2)
    state = torch.get_rng_state()
    mine = [(plan.step(*ours.args, *ours.targets) if k % 3 else run_step(ours)).item() for k in range(12)]
    torch.set_rng_state(state)
    losses = list(zip(mine, [run_step(theirs).item() for _ in range(12)], strict=True))
    assert all(one == other for one, other in losses)
    saved = copy.deepcopy(ours.optimizer.state_dict())  # type: ignore[union-attr]
    assert saved["state"][0]["step"] == 12
