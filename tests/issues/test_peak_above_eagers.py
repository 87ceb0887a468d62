"""A plan whose peak is above eager's, as where the user freed things by hand (pytorch#122512)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide.search.driver import optimize
from lowtide.workload import Workload

DIM = 32


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))


class Deletes(Layers):
    """Frees by hand what a tracer would keep to the end of the function."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.repeat(1, 8)
        small = large.exp().sum(1, keepdim=True)
        del large
        for layer in self.layers:
            y = layer(x)
            x = y.tanh()
            del y
        z = torch.cat([x, x, x, x], 1)
        total = (z * z).sum(1, keepdim=True)
        del z
        return x + total + small


class InPlace(Layers):
    """One buffer through the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        for _ in range(4):
            y.mul_(0.5).add_(1.0)
            y[:, ::2] = 0.0
        return functional.relu_(y)


class Checkpoints(Layers):
    """Recomputes by hand."""

    def forward(self, x: Tensor) -> Tensor:
        def part(layer: nn.Module, x: Tensor) -> Tensor:
            return functional.gelu(layer(x)).exp().tanh()

        for layer in self.layers:
            x = checkpoint(part, layer, x, use_reentrant=False)
        return x


class Chunks(Layers):
    """Splits by hand, in one buffer."""

    def forward(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        for start in range(0, len(x), 32):
            result[start : start + 32] = functional.gelu(self.layers[0](x[start : start + 32])).square()
        return result


class Returns(Layers):
    """Its results are most of what it allocates."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sigmoid()


class Wide(Layers):
    """Most of its bytes is the result, made last; what comes before is as large and gone by then."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 16 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.gelu(self.head(x)).square()
        x = x + wide.view(-1, 16, DIM).mean(1)
        del wide
        return self.head(self.layers[0](x))


MODELS = (Deletes, InPlace, Checkpoints, Chunks, Returns, Wide)


def workload(make: Callable[[], nn.Module], training: bool) -> Workload:
    torch.manual_seed(0)
    model, x = make(), torch.randn(128, DIM)
    if not training:
        return Workload(model, (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_never_above_eager(make: Callable[[], nn.Module], training: bool) -> None:
    step = workload(make, training)
    outcome = optimize(step, memory="100%", seconds=0.4)
    assert outcome.met and outcome.measured.peak_bytes <= outcome.eager.peak_bytes


def test_never_above_eager_within_a_latency_limit() -> None:
    outcome = optimize(workload(Deletes, True), latency="20x", seconds=0.4)
    assert outcome.met and outcome.measured.peak_bytes <= outcome.eager.peak_bytes
