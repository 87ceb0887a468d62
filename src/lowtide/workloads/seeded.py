"""What all bundled workloads share: the mode, the seed, the optimizer, the check of sizes that must divide.

Weights and data are random from a fixed seed, and the caller's generator is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from lowtide.errors import UsageError

__all__ = ["Mode", "adamw", "check_multiple", "fixed_seed", "set_mode"]

Mode = Literal["train", "infer"]
SEED = 0


@contextmanager
def fixed_seed(seed: int = SEED) -> Iterator[None]:
    """Inside, torch draws from `seed`; afterwards the CPU generator is as it was before."""
    before = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(before)


def adamw(model: nn.Module, mode: Mode) -> torch.optim.AdamW | None:
    """PyTorch's default AdamW for a training step, None for an inference."""
    return torch.optim.AdamW(model.parameters()) if mode == "train" else None


def set_mode(model: nn.Module, mode: Mode) -> nn.Module:
    """The model itself, in training or evaluation mode."""
    return model.train(mode == "train")


def check_multiple(name: str, value: int, of: int, why: str) -> None:
    """Refuse an option `name` whose `value` is not a multiple of `of`; `why` says what that is."""
    if value % of:
        raise UsageError(f"{name}={value} is not a multiple of {why}", remedy=f"use a multiple of {of}")
