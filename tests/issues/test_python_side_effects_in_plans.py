"""Python side effects in a model: right in a plan, or refused at capture; never lost, never done twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.issues.ladder import build, climb, rungs
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.run.native import run_step
from lowtide.workload import Workload

CALLS: list[int] = []
TOTAL = {"calls": 0}


class Buffered(nn.Module):
    """A counter, a running mean and a ring of recent means, all in buffers; one assigned, not written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("ring", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0).detach(), 0.5)
            self.ring.copy_(self.ring.roll(1, 0))
            self.ring[0] = self.mean
        return y / self.calls + self.ring.sum(0)


class Rebinds(nn.Module):
    """Buffers that are assigned: a mean, two that change places; the one there before is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in ("mean", "one", "other"):
            self.register_buffer(name, torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, old = self.layer(x), self.mean
        self.mean = 0.5 * self.mean + y.mean(0).detach()
        self.one, self.other = self.other, self.one
        return y * self.one + self.mean, old


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_are_assigned(training: bool) -> None:
    torch.manual_seed(0)
    model = Rebinds().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    loss = (lambda y: (y[0] * y[1]).square().mean()) if training else None
    climb(Workload(model, (torch.randn(6, 4).double(),), loss=loss, optimizer=optimizer), (2,), steps=3)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_are_right_once_per_step(training: bool) -> None:
    torch.manual_seed(0)
    model = Buffered().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    loss = (lambda y: y.square().mean()) if training else None
    climb(Workload(model, (torch.randn(6, 4).double(),), loss=loss, optimizer=optimizer), (2,), steps=3)


def test_a_tensor_of_a_closure() -> None:
    torch.manual_seed(0)
    memory, table = torch.zeros(4), [torch.ones(4)]

    class Remembers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            with torch.no_grad():
                memory.mul_(0.5).add_(y.mean(0))
                table[0].add_(1.0)
            return y * table[0] + memory

    model = Remembers(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = Workload(model, (torch.randn(6, 4),), loss=lambda y: y.square().mean(), optimizer=optimizer)
    program = capture(step)
    assert not memory.any() and torch.equal(table[0], torch.ones(4))
    expected = [(run_step(step), memory.clone(), table[0].clone()) for _ in range(2)]
    for rung in rungs(program, (2,)):
        plan = build(program, rung)
        memory.zero_()
        table[0].fill_(1.0)
        for wanted in expected:
            for ours, theirs in zip((plan.step(*step.args), memory, table[0]), wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0 if rung.exact else 1e-5, atol=0)


class Effects(nn.Module):
    """One side effect, given as a function of the module."""

    def __init__(self, effect: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.effect = nn.Linear(4, 4), effect
        self.calls, self.seen, self.last = 0, [], None
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        factor = self.effect(self, y)
        return y if factor is None else y * factor


def count(module: Any, y: Tensor) -> int:
    module.calls += 1
    return int(module.calls)


def count_globally(module: Any, y: Tensor) -> None:
    TOTAL["calls"] += 1


def count_by_setattr(module: Any, y: Tensor) -> None:
    module.layer.__dict__["calls"] = module.layer.__dict__.get("calls", 0) + 1


EFFECTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "counter": count,
    "global dictionary": count_globally,
    "global list": lambda module, y: CALLS.append(1),
    "list of tensors": lambda module, y: module.seen.append(y.detach()),
    "kept activation": lambda module, y: setattr(module, "last", y),
    "attribute of a submodule": count_by_setattr,
    "new buffer": lambda module, y: module.register_buffer("extra", y[0].detach().clone()),
    "rebound buffer": lambda module, y: setattr(module, "kept", torch.ones(3)),
    "attribute of a function": lambda module, y: setattr(count, "calls", getattr(count, "calls", 0) + 1),
    "python random": lambda module, y: random.random(),
    "layer drop": lambda module, y: 0.0 if random.random() < 0.5 else 1.0,
    "alternation": lambda module, y: module.seen.append(1) or len(module.seen) % 2,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_graph_cannot_hold_is_refused_and_undone(name: str, training: bool) -> None:
    CALLS.clear()
    TOTAL["calls"] = 0
    model = Effects(EFFECTS[name])
    before = {key: value for key, value in vars(model).items() if key not in ("_modules", "_buffers", "seen")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    loss = (lambda y: y.square().mean()) if training else None
    with pytest.raises(CaptureError) as caught:
        capture(Workload(model, (torch.randn(2, 4),), loss=loss, optimizer=optimizer))
    assert len(str(caught.value)) < 400
    assert CALLS == [] and TOTAL == {"calls": 0} and not hasattr(count, "calls")
    assert all(vars(model)[key] is value or vars(model)[key] == value for key, value in before.items())
    assert model.seen == [] and model.last is None and list(model._buffers) == ["kept"]
    assert model.kept.shape == (4,) and "calls" not in model.layer.__dict__


def test_attributes_are_not_taken_for_globals() -> None:
    """`self.proxy` names an attribute; a global of that name is none of the model's business."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.PROXY  # type: ignore[operator]

    layer = Layer(4, 4)
    layer.PROXY = 2.0  # type: ignore[assignment]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    capture(Workload(layer, (torch.randn(2, 4),), loss=torch.sum, optimizer=optimizer))


class Proxy:
    """Answers any name with another proxy, as handles of foreign libraries do."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Proxy:
        return Proxy()


PROXY = Proxy()


def test_a_proxy_among_the_globals() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if PROXY is not None else x

    layer = Layer(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    capture(Workload(layer, (torch.randn(2, 4),), loss=torch.sum, optimizer=optimizer))
