"""The most obvious executor there is: a dictionary of tensors, nodes in program order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.capture import Program
from lowtide.capture.recorder import meta_of
from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph, TensorMeta
from lowtide.ir.ops import Aten, Fused


def laid_out(meta: TensorMeta) -> TensorMeta:
    """The meta without the strides of axes that have one element: those mean nothing, and fakes differ."""
    stride = tuple(step if size != 1 else 0 for size, step in zip(meta.shape, meta.stride, strict=True))
    return replace(meta, stride=stride)


def run_graph(graph: Graph, tensors: dict[int, Any]) -> None:
    for node in graph:
        operands = [tensors[value] for value in node.inputs]
        if isinstance(node.op, Fused):
            run_graph(node.op.body, dict(zip(node.op.body.inputs, operands, strict=True)))
            continue
        assert isinstance(node.op, Aten)
        results = tensors_of(call(node.op, operands))
        if node.writes:
            continue
        for value, result in zip(node.outputs, results, strict=True):
            assert laid_out(meta_of(result)) == laid_out(graph.values[value].meta), (node, meta_of(result))
            tensors[value] = result


def run(program: Program, args: tuple[Any, ...], kwargs: Any = None, targets: tuple[Any, ...] = ()) -> Any:
    """One step: the result, and the gradients before the update by parameter name."""
    tensors: dict[int, Any] = dict(program.bind(args, kwargs, targets))
    tensors.update(program.scalars())
    with torch.no_grad():
        run_graph(program.graph, tensors)
    program.advance()
    gradients: dict[str, Tensor] = {name: tensors[value] for name, value in program.gradients.items()}
    return program.result.rebuild(tensors), gradients
