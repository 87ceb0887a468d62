"""A custom autograd.Function that draws, keeps intermediates or changes its input, recomputed and in parts.

(pytorch#153334)
"""

from __future__ import annotations

from typing import Any

import torch
from tests.issues.ladder import climb, parts_of
from torch import Tensor, nn

from lowtide.workload import Workload


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask + torch.rand_like(gradient)  # draws again, in the backward


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.inner = x.exp()  # kept on the context, not through save_for_backward
        ctx.scale = scale
        return ctx.inner.log1p() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale * ctx.inner / (1 + ctx.inner), None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3  # not the derivative: only this code knows


class Straight(torch.autograd.Function):
    """Several results, one without a gradient; the backward gets None for what nobody used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(x)
        return signs * 0.5, signs, x + 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = Draws.apply(self.layers[0](x))
        x = Saves.apply(self.layers[1](x), 0.5)
        x = InPlace.apply(self.layers[2](x))
        half, signs, _ = Straight.apply(x)
        return self.layers[3](half + signs) + x


def test_every_rung() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plans = climb(
        Workload(
            model, (torch.randn(6, 4).double(),), loss=lambda y: y.square().sum() / 7, optimizer=optimizer
        )
    )
    assert parts_of(plans["2 parts"].graph)
    assert plans["half recomputed"].graph != plans["reordered"].graph
