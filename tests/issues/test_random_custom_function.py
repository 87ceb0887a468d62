"""A custom autograd.Function that draws random numbers; one that saves intermediates (pytorch#153334)."""

from __future__ import annotations

from typing import Any

import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.empty_like(x).bernoulli_(0.5)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return gradient * mask


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
        return gradient * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = Draws.apply(self.first(x))
        return InPlace.apply(Saves.apply(self.second(y), 0.5))


def test_custom_functions() -> None:
    assert_same_steps(Net(), (torch.randn(3, 4),), loss=lambda y: y.square().mean())
