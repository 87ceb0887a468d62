"""Plans of unmodified models in program order: several steps are eager's, to the bit.

Dead memory is poisoned after each step, so a plan that reads what is gone computes NaN.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.capture import capture
from lowtide.errors import ShapeMismatch, Stale, UsageError
from lowtide.run.native import run_step
from lowtide.run.plan import Plan, build_plan
from lowtide.run.verify import verify
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload


def twin_of(workload: Workload) -> Workload:
    """The same workload on a copy of the model, with an optimizer of its own."""
    model = copy.deepcopy(workload.model)
    optimizer = None
    if workload.optimizer is not None:
        optimizer = type(workload.optimizer)(model.parameters(), lr=0.1)
        optimizer.load_state_dict(copy.deepcopy(workload.optimizer.state_dict()))
    return Workload(
        model,
        args=workload.args,
        kwargs=workload.kwargs,
        targets=workload.targets,
        loss=workload.loss,
        optimizer=optimizer,
        clip_grad_norm=workload.clip_grad_norm,
        autocast=workload.autocast,
    )


def call(plan: Plan, workload: Workload) -> Any:
    if workload.training:
        return plan.step(*workload.args, *workload.targets, **workload.kwargs)
    return plan(*workload.args, **workload.kwargs)


def assert_equal(ours: Any, theirs: Any) -> None:
    """Equal trees, equal bits."""
    (mine, spec), (others, other_spec) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    assert spec == other_spec
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def assert_same_steps(workload: Workload, steps: int = 4) -> Plan:
    twin = twin_of(workload)
    plan = build_plan(capture(workload), poison=True)
    for seed in range(steps):
        torch.manual_seed(seed)
        ours = call(plan, workload)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        theirs = run_step(twin)
        assert torch.equal(state, torch.get_rng_state())
        assert_equal(ours, theirs)
    for (name, mine), other in zip(
        workload.model.state_dict().items(), twin.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other), name
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    return plan


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2"])
def test_bundled(name: str, mode: str) -> None:
    assert_same_steps(load_workload(f"{TINY[name]},mode={mode}"))


@pytest.mark.parametrize("options", ["dropout=0.2", "dropout=0.2,attention=explicit"])
def test_gpt2_with_dropout(options: str) -> None:
    assert_same_steps(load_workload(f"{TINY['gpt2']},{options}"))


def test_unet_in_channels_last() -> None:
    workload = load_workload(TINY["unet"])
    workload.model.to(memory_format=torch.channels_last)
    (x,) = workload.args
    assert_same_steps(
        Workload(
            workload.model,
            args=(x.contiguous(memory_format=torch.channels_last),),
            targets=workload.targets,
            loss=workload.loss,
            optimizer=workload.optimizer,
        )
    )


class Branches(nn.Module):
    """Keyword and nested arguments; outputs in a dictionary, one an input, one a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor], scale: Tensor, flag: None = None) -> dict[str, Any]:
        hidden = self.inner(batch["x"]) * scale
        return {"hidden": hidden, "row": hidden[1], "given": batch["x"], "flag": flag, "name": "branches"}


def test_nested_arguments_and_outputs() -> None:
    workload = Workload(
        Branches().eval(), args=({"x": torch.rand(4, 6)},), kwargs={"scale": torch.rand(6), "flag": None}
    )
    plan = assert_same_steps(workload)
    result = call(plan, workload)
    assert result["row"].data_ptr() == result["hidden"][1].data_ptr()
    assert result["given"].data_ptr() == workload.args[0]["x"].data_ptr()


def loss_of(model: nn.Module, **changes: Any) -> Workload:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "args": (torch.rand(8, 6),),
        "targets": (torch.randint(0, 3, (8,)),),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    return Workload(model, **{**settings, **changes})


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True),
    ],
)
def test_optimizers(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = small()
    assert_same_steps(loss_of(model, optimizer=make(model.parameters())))


def test_clipping() -> None:
    assert_same_steps(loss_of(small(), clip_grad_norm=0.05))


def test_autocast() -> None:
    assert_same_steps(loss_of(small(), autocast=torch.bfloat16))


def test_scheduled_learning_rate() -> None:
    workload = loss_of(small())
    twin = twin_of(workload)
    plan = build_plan(capture(workload))
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(w.optimizer, 0.5)  # type: ignore[arg-type]
        for w in (workload, twin)
    ]
    for seed in range(4):
        losses = []
        for run in (lambda: call(plan, workload), lambda: run_step(twin)):
            torch.manual_seed(seed)
            losses.append(run())
        assert torch.equal(*losses)
        for schedule in schedules:
            schedule.step()
    for mine, other in zip(workload.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_kept_gradients_are_eagers_and_usable() -> None:
    workload = loss_of(small())
    twin = twin_of(workload)
    plan = build_plan(capture(workload), poison=True)
    torch.manual_seed(1)
    plan.step(*workload.args, *workload.targets, keep_grads=True)
    torch.manual_seed(1)
    F.cross_entropy(twin.model(*twin.args), *twin.targets).backward()
    for mine, other in zip(workload.model.parameters(), twin.model.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, other.grad)
        mine.grad.add_(1.0)  # no inference tensor
    with pytest.raises(UsageError, match=r"0\.weight already has a gradient"):
        plan.step(*workload.args, *workload.targets)


def test_loss_is_a_plain_detached_number() -> None:
    workload = loss_of(small())
    loss = build_plan(capture(workload)).step(*workload.args, *workload.targets)
    assert loss.shape == () and not loss.requires_grad and not loss.is_inference()
    loss += 1.0


def test_wrong_mode_shape_and_stale_model_are_refused() -> None:
    workload = loss_of(small())
    plan = build_plan(capture(workload))
    with pytest.raises(UsageError, match="training step"):
        plan(*workload.args)
    with pytest.raises(ShapeMismatch, match=r"\[5, 6\]"):
        plan.step(torch.rand(5, 6), torch.randint(0, 3, (5,)))
    workload.model.eval()
    with pytest.raises(Stale, match="training"):
        plan.step(*workload.args, *workload.targets)


def test_two_plans_and_threads() -> None:
    workloads = [load_workload(f"{TINY['unet']},mode=infer"), load_workload(f"{TINY['mlp']},mode=infer")]
    plans = [build_plan(capture(workload), poison=True) for workload in workloads]
    expected = [run_step(workload) for workload in workloads]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(8):
            if not torch.equal(call(plans[k], workloads[k]), expected[k]):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k % 2,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_result_outlives_plan_and_model() -> None:
    workload = load_workload(f"{TINY['mlp']},mode=infer")
    plan = build_plan(capture(workload))
    result = call(plan, workload)
    copied = result.clone()
    del plan, workload
    noise = [torch.rand(4096) for _ in range(8)]
    assert torch.equal(result, copied) and noise


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_without_a_hook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("plan", "probe"):
        monkeypatch.setattr(f"lowtide.run.{module}.load_hook", lambda: None)
    plan = assert_same_steps(load_workload(TINY[name]))
    assert plan.hook is None


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_verify_passes_and_leaves_no_trace(mode: str) -> None:
    workload = load_workload(f"{TINY['mlp']},mode={mode},dropout=0.1")
    program = capture(workload)
    before = copy.deepcopy(workload.model.state_dict())
    state = torch.get_rng_state()
    verdict = verify(program, build_plan(program))
    assert verdict.passed and verdict.bit_equal and verdict.max_rel_error == 0.0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], now) for name, now in workload.model.state_dict().items())
    assert workload.optimizer is None or len(workload.optimizer.state) == 0
