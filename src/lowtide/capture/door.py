"""`capture`: check, record twice, compare, assemble.

The step is recorded twice, under different seeds of Python's, NumPy's and PyTorch's generators; a model whose
graph depends on anything else than shapes is refused.  The user's generators, modules, optimizer and
gradients are afterwards what they were.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.capture.assemble import assemble
from lowtide.capture.binding import bind_trace
from lowtide.capture.internals import pytree
from lowtide.capture.optimizer import check_optimizer
from lowtide.capture.program import Program
from lowtide.capture.recording import argument_leaves, modules_of, named_tensors
from lowtide.capture.refusals import check_hooks, check_no_gradients
from lowtide.capture.result import Result
from lowtide.capture.surroundings import undisturbed
from lowtide.capture.trace import Trace, first_difference
from lowtide.capture.training import record_training
from lowtide.capture.twins import Named
from lowtide.capture.update import Update, classify
from lowtide.errors import CaptureError
from lowtide.ir.graph import Role
from lowtide.workload import Workload

__all__ = ["capture"]


def capture(workload: Workload) -> Program:
    """The workload as a Program.

    Training if it has an optimizer, else inference.  Raises CaptureError, with the user's source line and a
    remedy, for what cannot be captured.
    """
    return _capture_training(workload)


def _capture_training(workload: Workload) -> Program:
    named = named_tensors(workload)
    parameters = [one for one in named if one.role is Role.PARAM]
    assert workload.optimizer is not None
    check_optimizer(workload.optimizer)
    check_no_gradients(parameters)
    check_hooks(parameters, modules_of(workload))
    trace = _record_twice(record_training, workload)
    updates = classify(workload.optimizer, _pair(workload, parameters, trace))
    built = assemble(trace, updates)
    return Program(
        graph=built.graph,
        mode="train",
        workload=workload,
        names=built.names,
        gradients=built.gradients,
        updates=built.updates,
        result=Result((built.results["loss"],), pytree.tree_structure(0)),
        binding=bind_trace(workload, trace, built.names, argument_leaves(workload), named, updates),
        optimizer=updates,
    )


def _record_twice(run: Callable[[Workload], Trace], workload: Workload) -> Trace:
    """Record under two seeds; the graphs have to be the same."""
    with undisturbed(workload) as seed:
        seed(0)
        first = run(workload)
        seed(1)
        second = run(workload)
    difference = first_difference(first, second)
    if difference is not None:
        call, what = difference
        raise CaptureError(
            f"two recordings of the same step differ: {what}",
            source=call.origin.source if call is not None else "",
            remedy="remove what makes the step depend on chance, time or earlier calls",
        )
    return first


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
