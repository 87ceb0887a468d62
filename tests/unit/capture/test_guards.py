"""Python that changed since capture is noticed: a plan holds the numbers of its own time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.capture.guards import MOST_ENTRIES
from lowtide.errors import Stale
from lowtide.run.plan import build_plan
from lowtide.run.saved import load_plan
from lowtide.workload import Workload

RATES = {"noise": 0.5}
SCALE = 2.0


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Net(nn.Module):
    """Reads numbers in every way that Python has."""

    slope = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.drop = nn.Linear(4, 4), nn.ReLU(), nn.Dropout(0.1)
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.temperature, self.mask = 3.0, torch.ones(4)
        self.scales, self.settings = [1.0, 2.0], {"bias": 0.25, "deep": {"on": True}}
        self.change = doubled
        self.history: list[float] = []
        self.epoch = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.act(self.first(x))) / self.temperature * self.mask
        y = self.stack(y) * self.scales[1] + self.settings["bias"] * self.slope
        return self.change(y) * RATES["noise"] * SCALE if self.settings["deep"]["on"] else y


def program_of(training: bool = True) -> Program:
    torch.manual_seed(0)
    model = Net()
    if not training:
        return capture(Workload(model, (torch.randn(3, 4),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(Workload(model, (torch.randn(3, 4),), loss=make_loss(), optimizer=optimizer))


def make_loss(weight: float = 2.0) -> Callable[[Tensor], Tensor]:
    def loss(y: Tensor) -> Tensor:
        return (y * weight).square().mean()

    return loss


def bind(program: Program) -> None:
    program.bind(program.workload.args)


def change_closure(program: Program) -> None:
    program.workload.loss.__closure__[0].cell_contents = 3.0  # type: ignore[union-attr]


def at(path: str, value: Any) -> Callable[[Program], None]:
    """Sets an attribute of the model."""

    def change(program: Program) -> None:
        owner, _, name = path.rpartition(".")
        setattr(program.workload.model.get_submodule(owner), name, value)

    return change


def on_model(change: Callable[[Any], Any]) -> Callable[[Program], None]:
    return lambda program: change(program.workload.model)


CHANGES: dict[str, tuple[Callable[[Program], None], str]] = {
    "dropout": (at("drop.p", 0.5), r"model\.drop\.p \(0\.1 became 0\.5\) since capture"),
    "temperature": (at("temperature", 4.0), r"model\.temperature \(3\.0 became 4\.0\)"),
    "another mask": (at("mask", torch.ones(4)), r"model\.mask \(a tensor"),
    "activation": (at("act", nn.GELU()), r"model\.act \(another ReLU became another GELU\)"),
    "activation in a stack": (
        on_model(lambda m: m.stack.__setitem__(1, nn.ReLU())),
        r"model\.stack\.1 \(another Tanh",
    ),
    "list": (on_model(lambda m: m.scales.__setitem__(1, 5.0)), r"model\.scales\[1\] \(2\.0 became 5\.0\)"),
    "dictionary": (on_model(lambda m: m.settings.update(bias=1.0)), r"settings\['bias'\]"),
    "nested dictionary": (on_model(lambda m: m.settings["deep"].update(on=False)), r"\['on'\] \(True"),
    "function": (at("change", torch.sin), r"model\.change"),
    "class attribute in its way": (at("slope", 1.0), r"model\.slope \(nothing became 1\.0\)"),
    "another forward": (
        on_model(lambda m: setattr(m.first, "forward", MethodType(lambda self, x: x, m.first))),
        r"first\.forward",
    ),
    "forward hook": (
        on_model(lambda m: m.first.register_forward_hook(lambda module, args, y: y * 2)),
        r"first\._forward_hooks",
    ),
    "backward hook": (
        on_model(lambda m: m.first.register_full_backward_hook(lambda *_: None)),
        r"first\._backward_hooks",
    ),
    "closure of the loss": (change_closure, r"closure of make_loss.*weight \(2\.0 became 3\.0\)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    program = program_of()
    bind(program)
    change, message = CHANGES[name]
    change(program)
    with pytest.raises(Stale, match=message):
        bind(program)


def test_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(training=False)
    with monkeypatch.context() as patch:
        patch.setitem(RATES, "noise", 0.1)
        with pytest.raises(Stale, match=r"RATES\['noise'\] \(0\.5 became 0\.1\)"):
            bind(program)
    with monkeypatch.context() as patch:
        patch.setattr("tests.unit.capture.test_guards.SCALE", 1.0)
        with pytest.raises(Stale, match=r"SCALE \(2\.0 became 1\.0\)"):
            bind(program)
    with monkeypatch.context() as patch:
        patch.setattr(Net, "slope", 1.0)
        with pytest.raises(Stale, match=r"Net\.slope \(0\.5 became 1\.0\)"):
            bind(program)
    bind(program)  # set back


def test_the_default_type_of_new_tensors() -> None:
    program = program_of()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(Stale, match=r"get_default_dtype\(\) \(torch\.float32 became torch\.float64\)"):
            bind(program)
    finally:
        torch.set_default_dtype(torch.float32)
    bind(program)


def test_what_no_forward_names_may_change() -> None:
    program = program_of()
    model: Any = program.workload.model
    model.history.append(1.0)
    model.epoch, model.best = 1, 0.5
    model.mask.fill_(2.0)  # read anew by each step
    model.long = [0.0] * (MOST_ENTRIES + 1)
    bind(program)


def test_a_plan_that_was_captured_at_another_rate_does_not_run() -> None:
    program = program_of(training=False)
    plan, model = build_plan(program), program.workload.model
    torch.manual_seed(1)
    before = plan(*program.workload.args)
    torch.manual_seed(1)
    assert torch.equal(before, model(*program.workload.args))
    model.get_submodule("drop").p = 0.9  # type: ignore[assignment]
    with pytest.raises(Stale, match="capture again"):
        plan(*program.workload.args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.drop, "p", 0.5), r"drop\.p is 0\.5, the plan was made with 0\.1"),
        (lambda m: setattr(m, "act", nn.GELU()), "act is 'GELU', the plan was made with 'ReLU'"),
        (lambda m: setattr(m, "temperature", 3), r"temperature is 3, the plan was made with 3\.0"),
    ],
)
def test_a_saved_plan_is_for_a_model_of_these_numbers(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    program = program_of(training=False)
    build_plan(program).save(tmp_path / "net.lt")
    model = Net()
    loaded = load_plan(tmp_path / "net.lt", model)
    change(model)
    with pytest.raises(Stale, match=message):
        load_plan(tmp_path / "net.lt", model)
    with pytest.raises(Stale, match="since capture"):
        loaded(*program.workload.args)
