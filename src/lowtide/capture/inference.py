"""An inference as one trace: through `torch.export`, checked against a recording of the plain call.

Problem.  `torch.export` is PyTorch's own statement of what a model computes, but it works above the operators
that the CPU runs, adds copies of its own, and gives up on some models that run well.

Method.  The exported graph is interpreted on twins under the same recorder as a training step, so that both
modes share one lowering.  A second recording runs the model itself.  Where both give the same calls, either
is right; where export failed or differs, two plain recordings have to agree, as in training.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from lowtide.capture.fingerprint import Fingerprint
from lowtide.capture.internals import FakeTensor, outside_modes, pytree
from lowtide.capture.recording import Stage
from lowtide.capture.result import Returned, leaves_of
from lowtide.capture.trace import Trace, Window
from lowtide.errors import LowtideError
from lowtide.workload import Workload

__all__ = ["record_exported", "record_inference"]


def record_inference(workload: Workload) -> Trace:
    """Run the model once, on twins; results are ``out:<i>``, the i-th leaf of what it returns."""
    stage = Stage(workload)
    with stage.running(grad=False) as rebound:
        with stage.autocast():
            output = workload.model(*stage.stand_in(workload.args), **stage.stand_in(dict(workload.kwargs)))
        results, returned = _results(stage, output)
    return stage.trace(results, returned, rebound)  # what the model put in place of buffers is known now


def record_exported(workload: Workload) -> Trace | None:
    """The same by way of `torch.export`; None if it cannot export the model, or its graph cannot run here."""
    exported = _export(workload)
    if exported is None:
        return None
    stage = Stage(workload)
    try:
        with stage.running(grad=False) as rebound, stage.autocast():
            flat = fx.Interpreter(exported.graph_module).run(*_placeholders(stage, exported))
            output = pytree.tree_unflatten(list(flat), exported.call_spec.out_spec)
            results, returned = _results(stage, output)
        return stage.trace(results, returned, rebound)
    except LowtideError:
        return None


def _results(stage: Stage, output: Any) -> tuple[dict[str, Window], Returned]:
    tensors, returned = leaves_of(output)
    return {name: stage.recorder.returned_window(tensor) for name, tensor in tensors}, returned


def _export(workload: Workload) -> torch.export.ExportedProgram | None:
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors) or workload.autocast is not None:
        return None
    fingerprint = Fingerprint({"model": workload.model})
    try:
        with outside_modes(), torch.no_grad(), _in_silence():
            return torch.export.export(workload.model, workload.args, dict(workload.kwargs), strict=False)
    except Exception:
        # Whatever export says, the plain recording decides whether the model can be captured.
        return None
    finally:
        fingerprint.settle()  # export exchanges attributes of the model for copies


@contextmanager
def _in_silence() -> Iterator[None]:
    """What `torch.export` warns of, logs and prints is no news: the plain recording says it in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _placeholders(stage: Stage, exported: torch.export.ExportedProgram) -> list[Any]:
    """What the exported graph's inputs stand for: twins, and constants as they are."""
    owned = {name: named.tensor for named in stage.named for name in named.names}
    arguments = pytree.tree_leaves((stage.workload.args, dict(stage.workload.kwargs)))
    given = iter(arguments)
    operands: list[Any] = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind in {InputKind.PARAMETER, InputKind.BUFFER}:
            found = owned[str(spec.target)]
        elif spec.kind is InputKind.USER_INPUT:
            found = next(given)
        else:
            operands.append(exported.constants[str(spec.target)])
            continue
        operands.append(stage.twins.of(found) if isinstance(found, Tensor) else found)
    return operands
