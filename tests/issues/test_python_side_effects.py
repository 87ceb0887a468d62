"""A Python side effect in the model is right, or refused and undone; never silently lost."""

from __future__ import annotations

import pytest
import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.workload import Workload


def make_model(memory: Tensor) -> nn.Module:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            with torch.no_grad():
                memory.mul_(0.5).add_(y.mean(0))
            return y + memory

    return Remembers()


def test_a_tensor_of_a_closure_that_the_step_changes() -> None:
    torch.manual_seed(0)
    memory = torch.zeros(4)
    model = make_model(memory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    from tests.unit.capture.interpreter import run

    x = torch.randn(3, 4)
    program = capture(Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer))
    assert torch.equal(memory, torch.zeros(4))
    other = torch.zeros(4)
    twin = make_model(other)
    twin.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        ours, _ = run(program, (x,))
        loss = twin(x).square().mean()
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(ours, loss)
        assert torch.equal(memory, other)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


def test_a_counter_is_refused_by_name_and_undone() -> None:
    model = Counts()
    with pytest.raises(CaptureError, match=r"model\.calls \(0 became \d\).*cache outside"):
        capture(Workload(model, (torch.randn(2, 4),)))
    assert model.calls == 0


def test_a_counter_in_a_buffer_is_right() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) / self.calls

    model = Buffered()
    assert_same_steps(model, (torch.randn(2, 4),), loss=lambda y: y.square().mean())
    assert model.calls.item() == 3
