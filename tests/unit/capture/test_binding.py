"""Live tensors by name, other shapes refused, changed models noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.capture.interpreter import run
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.errors import ShapeMismatch, Stale
from lowtide.workload import Workload


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.last(self.norm(self.first(x))) * scale


def train(kind: Any = torch.optim.AdamW, **settings: Any) -> Program:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    return capture(
        Workload(model, (x,), {"scale": 2.0}, (y,), loss=nn.functional.mse_loss, optimizer=optimizer)
    )


def bind(program: Program) -> dict[int, Tensor]:
    w = program.workload
    return program.bind(w.args, w.kwargs, w.targets)


def test_every_resident_input_is_bound_to_the_users_tensor() -> None:
    program = train()
    tensors = bind(program)
    resident = {v for v in program.graph.inputs if program.graph.storage_of(v).role.resident}
    assert tensors.keys() == resident
    model = program.workload.model
    assert tensors[program.names["param:first.weight"]] is model.get_parameter("first.weight")
    assert tensors[program.names["buffer:norm.running_mean"]] is model.get_buffer("norm.running_mean")
    assert tensors[program.names["arg:0"]] is program.workload.args[0]
    assert tensors[program.names["target:0"]] is program.workload.targets[0]
    state = program.workload.optimizer.state[model.get_parameter("last.bias")]  # type: ignore[union-attr]
    assert tensors[program.names["state:last.bias:exp_avg_sq"]] is state["exp_avg_sq"]
    assert tensors[program.names["state:last.bias:step"]] is state["step"]
    for value, tensor in tensors.items():
        meta = program.graph.values[value].meta
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (meta.shape, meta.stride, meta.dtype)


def test_capture_creates_no_state_and_bind_does() -> None:
    program = train()
    assert not program.workload.optimizer.state  # type: ignore[union-attr]
    bind(program)
    assert len(program.workload.optimizer.state) == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((torch.randn(2, 4),), {"scale": 2.0}, r"arg:0 has shape \[2, 4\], the plan is for \[3, 4\]"),
        ((torch.randn(3, 4).double(),), {"scale": 2.0}, "arg:0 is torch.float64"),
        ((torch.randn(4, 3).t(),), {"scale": 2.0}, r"arg:0 has strides \(1, 3\)"),
        ((torch.randn(3, 4),), {"scale": 3.0}, "arg:scale is 3.0, captured with 2.0"),
        ((torch.randn(3, 4),), {}, "arg:scale is missing"),
        ((torch.randn(3, 4),), {"scale": 2.0, "more": None}, "arg:more is new"),
        ((None,), {"scale": 2.0}, "arg:0 is a NoneType"),
    ],
)
def test_other_arguments_are_refused(args: Any, kwargs: Any, message: str) -> None:
    program = train()
    with pytest.raises(ShapeMismatch, match=message):
        program.bind(args, kwargs, program.workload.targets)


def test_another_batch_in_other_memory_is_bound() -> None:
    program = train()
    batch = torch.randn(7, 4)[2:5]
    tensors = program.bind((batch,), program.workload.kwargs, program.workload.targets)
    assert tensors[program.names["arg:0"]] is batch


def test_one_tensor_passed_twice() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    x = torch.randn(3)
    program = capture(Workload(Sum(), (x, x)))
    assert len(program.graph.inputs) == 1
    y = torch.randn(3)
    assert torch.equal(run(program, (y, y))[0], y + y)
    with pytest.raises(ShapeMismatch, match="same tensor"):
        program.bind((y, x))


def test_strides_of_axes_with_one_element_mean_nothing() -> None:
    """`.contiguous()` would not change them, so a caller could do nothing about them."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 2, 3), torch.randn(4, 1, 8, 8)
    program = capture(Workload(model, (x,)))
    other = x.to(memory_format=torch.channels_last)
    assert other.stride() != x.stride() and other.is_contiguous()
    tensor = program.bind((other,))[program.names["arg:0"]]
    assert tensor.stride() == x.stride() and tensor.data_ptr() == other.data_ptr()
    torch.testing.assert_close(run(program, (other,))[0], model(other).detach())
    with pytest.raises(ShapeMismatch, match=r"sparse_coo tensor: pass it dense"):
        program.bind((x.to_sparse(),))


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        self.total.add_(b)
        return self.layer(b) + a


@pytest.mark.parametrize("training", [True, False])
def test_arguments_that_share_memory_only_now(training: bool) -> None:
    torch.manual_seed(0)
    model, a, b = Adds(), torch.randn(4, 4), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    loss = torch.sum if training else None
    program = capture(Workload(model, (a, b), loss=loss, optimizer=optimizer))
    whole = torch.randn(8, 4)
    program.bind((whole[:4], whole[4:]))  # side by side
    with pytest.raises(ShapeMismatch, match=r"arg:1 shares memory with arg:0, .*\.clone\(\)"):
        program.bind((whole[:4], whole[2:6]))
    with pytest.raises(ShapeMismatch, match="arg:1 shares memory with buffer:total"):
        program.bind((a, model.total))
    weight = model.layer.weight.detach()
    if training:
        with pytest.raises(ShapeMismatch, match=r"arg:1 shares memory with param:layer\.weight"):
            program.bind((a, weight))
    else:
        program.bind((a, weight))  # only read


def make_eval(program: Program) -> None:
    program.workload.model.get_submodule("norm").eval()


def freeze(program: Program) -> None:
    program.workload.model.get_parameter("last.bias").requires_grad_(False)


def move(program: Program) -> None:
    program.workload.model.first.weight.data = torch.ones(4, 4)  # type: ignore[union-attr]


def widen(program: Program) -> None:
    program.workload.model.last = nn.Linear(4, 3)  # type: ignore[assignment]


def convert(program: Program) -> None:
    program.workload.model.double()


def transpose(program: Program) -> None:
    first = program.workload.model.first
    first.weight.data = first.weight.data.t()  # type: ignore[union-attr]


def remove(program: Program) -> None:
    program.workload.model.norm.running_mean = None  # type: ignore[union-attr, assignment]


def add(program: Program) -> None:
    program.workload.model.register_buffer("more", torch.ones(1))


def add_group(program: Program) -> None:
    program.workload.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # type: ignore[union-attr]


def reorder(program: Program) -> None:
    program.workload.optimizer.param_groups[0]["params"].reverse()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (make_eval, "module norm has training=False"),
        (freeze, "param:last.bias has requires_grad False"),
        (move, "param:first.weight lies in other memory"),
        (widen, r"param:last.weight has shape \(3, 4\)"),
        (convert, "param:first.weight has dtype torch.float64"),
        (transpose, r"param:first.weight has strides \(1, 4\)"),
        (remove, "buffer:norm.running_mean no longer exists"),
        (add, "buffer:more is new"),
        (add_group, "2 parameter groups, captured with 1"),
        (reorder, "group 0 of the optimizer holds other"),
    ],
)
def test_changed_models_are_noticed(change: Callable[[Program], None], message: str) -> None:
    program = train()
    bind(program)
    change(program)
    with pytest.raises(Stale, match=message):
        bind(program)


@pytest.mark.parametrize(
    ("kind", "settings", "name", "value"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.0}, "weight_decay", 0.1),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum", 0.0),
        (torch.optim.SGD, {"momentum": 0.9}, "nesterov", True),
        (torch.optim.Adam, {}, "maximize", True),
    ],
)
def test_an_optimizer_that_computes_something_else_is_noticed(
    kind: Any, settings: dict[str, Any], name: str, value: Any
) -> None:
    program = train(kind, **settings)
    bind(program)
    program.scalars()
    program.workload.optimizer.param_groups[0][name] = value  # type: ignore[union-attr]
    with pytest.raises(Stale, match="other operators"):
        program.scalars()


def test_parameters_that_stepped_apart_are_noticed() -> None:
    program = train()
    bind(program)
    state = program.workload.optimizer.state[program.workload.model.get_parameter("last.bias")]  # type: ignore[union-attr]
    state["step"].add_(1)
    with pytest.raises(Stale, match="different numbers of steps"):
        program.scalars()


def test_a_loaded_optimizer_state_is_followed() -> None:
    program = train()
    optimizer = program.workload.optimizer
    assert optimizer is not None
    run(program, program.workload.args, program.workload.kwargs, program.workload.targets)
    saved = optimizer.state_dict()
    before = program.scalars()
    run(program, program.workload.args, program.workload.kwargs, program.workload.targets)
    assert program.scalars() != before
    optimizer.load_state_dict(saved)
    bind(program)
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert program.scalars() == before or steps == [2.0] * 6  # the saved dictionary holds the live tensors


def test_a_scheduler_sees_that_the_optimizer_has_stepped() -> None:
    program = train()
    optimizer = program.workload.optimizer
    assert optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run(program, program.workload.args, program.workload.kwargs, program.workload.targets)
    before = program.scalars()
    scheduler.step()  # warns, and warnings are errors here, if it thinks that no step was taken
    assert program.scalars() != before
