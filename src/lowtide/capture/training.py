"""A training step as one trace: forward, loss, backward, clipping.

The run is eager's own (`loss.backward()` into the twins' `.grad`), so that even the copies that autograd
makes when it accumulates a gradient are those that eager makes.  Updates are not traced: see `update`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide.capture.internals import pytree
from lowtide.capture.recording import Stage
from lowtide.capture.result import Returned
from lowtide.capture.trace import Trace, Window
from lowtide.errors import CaptureError
from lowtide.ir.graph import Role
from lowtide.workload import Workload

__all__ = ["record_training"]


def record_training(workload: Workload) -> Trace:
    """Run forward, loss, backward and clipping once, on twins.

    Results are ``loss`` and ``grad:<parameter>`` for every parameter that received a gradient.
    """
    stage = Stage(workload)
    with stage.running(grad=True) as rebound:
        loss = _forward(stage)
        with stage.recorder.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        if workload.clip_grad_norm is not None:
            _clip(stage, workload.clip_grad_norm)
    results = {"loss": stage.recorder.window(loss), **_gradients(stage)}
    return stage.trace(results, Returned(("loss",), pytree.tree_structure(0)), rebound)


def _forward(stage: Stage) -> Tensor:
    workload = stage.workload
    with stage.autocast():
        output = workload.model(*stage.stand_in(workload.args), **stage.stand_in(dict(workload.kwargs)))
        with stage.recorder.phase("loss"):
            loss = _loss_of(workload, output, stage.stand_in(workload.targets))
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(f"the loss is {shape}, not one number", remedy="reduce it, e.g. with .mean()")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient",
            remedy="check requires_grad of the parameters and torch.no_grad() in the model",
        )
    return loss


def _loss_of(workload: Workload, output: Any, targets: tuple[Any, ...]) -> Any:
    if workload.loss is not None:
        return workload.loss(output, *targets)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise CaptureError(
            f"the workload has no loss and the model's {type(output).__name__} has no .loss",
            remedy="pass loss=, or call the model so that it returns its loss (labels=...)",
        )
    return loss


def _clip(stage: Stage, limit: float) -> None:
    parameters = [stage.twins.of(named.tensor) for named in stage.named if named.role is Role.PARAM]
    with stage.recorder.phase("clip"):
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=False)


def _gradients(stage: Stage) -> dict[str, Window]:
    found = {}
    for named in stage.named:
        gradient = stage.twins.of(named.tensor).grad if named.role is Role.PARAM else None
        if gradient is not None:
            found[f"grad:{named.names[0]}"] = stage.recorder.window(gradient)
    return found
