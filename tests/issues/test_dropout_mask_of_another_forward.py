"""Gradients that belong to another dropout mask than the forward's (pytorch#190758, #190717)."""

from __future__ import annotations

import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn
from torch.nn import functional


class Noisy(nn.Module):
    """Dropout of every kind and additive noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.3)
        x = x + 0.1 * torch.randn_like(x)
        x = functional.dropout2d(x, 0.3, inplace=True)
        return functional.alpha_dropout(self.second(x), 0.1, training=True)


def test_masks_and_generator_are_eagers() -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        model = Noisy().to(memory_format=layout)
        x = torch.randn(2, 2, 6, 6).to(memory_format=layout)
        assert_same_steps(model, (x,), loss=lambda y: y.square().mean())
