"""What a user hands in: a model with one step's arguments, and for training its loss and optimizer.

A Workload is a frozen record that has been checked for what can be seen without running anything.
It holds live objects (the model, its arguments, the optimizer): no copies are made, and Lowtide leaves
them as they are except where a plan's step is asked for.

Not checked here: whether the model can be captured and which optimizers are supported (`capture`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.errors import UsageError

__all__ = ["Workload"]


@dataclass(frozen=True, eq=False, repr=False)
class Workload:
    """A model and one step of it.

    Inference: `model(*args, **kwargs)`.  Training (an `optimizer` is given): the same, then
    `loss(output, *targets)`, or `output.loss` where `loss` is None, backward, an optional clipping of the
    gradients' norm, and the optimizer's step.

    `autocast` is the dtype of a `torch.autocast` region around forward and loss.  Raises UsageError with
    the field that is wrong.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    loss: Callable[..., torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UsageError(
                f"Workload model is a {type(self.model).__name__}", remedy="pass a torch.nn.Module instance"
            )
        object.__setattr__(self, "args", _as_tuple("args", self.args))
        object.__setattr__(self, "targets", _as_tuple("targets", self.targets))
        _check_kwargs(self.kwargs)
        _check_step(self)
        if self.optimizer is not None:
            _check_optimizer(self.model, self.optimizer)
        _check_options(self)
        if not self.name:
            object.__setattr__(self, "name", type(self.model).__name__)

    @property
    def training(self) -> bool:
        """Whether the step is a training step (an optimizer was given)."""
        return self.optimizer is not None

    def __repr__(self) -> str:
        return f"Workload({self.name!r}, {'training' if self.training else 'inference'})"


def _as_tuple(name: str, given: object) -> tuple[Any, ...]:
    if isinstance(given, tuple | list):
        return tuple(given)
    raise UsageError(
        f"Workload {name} is a {type(given).__name__}", remedy=f"pass a tuple, for one tensor {name}=(x,)"
    )


def _check_kwargs(kwargs: object) -> None:
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise UsageError(
            f"Workload kwargs is a {type(kwargs).__name__}", remedy="pass a dict from argument name to value"
        )


def _check_step(workload: Workload) -> None:
    """The fields that only mean something together."""
    if workload.loss is not None and not callable(workload.loss):
        raise UsageError(
            f"Workload loss is a {type(workload.loss).__name__}",
            remedy="pass a callable loss(output, *targets) that returns a scalar tensor",
        )
    if workload.loss is None and workload.targets:
        raise UsageError(
            f"Workload has {len(workload.targets)} targets but no loss",
            remedy="pass loss=, a callable loss(output, *targets), or drop the targets",
        )
    if workload.optimizer is None:
        given = [name for name in ("loss", "clip_grad_norm") if getattr(workload, name) is not None]
        if given:
            raise UsageError(
                f"Workload has {' and '.join(given)} but no optimizer",
                remedy="pass optimizer= for a training step, or neither for an inference",
            )


def _check_optimizer(model: nn.Module, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"Workload optimizer is a {type(optimizer).__name__}",
            remedy="pass a torch.optim.Optimizer instance",
        )
    ours = {id(parameter) for parameter in model.parameters()}
    theirs = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in ours for parameter in theirs):
        raise UsageError(
            f"Workload optimizer holds {len(theirs)} parameters, none of them the model's",
            remedy="make the optimizer from model.parameters(), on its final dtype and device",
        )


def _check_options(workload: Workload) -> None:
    clip = workload.clip_grad_norm
    if clip is not None and not _positive(clip):
        raise UsageError(
            f"Workload clip_grad_norm is {clip!r}", remedy="pass a finite number above zero, or None"
        )
    if workload.accumulate != 1:
        raise UsageError(
            f"Workload accumulate is {workload.accumulate!r}; accumulation is not supported yet",
            remedy="pass accumulate=1",
        )
    if workload.autocast is not None and workload.autocast not in {torch.bfloat16, torch.float16}:
        raise UsageError(
            f"Workload autocast is {workload.autocast!r}", remedy="pass torch.bfloat16, torch.float16 or None"
        )
    if not isinstance(workload.name, str):
        raise UsageError(f"Workload name is a {type(workload.name).__name__}", remedy="pass a string")


def _positive(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return math.isfinite(number) and number > 0
