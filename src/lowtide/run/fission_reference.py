"""The obvious way to run a Fission: slice, run the body, merge, part after part.

Invariants.  Inputs are sliced as views, outputs allocated once and merged in place; a part's results
are dropped before the next part starts.  The first part of a sum is copied, so that nothing has to be
zeroed and a negative zero stays one.

Not done.  Speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.analysis.merging import combinations
from lowtide.ir.aten import call
from lowtide.ir.graph import Graph, TensorMeta
from lowtide.ir.ops import Fission, Merge, Slice

__all__ = ["allocate_outputs", "run_fission", "slice_view"]

RunGraph = Callable[[Graph, Sequence[Any]], Sequence[Tensor]]
"""Runs a body: its operands in the order of its inputs, its results in the order of its outputs."""


def slice_view(tensor: Any, piece: Slice) -> Any:
    """The window of `tensor` that one part reads or writes; a number on the host is shared."""
    if piece.axis is None:
        return tensor
    return tensor.narrow(piece.axis, piece.start, piece.stop - piece.start)


def run_fission(
    op: Fission, inputs: Sequence[Any], run_graph: RunGraph, outputs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Run all parts of `op`; gives its outputs, which are `outputs` if those are given."""
    wholes = list(outputs) if outputs is not None else allocate_outputs(op)
    for number in range(len(op.parts)):
        _run_part(op, number, inputs, wholes, run_graph)
    return wholes


def _run_part(
    op: Fission, number: int, inputs: Sequence[Any], wholes: Sequence[Tensor], run_graph: RunGraph
) -> None:
    part = op.parts[number]
    operands = [slice_view(tensor, piece) for tensor, piece in zip(inputs, part.inputs, strict=True)]
    results = run_graph(op.bodies[part.body], operands)
    targets = [slice_view(whole, piece) for whole, piece in zip(wholes, part.outputs, strict=True)]
    for target, merge, result in zip(targets, op.merges, results, strict=True):
        if merge is Merge.WRITE or number == 0:
            target.copy_(result)
        elif merge is Merge.ADD:
            target.add_(result)
    for step in combinations(op, number) if number else ():
        call(step.op, [targets[step.target], results[step.value]])


def allocate_outputs(op: Fission) -> list[Tensor]:
    """One tensor per output, dense, its dimensions in the same order in memory as the body's."""
    body = op.bodies[op.parts[0].body]
    wholes = []
    for position, value in enumerate(body.outputs):
        meta = body.values[value].meta
        pieces = [part.outputs[position] for part in op.parts]
        shape = list(meta.shape)
        if pieces[0].axis is not None:
            shape[pieces[0].axis] = max(piece.stop for piece in pieces)
        wholes.append(_empty(meta, shape))
    return wholes


def _empty(meta: TensorMeta, shape: Sequence[int]) -> Tensor:
    stride, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (meta.stride[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=meta.dtype, device=meta.device)
