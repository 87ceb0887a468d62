"""Gradients against another mask than the forward's, when it is recomputed or the batch is in parts.

(pytorch#190758, #190717: a partitioner that recomputes dropout draws anew, silently.)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.issues.ladder import climb, parts_of
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture import capture
from lowtide.ir.random import is_random
from lowtide.run.plan import Plan
from lowtide.workload import Workload


class Planes(nn.Module):
    """Dropout of every kind and additive noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(functional.gelu(self.first(x)), 0.3)
        x = x + 0.1 * torch.randn_like(x)
        x = functional.dropout2d(x, 0.3, inplace=True)
        return functional.alpha_dropout(self.second(x), 0.1, training=True)


class Rows(nn.Module):
    """Masks that the bit packing takes (width 16), one that it does not (width 5); noise of other makes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(6, 16), nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(torch.tanh(self.wide(x)), 0.5)
        x = x * torch.bernoulli(torch.full_like(x, 0.8))
        x = x + torch.normal(0.0, 0.1, x.shape) * torch.rand(x.shape[0], 1)
        x = functional.dropout(self.narrow(x).relu(), 0.25)
        return self.head(x) + torch.empty_like(x[:, :3]).uniform_(-0.1, 0.1)


class Attends(nn.Module):
    """Dropout inside the attention operator, and written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        one = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        weights = functional.dropout((q @ k.mT).softmax(-1), 0.3)
        return self.out((one + weights @ v).transpose(1, 2).flatten(2))


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def step_of(model: nn.Module, x: Tensor, loss: Callable[..., Tensor] = square) -> Workload:
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, (x.double(),), loss=loss, optimizer=optimizer)


def draws(plan: Plan) -> int:
    return sum(is_random(node.op) for node in plan.graph)


def assert_split_and_drawn_once(plans: dict[str, Plan]) -> None:
    whole = draws(plans["as captured"])
    assert {name: draws(plan) for name, plan in plans.items()} == dict.fromkeys(plans, whole)
    assert parts_of(plans["2 parts"].graph)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_planes(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = Planes().to(memory_format=layout)
    x = torch.randn(4, 2, 6, 6).to(memory_format=layout)
    plans = climb(step_of(model, x), (2,))
    assert_split_and_drawn_once(plans)
    assert plans["2 parts"].predicted_peak_bytes < plans["reordered"].predicted_peak_bytes


@pytest.mark.parametrize("make", [Rows, Attends])
def test_rows_and_attention(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 6) if make is Rows else torch.randn(4, 6, 8)
    assert_split_and_drawn_once(climb(step_of(make(), x)))


def test_dropout_in_an_inference_with_parts() -> None:
    torch.manual_seed(0)
    plans = climb(Workload(Rows().double(), (torch.randn(6, 6).double(),)))
    assert parts_of(plans["3 parts"].graph) == [3]


def test_a_draw_that_nobody_reads_still_happens() -> None:
    class Idle(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return functional.dropout(super().forward(x), 0.5)

    torch.manual_seed(0)
    workload = step_of(Idle(4, 4), torch.randn(6, 4))
    assert sum(is_random(node.op) for node in capture(workload).graph) == 2
    climb(workload)
