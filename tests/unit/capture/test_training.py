"""Three steps of a captured program are eager's, to the bit: models of every kind that users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.capture.same import adamw, assert_same_steps
from torch import Tensor, nn
from torch.nn import functional

from lowtide.ir.graph import Role
from lowtide.workloads.gpt2 import gpt2
from lowtide.workloads.unet import unet


def mean_square(output: Tensor, *_: Any) -> Tensor:
    return output.float().square().mean()


class ConvNet(nn.Module):
    """Convolution, BatchNorm, in-place ReLU, dropout, slicing assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.drop, self.drop2 = nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Dropout2d(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop2(self.drop(self.relu(self.norm(self.conv(x)))))
        x = functional.max_pool2d(x, 2).mean((2, 3))
        x[:, 0] = 0.5
        return self.head(x)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_convolutions(layout: torch.memory_format, clip: float | None) -> None:
    model = ConvNet().to(memory_format=layout)
    x = torch.randn(2, 3, 8, 8).to(memory_format=layout)
    program = assert_same_steps(
        model, (x,), targets=(torch.tensor([1, 2]),), loss=functional.cross_entropy, clip=clip
    )
    assert not any(
        node.writes for node in program.graph if node.op.__class__.__name__ == "Aten" and node.outputs
    )
    copied = [n for n in program.graph if str(getattr(n.op, "overload", "")) == "aten.copy_.default"]
    assert len(copied) == 3  # mean, variance, number of batches: each exactly once


def test_channels_last_input_to_contiguous_weights() -> None:
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_same_steps(
        ConvNet(), (x,), targets=(torch.tensor([1, 2]),), loss=functional.cross_entropy, clip=0.1
    )


def test_non_contiguous_input() -> None:
    x = torch.randn(6, 2, 8).transpose(0, 1)[:, ::2]
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 3))
    assert_same_steps(model, (x,), loss=mean_square)


class Language(nn.Module):
    """Embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.middle = nn.Linear(6, 6)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(ids)).tanh())


def test_tied_embedding_and_head() -> None:
    ids = torch.randint(0, 11, (2, 5))
    program = assert_same_steps(
        Language(),
        (ids,),
        targets=(ids.flatten(),),
        loss=lambda y, t: functional.cross_entropy(y.flatten(0, 1), t),
    )
    assert program.names["param:embedding.weight"] == program.names["param:head.weight"]
    assert set(program.updates) == {"embedding.weight", "middle.weight", "middle.bias"}


def test_parameters_that_share_memory_without_being_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    program_model = model
    x = torch.randn(3, 4)
    twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twin.load_state_dict(model.state_dict())
    from tests.unit.capture.interpreter import run

    from lowtide.capture import capture
    from lowtide.workload import Workload

    twin[1].weight.data = twin[0].weight.data
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    program = capture(Workload(program_model, (x,), loss=mean_square, optimizer=ours))
    for _ in range(2):
        run(program, (x,))
        mean_square(twin(x)).backward()
        theirs.step()
        theirs.zero_grad()
    assert torch.equal(model[0].weight, twin[0].weight)
    roles = [s for s in program.graph.storages.values() if s.role is Role.PARAM]
    assert len(roles) == 3


class Twice(nn.Module):
    """One module used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


def test_a_module_used_twice() -> None:
    program = assert_same_steps(Twice(), (torch.randn(3, 5),), loss=mean_square)
    assert set(program.updates) == {"layer.weight", "layer.bias"}


def test_frozen_and_unused_parameters() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    program = assert_same_steps(
        Partly(),
        (torch.randn(2, 4),),
        loss=mean_square,
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
    )
    assert set(program.updates) == {"used.weight", "used.bias"}
    assert "param:unused.weight" in program.names


class Dictionary(nn.Module):
    """Keyword arguments, a dictionary in and out, None in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, Any], *, mask: Tensor | None = None, scale: float = 1.0
    ) -> dict[str, Any]:
        x = self.layer(batch["x"]) * scale
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        return {"loss": functional.cross_entropy(x, batch["y"]), "logits": x, "cache": None}


def test_dictionaries_keywords_and_none() -> None:
    batch = {"x": torch.randn(2, 4), "y": torch.tensor([0, 2]), "extra": None}
    kwargs = {"mask": torch.tensor([[True, False, False]]), "scale": 0.5}
    program = assert_same_steps(Dictionary(), (batch,), kwargs)
    assert {"arg:0.x", "arg:0.y", "arg:mask"} <= set(program.names)


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.5, "maximize": True},
        {"weight_decay": 0.1},
        {},
    ],
)
def test_sgd(settings: dict[str, Any], warm: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    assert_same_steps(
        model,
        (x,),
        loss=mean_square,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **settings),
        warm=warm,
    )


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("settings", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}])
def test_adam(kind: Any, settings: dict[str, Any], warm: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert_same_steps(
        model,
        (torch.randn(3, 4),),
        loss=mean_square,
        optimizer=lambda m: kind(m.parameters(), **settings),
        warm=warm,
    )


def test_two_parameter_groups() -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        layers = list(model.children())
        return torch.optim.AdamW(
            [
                {"params": layers[0].parameters(), "weight_decay": 0.0, "lr": 0.1},
                {"params": layers[2].parameters(), "betas": (0.5, 0.6)},
            ]
        )

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    program = assert_same_steps(model, (torch.randn(3, 4),), loss=mean_square, optimizer=groups, clip=0.01)
    assert any(name.startswith("scalar:update[1]") for name in program.names)


class NoisySquare(torch.autograd.Function):
    """Draws random numbers and saves an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(x, noise.exp())
        return x * x * noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, saved = ctx.saved_tensors
        return 2 * x * gradient * saved.log()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return NoisySquare.apply(self.layer(x))


def test_a_custom_function_that_draws_random_numbers() -> None:
    program = assert_same_steps(Custom(), (torch.randn(3, 4),), loss=mean_square)
    assert "aten.rand_like.default" in {getattr(node.op, "overload", "") for node in program.graph}


class Assignments(nn.Module):
    """In-place effects on views of views, through aliases made before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        early = y.view(3, 2, 3)
        flat = y.view(-1)
        y[1:, 2:4] *= 2
        early[:, 1].add_(1)
        flat[::5] = 0
        y.t()[0].clamp_(min=0.1)
        y[y.new_zeros(1).long()] = 3.0
        z = torch.zeros(3, 6)
        z[:, :3] = early.sum(1)
        z[0].copy_(flat[:6])
        z.unsqueeze_(0)
        return z * y + torch.diagonal(y)[:, None]


def test_slicing_assignments_through_aliases() -> None:
    assert_same_steps(Assignments(), (torch.randn(3, 6),), loss=mean_square)


class OwnBuffers(nn.Module):
    """Buffers changed in place, rebound, written through ``out=``; a plain tensor attribute counts too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("rebound", torch.ones(4))
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
            torch.add(y[0], 1, out=self.last)
            self.rebound = self.rebound * 0.5 + self.mean
            self.calls += 1
        return y + self.mean + self.calls + self.rebound


def test_buffers_that_the_model_changes() -> None:
    model = OwnBuffers()
    assert_same_steps(model, (torch.randn(3, 4),), loss=mean_square)
    assert model.calls.item() == 3


def test_constants_and_factories() -> None:
    offset = torch.randn(4)

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.table = torch.randn(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + offset * self.table
            return y + torch.arange(4) + torch.full((4,), 0.5)

    program = assert_same_steps(Constants(), (torch.randn(3, 4),), loss=mean_square)
    assert sum(name.startswith("const:") for name in program.names) == 3


@pytest.mark.parametrize("inside", [False, True])
def test_autocast(inside: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                return self.second(self.first(self.first(x)).softmax(-1))

    assert_same_steps(
        Half(), (torch.randn(3, 8),), loss=mean_square, autocast=None if inside else torch.bfloat16
    )


def test_loss_with_parameters_and_buffers_of_its_own() -> None:
    model = nn.Linear(4, 3)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    program = assert_same_steps(
        model, (torch.randn(5, 4),), targets=(torch.tensor([0, 1, 2, 0, 1]),), loss=loss
    )
    assert "buffer:loss.weight" in program.names


@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
def test_gpt2(attention: Any) -> None:
    w = gpt2(layers=2, dim=16, heads=2, seq=8, batch=2, vocab=32, attention=attention, dropout=0.1)
    if attention == "sdpa":
        w = gpt2(layers=2, dim=16, heads=2, seq=8, batch=2, vocab=32)
    assert_same_steps(w.model, w.args, targets=w.targets, loss=w.loss, clip=1.0)


def test_unet() -> None:
    w = unet(batch=2, size=16, width=4, depth=2, dropout=0.1)
    assert_same_steps(w.model, w.args, targets=w.targets, loss=w.loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def test_recurrent_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert_same_steps(Recurrent(), (torch.randn(2, 5, 4),), loss=mean_square)


def test_group_norm_layer_norm_activation_zoo() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(inplace=True), nn.Hardswish(inplace=True),
        nn.LeakyReLU(0.1, inplace=True), nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
        nn.ELU(inplace=True), nn.AlphaDropout(0.1), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.LayerNorm(16),
        nn.Hardtanh(inplace=True), nn.RReLU(inplace=True), nn.Linear(16, 2), nn.LogSoftmax(-1),
    )  # fmt: skip
    assert_same_steps(model, (torch.randn(2, 4, 6),), loss=mean_square)


def test_adamw_is_the_default_optimizer_of_these_tests() -> None:
    assert type(adamw(nn.Linear(1, 1))) is torch.optim.AdamW
