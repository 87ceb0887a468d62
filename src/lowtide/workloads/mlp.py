"""A multi-layer perceptron: the smallest network with every part of a training step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lowtide.workload import Workload
from lowtide.workloads.seeded import Mode, adamw, fixed_seed, set_mode

__all__ = ["Mlp", "mlp"]


class Mlp(nn.Module):
    """`layers` times linear, GELU and dropout, then a linear classifier: (batch, dim) -> (batch, classes)."""

    def __init__(self, dim: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Dropout(dropout)) for _ in range(layers)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def mlp(
    *,
    mode: Mode = "train",
    batch: int = 4096,
    dim: int = 256,
    layers: int = 8,
    classes: int = 10,
    dropout: float = 0.0,
) -> Workload:
    """Perceptron: linear + GELU per layer, cross-entropy."""
    with fixed_seed():
        model = set_mode(Mlp(dim, layers, classes, dropout), mode)
        x, y = torch.randn(batch, dim), torch.randint(0, classes, (batch,))
    if mode == "infer":
        return Workload(model, args=(x,))
    return Workload(
        model, args=(x,), targets=(y,), loss=functional.cross_entropy, optimizer=adamw(model, mode)
    )
