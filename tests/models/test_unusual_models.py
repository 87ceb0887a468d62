"""Unusual models: eager's numbers at every rung, or one clear line at capture; never a wrong number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.issues.ladder import assert_traces, build, eager_trace, plan_trace, rungs, tolerance_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from lowtide.capture import capture
from lowtide.errors import CaptureError
from lowtide.workload import Workload

Body = Callable[..., Any]
Make = Callable[[], Workload]


class Written(nn.Module):
    """A function of modules and an input, as a model."""

    def __init__(self, body: Body, *parts: nn.Module, **buffers: Tensor) -> None:
        super().__init__()
        self.body, self.parts = body, nn.ModuleList(parts or (nn.Linear(4, 4),))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def trained(model: nn.Module, *args: Tensor, optimizer: Any = None) -> Workload:
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(list(model.parameters()))
    return Workload(model, args, loss=lambda y: y.square().mean(), optimizer=made)


# -- written with in-place operators and views ------------------------------------------------------------


def in_place_on_views(model: Any, x: Tensor) -> Tensor:
    y = model.parts[0](x)
    y[:, 1:3].mul_(2)
    y[0] += 1
    y.view(-1)[3:9].sigmoid_()
    return y.tanh()


def copy_of_a_row(model: Any, x: Tensor) -> Tensor:
    """What is assigned starts in the middle of another storage."""
    z, y = model.parts[0](x), torch.empty(4)
    y.copy_(z[1])
    y[1:3].mul_(3)
    y.view(2, 2)[0, 1] = 7
    return z * y


def copy_of_rows(model: Any, x: Tensor) -> Tensor:
    z, y, w = model.parts[0](x), torch.empty(2, 4), torch.empty(1)
    y.copy_(z[2:4])
    turned = y.t()
    turned[1] = 3
    y.view(-1)[2:6].mul_(2)
    w.copy_(z[3, 2]).add_(1)
    return z * y[1] + turned.sum() + w


def fills(model: Any, x: Tensor) -> Tensor:
    y = model.parts[0](x).clone()
    y[1:4, ::2] = 0.5
    y[torch.tensor([0, 2])] = 1.5
    y[y > 0.7] = -1.0
    y[:, 1:3] = x[0, :2]
    y.diagonal().fill_(3.0)
    y[5].zero_()
    return y * x


def swapped_rows(model: Any, x: Tensor) -> Tensor:
    y = model.parts[0](x) * 1
    y[:3] = y[3:].clone()
    return y


def running_mean(model: Any, x: Tensor) -> Tensor:
    if model.training:
        model.count.add_(1)
        model.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return model.parts[0](x - model.mean)


class WindowedBuffer(nn.Module):
    """Its buffer is a part of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("part", torch.randn(10, 4)[2:5])
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.part.mul_(2)
        rows = self.part[1:]
        rows.add_(1)
        self.part.view(-1)[3] = 5
        return self.layer(x) * self.part[2] + rows.sum()


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.sigmoid_())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y)


def second_derivative(model: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model.parts[0](x).tanh().sum(), x, create_graph=True)
    return gradient


def rows_and_sorting(model: Any, x: Tensor) -> Tensor:
    y = model.parts[0](x)
    return y.cumsum(0) + y.topk(2, dim=1)[0].sum(1, keepdim=True) + y.sort(0)[0] + y.amax(1, keepdim=True)


def scattered(model: Any, x: Tensor) -> Tensor:
    y, index = model.parts[0](x), torch.tensor([[0, 1, 2, 3]] * 6)
    wide = torch.zeros(6, 4).scatter_reduce(0, index, y, "amax").scatter_add(0, index[:2], y[:2])
    return wide + y.index_put((torch.tensor([0, 0, 1]),), y[:3], accumulate=True)


def clamped_weight(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.parts[0].weight.clamp_(-0.2, 0.2)
    return model.parts[0](x)


@torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draws without telling."""
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)


FORWARDS: Mapping[str, Body] = {
    "an operator of another library that draws": lambda m, x: noisy(m.parts[0](x).tanh()).tanh(),
    "one module twice": lambda m, x: m.parts[0](m.parts[0](x).relu()),
    "a tied weight": lambda m, x: functional.linear(m.parts[0](x), m.parts[0].weight.t()),
    "in place on views": in_place_on_views,
    "copy of a row": copy_of_a_row,
    "copy of rows": copy_of_rows,
    "fills": fills,
    "swapped rows": swapped_rows,
    "zero-size pieces": lambda m, x: torch.cat([m.parts[0](x), x[:0], m.parts[0](x)[2:2]]),
    "function in place": lambda m, x: Doubling.apply(m.parts[0](x)),
    "einsum": lambda m, x: torch.einsum("bi,oi,bo->bo", x, m.parts[0].weight, m.parts[0](x)),
    "sorting": rows_and_sorting,
    "scatters": scattered,
    "indices": lambda m, x: m.parts[0](x)[torch.tensor([[0], [1]]), torch.tensor([1, 2])],
    "as_strided": lambda m, x: m.parts[0](x)[1:].as_strided((2, 3), (1, 2), 1) * 1.0,
    "random": lambda m, x: m.parts[0](x) * torch.empty_like(x).uniform_() + torch.randn(6, 4),
    "turned in place": lambda m, x: m.parts[0](x).clone().transpose_(0, 1).unsqueeze_(0) * 2,
    "spectrogram": lambda m, x: torch.stft(
        m.parts[0](x).flatten(), 8, window=x[0].repeat(2), return_complex=True
    ).abs(),
    "second derivatives": second_derivative,
    "float64 between": lambda m, x: m.parts[0](x).double().cumsum(0).float() * x.double().mean(),
}


def images(*layers: nn.Module) -> Workload:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *layers, nn.ReLU(inplace=True))
    return trained(model, torch.randn(2, 4, 6, 6))


class Aliased(nn.Module):
    """Parameters on one storage, and a buffer that is a parameter's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.randn(4, 4))
        self.part = nn.Parameter(self.whole.data[:2])
        self.register_buffer("seen", self.whole.data)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.whole, x[:, :2] @ self.part], 1) + (x @ self.seen).repeat(1, 2)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.scale).square().mean()


def with_trained_loss() -> Workload:
    model, loss = nn.Linear(4, 4), Scaled()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    return Workload(model, (torch.randn(6, 4),), loss=loss, optimizer=optimizer)


TRAINED: Mapping[str, Make] = {
    **{
        name: (lambda body=body: trained(Written(body), torch.randn(6, 4))) for name, body in FORWARDS.items()
    },
    "a weight that the forward changes": lambda: trained(Written(clamped_weight), torch.randn(6, 4)),
    "rows of an embedding renormed": lambda: trained(
        Written(lambda m, i: m.parts[0](i), nn.Embedding(9, 4, max_norm=0.5)), torch.randint(9, (6, 3))
    ),
    "shared memory": lambda: trained(Aliased(), torch.randn(6, 4)),
    "a loss with a parameter": with_trained_loss,
    "buffer of a part": lambda: trained(WindowedBuffer(), torch.randn(6, 4)),
    "buffer on a condition": lambda: trained(
        Written(running_mean, count=torch.zeros((), dtype=torch.long), mean=torch.zeros(4)), torch.randn(6, 4)
    ),
    "rows of an expanded input": lambda: trained(nn.Linear(4, 4), torch.randn(1, 4).expand(6, 4)),
    "columns of an input": lambda: trained(nn.Linear(6, 4), torch.randn(12, 12).t()[:5, ::2]),
    "bfloat16": lambda: trained(
        nn.Sequential(nn.Linear(4, 8), nn.GELU()).bfloat16(), torch.randn(6, 4).bfloat16()
    ),
    "weight norm": lambda: trained(parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(6, 4)),
    "spectral norm": lambda: trained(parametrizations.spectral_norm(nn.Linear(4, 4)), torch.randn(6, 4)),
    "group norm": lambda: images(nn.GroupNorm(2, 4)),
    "dropout2d": lambda: images(nn.Dropout2d(0.5)),
    "adaptive pool": lambda: images(nn.AdaptiveMaxPool2d((2, 3))),
    "gru": lambda: trained(Written(lambda m, x: m.parts[0](x)[0], nn.GRU(4, 5)), torch.randn(3, 6, 4)),
    "nesterov": lambda: optimized(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "amsgrad": lambda: optimized(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "maximize": lambda: optimized(torch.optim.AdamW, maximize=True),
    "groups": lambda: trained(
        nn.Linear(4, 4),
        torch.randn(6, 4),
        optimizer=lambda p: torch.optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}]),
    ),
}


def optimized(kind: Any, **settings: Any) -> Workload:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return trained(model, torch.randn(6, 4), optimizer=lambda p: kind(p, lr=0.01, **settings))


def inferred(body: Body, x: Tensor | None = None) -> Workload:
    return Workload(Written(body), (torch.randn(6, 4) if x is None else x,))


INFERRED: Mapping[str, Make] = {
    **{name: (lambda body=body: inferred(body)) for name, body in FORWARDS.items()},
    "element types": lambda: inferred(
        lambda m, x: (
            x.argmax(-1),
            x > 0,
            x.bfloat16(),
            torch.view_as_complex(x.view(6, 2, 2)),
            x.to(torch.int8),
        )
    ),
    "trees": lambda: inferred(lambda m, x: (m.parts[0](x), {"a": x.sum(), "b": [x, None, 3]}, ())),
    "its input": lambda: inferred(lambda m, x: (x.t(), x[1], x)),
    "its weights": lambda: inferred(lambda m, x: (m.parts[0].weight, m.parts[0].weight.t(), x + 1)),
    "one result twice": lambda: inferred(lambda m, x: (lambda y: (y, y, y.view(-1)))(m.parts[0](x))),
    "no rows": lambda: inferred(lambda m, x: m.parts[0](x).relu(), torch.randn(0, 4)),
    "overlapping input": lambda: inferred(
        lambda m, x: m.parts[0](x), torch.randn(9).as_strided((6, 4), (1, 1))
    ),
    "spectrum": lambda: inferred(lambda m, x: torch.fft.ifft(torch.fft.fft(m.parts[0](x))).real),
    "lstm": lambda: Workload(nn.LSTM(4, 5, 2), (torch.randn(3, 6, 4),)),
}
CASES = {**{f"train: {n}": m for n, m in TRAINED.items()}, **{f"infer: {n}": m for n, m in INFERRED.items()}}
RUNGS = ("as captured", "all recomputed, reordered", "2 parts, all recomputed")


@pytest.mark.parametrize("name", CASES)
def test_eagers_numbers(name: str) -> None:
    torch.manual_seed(0)
    workload = CASES[name]()
    program, eager = capture(workload), eager_trace(workload, 1)
    for rung in rungs(program, (2,)):
        if rung.name in RUNGS:
            plan = build(program, rung)
            tolerance = 0.0 if rung.exact else tolerance_of(program)
            assert_traces(plan_trace(plan, workload, 1), eager, tolerance, rung.name)


def conjugated(model: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(model.parts[0](x).view(6, 2, 2)).conj())


REFUSED: Mapping[str, tuple[Make, str]] = {
    "conjugates of numbers": (
        lambda: trained(
            Written(lambda m, x: torch.view_as_real(torch.view_as_complex(m.parts[0](x).view(6, 2, 2)) * 2j)),
            torch.randn(6, 4),
        ),
        "lazily conjugated",
    ),
    "conjugate views": (lambda: inferred(conjugated), "lazily conjugated"),
    "conjugate gradients": (
        lambda: trained(
            Written(lambda m, x: (m.parts[0](x) * torch.ones(4, dtype=torch.cfloat)).abs()), torch.randn(6, 4)
        ),
        "lazily conjugated",
    ),
    "traced modules": (
        lambda: Workload(torch.jit.trace(nn.Linear(4, 4), torch.randn(1, 4)), (torch.randn(6, 4),)),
        "compiled by torch.jit",
    ),
    "other optimizers": (lambda: optimized(torch.optim.RMSprop), "the optimizer is RMSprop"),
    "shapes from data": (lambda: inferred(lambda m, x: x.masked_select(x > 0)), "depends on the data"),
    "sparse gradients": (
        lambda: trained(
            Written(lambda m, i: m.parts[0](i), nn.Embedding(9, 4, sparse=True)), torch.tensor([1, 2])
        ),
        "sparse_coo",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_refused_with_one_line(name: str) -> None:
    torch.manual_seed(0)
    make, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(make())
    assert "\n" not in str(caught.value) and caught.value.remedy
