"""Runs eager and a captured program side by side and demands the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.unit.capture.interpreter import run
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.ir.verify import verify
from lowtide.workload import Workload

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Steps:
    """What three steps left behind."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    generator: Tensor = field(default_factory=torch.get_rng_state)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def assert_same_steps(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizer = adamw,
    clip: float | None = None,
    autocast: torch.dtype | None = None,
    warm: int = 0,
) -> Program:
    """Three steps, the rate changed before each: loss, gradients, weights, buffers, state, generator.

    `warm` eager steps come first on both sides.  Returns the program.
    """
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    theirs, ours = optimizer(twin), optimizer(model)
    for _ in range(warm):
        for one, its in ((model, ours), (twin, theirs)):
            torch.manual_seed(1)
            _eager_step(one, its, args, kwargs, targets, loss, clip, autocast)
    workload = Workload(model, args, kwargs, targets, loss, ours, clip, autocast=autocast)
    before = _everything(model, ours)
    program = capture(workload)
    verify(program.graph)
    _assert_equal(before, _everything(model, ours), "capture changed it: ")
    torch.manual_seed(5)
    expected = Steps()
    for step in range(3):
        _change_rate(theirs, step)
        value, gradients = _eager_step(twin, theirs, args, kwargs, targets, loss, clip, autocast)
        expected.losses.append(value)
        expected.gradients.append(gradients)
    expected.generator = torch.get_rng_state()
    torch.manual_seed(5)
    for step in range(3):
        _change_rate(ours, step)
        value, gradients = run(program, args, kwargs, targets)
        assert_bits(f"loss of step {step}", value, expected.losses[step])
        assert gradients.keys() == expected.gradients[step].keys()
        for name, gradient in gradients.items():
            assert_bits(f"gradient of {name} in step {step}", gradient, expected.gradients[step][name])
    assert torch.equal(torch.get_rng_state(), expected.generator), "generator"
    _assert_equal(_everything(twin, theirs), _everything(model, ours), "")
    return program


def assert_bits(what: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    same = torch.equal(ours, theirs) or torch.allclose(ours, theirs, 0.0, 0.0, equal_nan=True)
    assert same, f"{what} differs by {(ours.double() - theirs.double()).abs().max()}"
    if ours.is_floating_point():
        assert torch.equal(ours.signbit(), theirs.signbit()), f"signs of {what}"


def _eager_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
    targets: Any,
    loss: Callable[..., Tensor] | None,
    clip: float | None,
    autocast: torch.dtype | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        output = model(*args, **kwargs)
        value = loss(output, *targets) if loss is not None else output["loss"]
    value.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value.detach(), gradients


def _change_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (step + 1)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers, gradients and state by name."""
    found = {f"tensor {name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.clone()
        for key, state in optimizer.state.get(parameter, {}).items():
            if isinstance(state, Tensor):
                found[f"state {name}.{key}"] = state.clone()
    return found


def _assert_equal(theirs: dict[str, Tensor], ours: dict[str, Tensor], why: str) -> None:
    assert theirs.keys() == ours.keys(), why
    for name, tensor in theirs.items():
        assert_bits(why + name, ours[name], tensor)
