"""What cannot be captured is refused: with what, the user's line, a remedy, and nothing left changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.workload import Workload

HERE = "test_refusals.py:"


def mean_square(output: Tensor, *_: Any) -> Tensor:
    return output.square().mean()


class Calls(nn.Module):
    """A linear layer, then whatever the test asks for."""

    def __init__(self, body: Callable[[Calls, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


def refuse(model: nn.Module, training: bool = True, **changes: Any) -> CaptureError:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    settings = {"loss": mean_square if training else None, "optimizer": optimizer, **changes}
    state = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    with pytest.raises(CaptureError) as caught:
        capture(Workload(model, (torch.ones(2, 4),), **settings))
    assert state == (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    assert all(p.grad is None for p in model.parameters()) or changes.get("dirty")
    assert caught.value.remedy, "no remedy"
    return caught.value


# -- values that only exist when the step runs ------------------------------------------------------------


def by_value(model: Calls, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def item(model: Calls, y: Tensor) -> Tensor:
    return y * y.max().item()


def non_zero(model: Calls, y: Tensor) -> Tensor:
    return y[y.nonzero()[:, 0]]


def boolean_mask(model: Calls, y: Tensor) -> Tensor:
    return y[y > 0]


def unique(model: Calls, y: Tensor) -> Tensor:
    return y.round().unique()


def by_address(model: Calls, y: Tensor) -> Tensor:
    return y * (y.data_ptr() % 7)


def test_addresses() -> None:
    assert "data pointer" in refuse(Calls(by_address)).what


def test_what_export_prints_is_kept_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    refuse(Calls(by_value), training=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("body", [by_value, item, non_zero, boolean_mask, unique])
def test_data_dependence(body: Any, training: bool) -> None:
    error = refuse(Calls(body), training)
    assert error.source == f"{HERE}{body.__code__.co_firstlineno + 1}"


# -- chance -----------------------------------------------------------------------------------------------


def layer_drop(model: Calls, y: Tensor) -> Tensor:
    return y if random.random() < 0.5 else y * 2


def numpy_noise(model: Calls, y: Tensor) -> Tensor:
    return y + float(np.random.rand())


OWN = np.random.default_rng(0)


def own_generator(model: Calls, y: Tensor) -> Tensor:
    return y + float(OWN.random())


def own_literal(model: Calls, y: Tensor) -> Tensor:
    return y * torch.tensor(float(OWN.random()))


def seeds(model: Calls, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return y


def seeds_in_a_fork(model: Calls, y: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return y + torch.rand(4)


def torch_generator(model: Calls, y: Tensor) -> Tensor:
    return y + torch.rand(4, generator=torch.Generator().manual_seed(0))


def dropout_in_checkpoint(model: Calls, y: Tensor) -> Tensor:
    return checkpoint(lambda z: nn.functional.dropout(z, 0.5).exp(), y, use_reentrant=False)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (layer_drop, "random"),
        (numpy_noise, "numpy.random"),
        (own_generator, "differ"),
        (own_literal, "other contents"),
        (seeds, "seed"),
        (seeds_in_a_fork, "seed"),
        (torch_generator, "Generator"),
        (dropout_in_checkpoint, "checkpoint"),
    ],
)
def test_chance(body: Any, word: str) -> None:
    assert word in str(refuse(Calls(body)))


# -- Python side effects ----------------------------------------------------------------------------------

COUNTER = 0
LOG: list[int] = []
SHARED = {"calls": 0}


class Registry:
    """A class with state of its own."""

    total = 0


def attribute(model: Calls, y: Tensor) -> Tensor:
    model.calls += 1
    return y


def append(model: Calls, y: Tensor) -> Tensor:
    model.seen.append(1)
    return y


def a_global(model: Calls, y: Tensor) -> Tensor:
    global COUNTER
    COUNTER += 1
    return y


def a_global_list(model: Calls, y: Tensor) -> Tensor:
    LOG.append(1)
    return y


def called_function(model: Calls, y: Tensor) -> Tensor:
    return count_in_dictionary(y)


def count_in_dictionary(y: Tensor) -> Tensor:
    SHARED["calls"] += 1
    return y


def default_argument(model: Calls, y: Tensor, memory: list[int] = []) -> Tensor:  # noqa: B006
    memory.append(1)
    return y


def class_attribute(model: Calls, y: Tensor) -> Tensor:
    Registry.total += 1
    return y


def keeps_a_tensor(model: Calls, y: Tensor) -> Tensor:
    model.last = y
    return y


def switches_mode(model: Calls, y: Tensor) -> Tensor:
    model.layer.eval()
    return y


def make_closure() -> tuple[Callable[[Calls, Tensor], Tensor], Callable[[], int]]:
    count = 0

    def closure(model: Calls, y: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return y

    return closure, lambda: count


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (attribute, "model.calls (0 became"),
        (append, "model.seen[0]"),
        (a_global, "COUNTER"),
        (a_global_list, "LOG"),
        (called_function, "SHARED['calls']"),
        (default_argument, "defaults of default_argument"),
        (class_attribute, "Registry.total"),
        (keeps_a_tensor, "model.last"),
        (switches_mode, "training"),
    ],
)
def test_side_effects(body: Any, name: str, training: bool) -> None:
    model = Calls(body)
    error = refuse(model, training)
    assert name in error.what
    assert (model.calls, model.seen, COUNTER, LOG, SHARED, Registry.total) == (0, [], 0, [], {"calls": 0}, 0)
    assert not hasattr(model, "last") and model.layer.training


def test_side_effect_in_a_closure() -> None:
    body, count = make_closure()
    assert "closure of" in refuse(Calls(body)).what
    assert count() == 0


def test_side_effect_in_the_loss() -> None:
    losses: list[Tensor] = []

    def remember(output: Tensor) -> Tensor:
        losses.append(output)
        return output.mean()

    assert "losses" in refuse(Calls(lambda _, y: y), loss=remember).what
    assert not losses


# -- the optimizer, the gradients, the hooks --------------------------------------------------------------


def plain() -> Calls:
    return Calls(lambda _, y: y)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: type("Own", (torch.optim.SGD,), {})(p, lr=0.1), "Own"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
    ],
)
def test_optimizers(make: Any, word: str) -> None:
    model = plain()
    assert word in refuse(model, optimizer=make(model.parameters())).what


def test_optimizer_with_a_hook() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "hook" in refuse(model, optimizer=optimizer).what


def test_parameter_without_an_optimizer() -> None:
    model = plain()
    optimizer = torch.optim.SGD([model.layer.weight], lr=0.1)
    assert "layer.bias" in refuse(model, optimizer=optimizer).what


def test_optimizer_with_a_foreign_parameter() -> None:
    model = plain()
    foreign = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), foreign], lr=0.1)
    assert "[3]" in refuse(model, optimizer=optimizer).what


def test_gradients_at_entry() -> None:
    model = plain()
    model.layer.weight.grad = torch.ones(4, 4)
    with pytest.raises(CaptureError, match=r"layer\.weight.*zero_grad"):
        capture(
            Workload(
                model,
                (torch.ones(2, 4),),
                loss=mean_square,
                optimizer=torch.optim.SGD(model.parameters(), lr=1),
            )
        )


def test_hooks() -> None:
    model = plain()
    model.layer.weight.register_hook(lambda gradient: gradient * 2)
    assert "layer.weight" in refuse(model).what
    model = plain()
    model.layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "layer.weight" in refuse(model).what
    model = plain()
    model.layer.register_full_backward_hook(lambda *_: None)
    assert "layer" in refuse(model).what


# -- parameters and arguments -----------------------------------------------------------------------------


def test_parameter_reached_by_another_way() -> None:
    model = plain()
    hidden = [model.layer.weight]
    model.body = lambda _, y: y @ hidden[0]
    assert "requires a gradient" in refuse(model).what


def test_view_of_a_parameter_from_outside() -> None:
    model = plain()
    outside = model.layer.weight.detach()
    model.body = lambda _, y: y @ outside
    assert "is a view of a parameter" in refuse(model).what


def test_argument_that_requires_a_gradient() -> None:
    model = plain()
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(CaptureError, match="arg:0 requires a gradient"):
        capture(Workload(model, (x,), loss=mean_square, optimizer=torch.optim.SGD(model.parameters(), lr=1)))


def test_argument_of_an_unknown_type() -> None:
    with pytest.raises(CaptureError, match=r"arg:batch is a object"):
        capture(Workload(plain(), (torch.ones(2, 4),), {"batch": object()}))


def test_sparse_argument() -> None:
    with pytest.raises(CaptureError, match=r"arg:0 is a torch\.sparse_coo tensor"):
        capture(Workload(plain(), (torch.eye(4).to_sparse(),)))


def test_overlapping_arguments_of_which_one_is_written() -> None:
    class Writes(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            return a[:4] + b[:4]

    base = torch.ones(8)
    with pytest.raises(CaptureError, match="arg:0, arg:1 share"):
        capture(Workload(Writes(), (base[:6], base[2:])))


def test_replaced_parameter() -> None:
    def replace(model: Calls, y: Tensor) -> Tensor:
        model.layer.weight = nn.Parameter(torch.ones(4, 4))
        return y

    assert "replaces its param layer.weight" in refuse(Calls(replace)).what


# -- losses and results -----------------------------------------------------------------------------------


def test_losses() -> None:
    assert "not one number" in refuse(plain(), loss=lambda y: y).what
    assert "does not depend" in refuse(plain(), loss=lambda y: y.detach().sum()).what
    assert "no loss" in refuse(plain(), loss=None).what


def test_result_that_is_no_tree_of_tensors() -> None:
    class Box:
        pass

    assert "Box" in refuse(Calls(lambda _, y: Box()), training=False).what  # type: ignore[arg-type, return-value]


def test_step_that_fails() -> None:
    error = refuse(Calls(lambda _, y: y @ y))
    assert "RuntimeError" in error.what and error.source.startswith(HERE)
