"""The ways to run a step: eager, checkpoint, compile with its memory options, fused losses.

Each way is a `Variant`; `loss_of` turns it into a function of no arguments that runs forward and loss.
Forward *and* loss are compiled together, as that is the stronger peer.

PyTorch's memory options are process-wide settings: `loss_of` sets them and leaves them set, so a variant
belongs in a process of its own.

Not done.  Variants that change the model's numbers (lower precision, another optimizer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.training.subjects import Forward, Subject
from lowtide.workload import Workload

__all__ = ["BUDGETS", "QUICK_BUDGETS", "Unavailable", "Variant", "loss_of"]

BUDGETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
QUICK_BUDGETS = (0.05, 0.3, 0.5)


class Unavailable(Exception):
    """This PyTorch does not have what a variant needs."""


@dataclass(frozen=True)
class Variant:
    """`cut` names a hand checkpoint of the subject; `budget` is `activation_memory_budget`."""

    compile: bool = False
    cut: str = ""
    budget: float | None = None
    auto_chunker: bool = False
    fused_loss: bool = False


def loss_of(subject: Subject, variant: Variant, workload: Workload) -> Callable[[], Tensor]:
    """Forward and loss of `workload`, run as `variant` says.  Raises Unavailable."""
    if variant.fused_loss:
        return _fused_loss(workload)
    if variant.budget is not None:
        _set_budget(variant.budget)
    if variant.auto_chunker:
        _enable_auto_chunker()
    run = _forward_and_loss(subject.cuts[variant.cut] if variant.cut else None)
    if variant.compile:
        run = torch.compile(run, dynamic=False)
    return lambda: run(workload.model, workload.loss, workload.args, workload.targets)


def _forward_and_loss(forward: Forward | None) -> Callable[..., Tensor]:
    def run(model: Any, loss: Any, args: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        output = model(*args) if forward is None else forward(model, *args)
        return loss(output, *targets)  # type: ignore[no-any-return]

    return run


def _fused_loss(workload: Workload) -> Callable[[], Tensor]:
    fused = getattr(functional, "linear_cross_entropy", None)
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if fused is None or options is None:
        raise Unavailable(f"torch {torch.__version__} has no F.linear_cross_entropy with options")
    head, (y,) = workload.model, workload.targets
    return lambda: fused(head.features, head.weight, y, options=options())


def _set_budget(budget: float) -> None:
    from torch._functorch import config

    if not hasattr(config, "activation_memory_budget"):
        raise Unavailable(f"torch {torch.__version__} has no activation_memory_budget")
    config.activation_memory_budget = budget


def _enable_auto_chunker() -> None:
    from torch._inductor import config

    if not hasattr(config, "auto_chunker"):
        raise Unavailable(f"torch {torch.__version__} has no auto_chunker")
    config.auto_chunker.enable = True
