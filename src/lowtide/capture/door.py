"""`capture`: check, record twice, compare, assemble.

The step is recorded twice, under different seeds of Python's, NumPy's and PyTorch's generators; a model whose
graph depends on anything else than shapes is refused.  The user's generators, modules, optimizer and
gradients are afterwards what they were.
"""

from __future__ import annotations

from typing import Literal

import torch

from lowtide.capture.assemble import assemble
from lowtide.capture.binding import bind_trace
from lowtide.capture.guards import Guards
from lowtide.capture.inference import record_exported, record_inference
from lowtide.capture.optimizer import check_optimizer
from lowtide.capture.program import Program
from lowtide.capture.recording import argument_leaves, modules_of, named_tensors
from lowtide.capture.refusals import check_hooks, check_no_gradients, check_python
from lowtide.capture.result import Result
from lowtide.capture.surroundings import seed, undisturbed
from lowtide.capture.trace import Trace, first_difference
from lowtide.capture.training import record_training
from lowtide.capture.twins import Named
from lowtide.capture.update import Update, Updates, classify
from lowtide.errors import CaptureError
from lowtide.ir.graph import Role
from lowtide.workload import Workload

__all__ = ["capture"]

Mode = Literal["train", "infer"]


def capture(workload: Workload) -> Program:
    """The workload as a Program.

    Training if it has an optimizer, else inference.  Raises CaptureError, with the user's source line and a
    remedy, for what cannot be captured.
    """
    with torch.inference_mode(False):
        return _capture(workload)


def _capture(workload: Workload) -> Program:
    check_python(modules_of(workload))
    if workload.optimizer is None:
        return _finish(workload, "infer", *_record_inference(workload), None)
    parameters = [one for one in named_tensors(workload) if one.role is Role.PARAM]
    check_optimizer(workload.optimizer)
    check_no_gradients(parameters)
    check_hooks(parameters, modules_of(workload))
    trace, guards = _record_training(workload)
    updates = classify(workload.optimizer, _pair(workload, parameters, trace))
    return _finish(workload, "train", trace, guards, updates)


def _finish(workload: Workload, mode: Mode, trace: Trace, guards: Guards, updates: Updates | None) -> Program:
    built = assemble(trace, updates)
    leaves = argument_leaves(workload)
    return Program(
        graph=built.graph,
        mode=mode,
        workload=workload,
        names=built.names,
        gradients=built.gradients,
        updates=built.updates,
        result=Result.of(trace.returned, built.results),
        binding=bind_trace(workload, trace, built.names, leaves, named_tensors(workload), updates, guards),
        optimizer=updates,
    )


def _record_training(workload: Workload) -> tuple[Trace, Guards]:
    with undisturbed(workload) as found:
        seed(0)
        first = record_training(workload)
        seed(1)
        trace = _agreed(first, record_training(workload))
    return trace, Guards.of(found, workload)


def _record_inference(workload: Workload) -> tuple[Trace, Guards]:
    with undisturbed(workload) as found:
        seed(0)
        exported = record_exported(workload)
        seed(1)
        trace = record_inference(workload)
        if exported is None or first_difference(exported, trace) is not None:
            seed(2)
            trace = _agreed(trace, record_inference(workload))
    return trace, Guards.of(found, workload)


def _agreed(first: Trace, second: Trace) -> Trace:
    """The step that two recordings under different seeds agree on."""
    difference = first_difference(first, second)
    if difference is None:
        return first
    call, what = difference
    raise CaptureError(
        f"two recordings of the same step differ: {what}",
        source=call.origin.source if call is not None else "",
        remedy="remove what makes the step depend on chance, time or earlier calls",
    )


def _pair(workload: Workload, parameters: list[Named], trace: Trace) -> list[tuple[int, Update]]:
    """(optimizer group, update) for every parameter that received a gradient, in the optimizer's order."""
    assert workload.optimizer is not None
    ours = {id(one.tensor): one for one in parameters}
    pairs = []
    for number, group in enumerate(workload.optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in ours:
                raise CaptureError(
                    f"parameter group {number} of the optimizer holds a parameter of shape "
                    f"{list(parameter.shape)} that is not the model's",
                    remedy="register it in the model",
                )
            name = ours.pop(id(parameter)).names[0]
            if f"grad:{name}" in trace.results:
                pairs.append((number, Update(name, parameter)))
    for left in ours.values():
        if left.tensor.requires_grad:
            raise CaptureError(
                f"parameter {left.names[0]} requires a gradient but is in no group of the optimizer",
                remedy="give it to the optimizer, or call requires_grad_(False) on it",
            )
    return pairs
