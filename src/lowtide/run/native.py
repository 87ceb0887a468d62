"""The user's own step, as PyTorch runs it: what everything is compared with.

Problem.  "Eager" has to mean one thing for measuring, verifying and tests.

Method.  Forward under the workload's autocast, loss, `del output`, backward, clipping, the optimizer's step,
`zero_grad(set_to_none=True)`; PyTorch's defaults otherwise.  An inference is the forward without gradients.

Not done.  Gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lowtide.errors import UsageError
from lowtide.workload import Workload

__all__ = ["forward_backward", "infer", "owned_modules", "resident_bytes", "run_step"]


def run_step(workload: Workload) -> Any:
    """One step: the detached loss of a training step, the model's output of an inference."""
    if workload.optimizer is None:
        return infer(workload)
    loss = forward_backward(workload)
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return loss


def infer(workload: Workload) -> Any:
    """The model's output, without gradients."""
    with torch.no_grad(), _autocast(workload):
        return workload.model(*workload.args, **workload.kwargs)


def forward_backward(workload: Workload) -> Tensor:
    """Forward, loss, backward and clipping; gradients are in `p.grad`.  Returns the detached loss."""
    with torch.enable_grad():
        with _autocast(workload):
            output = workload.model(*workload.args, **workload.kwargs)
            loss = _loss_of(workload, output)
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        result = loss.detach()
        del loss
    if workload.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(workload.model.parameters(), workload.clip_grad_norm)
    return result


def _loss_of(workload: Workload, output: Any) -> Tensor:
    if workload.loss is not None:
        return workload.loss(output, *workload.targets)
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None:
        raise UsageError(
            f"the workload has no loss and the model's {type(output).__name__} has no .loss",
            remedy="pass loss=, or call the model so that it returns its loss (labels=...)",
        )
    assert isinstance(found, Tensor)
    return found


@contextmanager
def _autocast(workload: Workload) -> Iterator[None]:
    with torch.autocast("cpu", dtype=workload.autocast, enabled=workload.autocast is not None):
        yield


def owned_modules(workload: Workload) -> list[nn.Module]:
    """The model, and the loss where it is a module."""
    modules = [workload.model]
    if isinstance(workload.loss, nn.Module):
        modules.append(workload.loss)
    return modules


def resident_bytes(workload: Workload) -> int:
    """Bytes of parameters, buffers, optimizer state, arguments and targets.

    A storage that several of them share counts once and whole; a tensor alone on its storage counts what it
    spans, so that a batch cut out of a large data set is not the data set.
    """
    sharing: dict[int, dict[int, Tensor]] = {}
    for tensor in _residents(workload):
        address = tensor.untyped_storage().data_ptr() or -id(tensor)
        sharing.setdefault(address, {})[id(tensor)] = tensor
    return sum(_held_bytes(list(tensors.values())) for tensors in sharing.values())


def _held_bytes(tensors: list[Tensor]) -> int:
    first = tensors[0]
    if len(tensors) > 1:
        return first.untyped_storage().nbytes()
    if not first.numel():
        return 0
    reach = sum((size - 1) * step for size, step in zip(first.shape, first.stride(), strict=True))
    return (reach + 1) * first.dtype.itemsize


def _residents(workload: Workload) -> Iterator[Tensor]:
    for module in owned_modules(workload):
        yield from module.parameters()
        yield from module.buffers()
    states = workload.optimizer.state.values() if workload.optimizer is not None else ()
    leaves = pytree.tree_leaves((list(states), workload.args, dict(workload.kwargs), workload.targets))
    yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))
