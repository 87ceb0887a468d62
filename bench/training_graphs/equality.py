"""Whether two graphs of a file update every weight alike, run at reduced size by the reference executor.

Method.  The batch shrinks to two samples per part, channels and features by `FACTOR` where they are
multiples of it (spatial sizes and what a reshape mixes stay); both graphs are built as `lowtide.ir` from
the same small weights and inputs and run.

Invariants.  In float64: sums are re-associated, and in float32 a ReLU of a deep network without normalisation
turns at another place for it.  Updates are compared relative to the largest change of their weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lowtide.run.eager import run_graph

from .as_ir import as_ir
from .model import Graph, Node, Shape

__all__ = ["FACTOR", "largest_difference", "reduced_shapes", "updates"]

FACTOR = 16


def _parts(graph: Graph) -> int:
    return max((n.split.parts * _parts(n.split.body) for n in graph.nodes if n.split), default=1)


def reduced_shapes(graph: Graph, samples: int) -> dict[int, Shape]:
    """Shapes of weights and inputs for a small run."""
    kept = {
        size
        for n in graph.nodes
        if n.op == "reshape"
        for v in (n.id, *n.inputs)
        for size in graph.node[v].shape
    }
    spatial = any(node.op == "conv2d" for node in graph.nodes)

    def small(size: int) -> int:
        return size if size % FACTOR or size in kept else size // FACTOR

    def reduced(node: Node) -> Shape:
        if spatial:
            channels = (small(node.shape[0]) if node.kind == "weight" else samples, small(node.shape[1]))
            return (*channels, *node.shape[2:])
        if node.kind == "weight":
            return tuple(small(size) for size in node.shape)
        return (samples, *(small(size) for size in node.shape[1:]))

    return {node.id: reduced(node) for node in graph.nodes if node.op == "placeholder"}


def updates(graph: Graph, shapes: Mapping[int, Shape], seed: int = 0) -> dict[int, Tensor]:
    """Weight id -> the weight after one step, from weights and inputs that the seed gives."""
    built = as_ir(graph, shapes, torch.float64)
    random = torch.Generator().manual_seed(seed)
    values: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}
    for node in sorted(built.inputs):
        shape = shapes[node]
        fan = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        scale = 1.0 / math.sqrt(fan) if graph.node[node].kind == "weight" else 1.0
        tensor = torch.randn(shape, generator=random, dtype=torch.float64) * scale
        values[built.inputs[node]] = tensor
        if graph.node[node].kind == "weight":
            weights[node] = tensor
    run_graph(built.graph, values)
    return weights


def largest_difference(base: Graph, best: Graph) -> float:
    """The largest difference of an update, relative to the largest entry of that weight's change."""
    shapes = reduced_shapes(base, 2 * _parts(best))
    start = {node: weight.clone() for node, weight in _weights(base, shapes).items()}
    ours, theirs = updates(best, shapes), updates(base, shapes)
    worst = 0.0
    for node, weight in theirs.items():
        moved = (weight - start[node]).abs().max().item()
        worst = max(worst, (ours[node] - weight).abs().max().item() / max(moved, 1e-12))
    return worst


def _weights(graph: Graph, shapes: Mapping[int, Shape]) -> dict[int, Tensor]:
    """The weights before the step."""
    nodes = tuple(node for node in graph.nodes if node.op == "placeholder")
    return updates(Graph(nodes), shapes)
