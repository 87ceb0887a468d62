"""A plain interpreter of graphs with fused kernels: every value a fresh tensor, kernels on copies."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowtide.fusion.codegen.library import Kernel, compile_bodies
from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Fused


def run_graph(graph: Graph, given: Mapping[int, object], threads: int = 2) -> dict[int, object]:
    """All values of the graph after running it in order."""
    values: dict[int, object] = dict(given)
    nodes = [node for node in graph.nodes if isinstance(node.op, Fused)]
    library = compile_bodies([node.op.body for node in nodes if isinstance(node.op, Fused)])
    assert library is not None
    kernels = {node.id: library.kernel(k) for k, node in enumerate(nodes)}
    for node in graph.nodes:
        inputs = [values[value] for value in node.inputs]
        if isinstance(node.op, Aten):
            results = tensors_of(call(node.op, inputs))
        else:
            results = run_kernel(kernels[node.id], node, inputs, graph, threads)
        values.update(zip(node.outputs, results, strict=False))
    return values


def run_kernel(
    kernel: Kernel, node: Node, inputs: list[object], graph: Graph, threads: int
) -> tuple[torch.Tensor, ...]:
    for value, tensor in zip(node.inputs, inputs, strict=True):
        if isinstance(tensor, torch.Tensor):
            assert tuple(tensor.stride()) == graph.values[value].meta.stride
    return kernel.run(inputs, threads)  # type: ignore[arg-type]
