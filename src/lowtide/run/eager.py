"""The reference executor: one operator after the other, obvious and slow.

Problem.  Every prediction and every clever executor needs something plain to be compared with.

Method.  Values live in a dict.  A node's operator is called as the graph says; after each step, values
that no later node and no result needs are dropped.  All memory comes from PyTorch's allocator, so what
the profiler measures is what `timeline` predicts from reference facts, to the byte.

Invariant.  A storage is held from its producer to its last reader through any of its views, as in
`lowtide.analysis.lifetime`.

A fused node runs its body, one operator after the other.

Not done.  Swap nodes: refused by name until they have a plain meaning here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.program import Program
from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Fission, Fused, Load, Store
from lowtide.run.fission_reference import run_fission

__all__ = ["Tap", "last_uses", "run_graph", "run_node", "run_reference"]

Tap = Callable[[Node, Mapping[int, Any]], None]
"""Called before each node with the node and the values alive."""


def run_graph(
    graph: Graph,
    inputs: Mapping[int, Any],
    order: Sequence[int] | None = None,
    tap: Tap | None = None,
) -> dict[int, Tensor]:
    """Run all nodes of `graph` in `order` (default: program order); the outputs by value id.

    `inputs` has a tensor (a number if HOST) for every graph input.  Resident tensors are written in place
    where nodes say so.
    """
    steps = tuple(node.id for node in graph.nodes) if order is None else tuple(order)
    dies = last_uses(graph, steps)
    made: dict[int, list[int]] = {}
    values: dict[int, Any] = dict(inputs)
    with torch.no_grad():
        for step, node_id in enumerate(steps):
            node = graph.node[node_id]
            if tap is not None:
                tap(node, values)
            values.update(zip(node.outputs, run_node(node, values), strict=True))
            for value in node.outputs:
                made.setdefault(graph.values[value].storage, []).append(value)
            for storage in dies.get(step, ()):
                for value in made[storage]:
                    del values[value]
        return {value: values[value] for value in graph.outputs}


def run_node(node: Node, values: Mapping[int, Any]) -> tuple[Tensor, ...]:
    """The results of one node on the operands in `values`."""
    operands = [values[value] for value in node.inputs]
    if isinstance(node.op, Aten):
        result = call(node.op, operands)
        return tensors_of(result) if node.outputs else ()
    if isinstance(node.op, Fused):
        return tuple(_run_body(node.op.body, operands))
    if isinstance(node.op, Fission):
        return tuple(run_fission(node.op, operands, _run_body))
    if isinstance(node.op, Store | Load):
        return tuple(operand.clone() for operand in operands)
    raise NotImplementedError(f"node {node.id} ({type(node.op).__name__}) has no plain meaning yet")


def _run_body(body: Graph, operands: Sequence[Any]) -> list[Tensor]:
    outputs = run_graph(body, dict(zip(body.inputs, operands, strict=True)))
    return [outputs[value] for value in body.outputs]


def last_uses(graph: Graph, order: Sequence[int]) -> dict[int, list[int]]:
    """Step -> storages that no later node of `order` and no result needs."""
    kept = {graph.values[value].storage for value in (*graph.inputs, *graph.outputs)}
    last: dict[int, int] = {}
    for step, node_id in enumerate(order):
        node = graph.node[node_id]
        for value in (*node.inputs, *node.outputs):
            last[graph.values[value].storage] = step
    dies: dict[int, list[int]] = {}
    for storage, step in last.items():
        if storage not in kept:
            dies.setdefault(step, []).append(storage)
    return dies


def run_reference(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    targets: Sequence[Any] = (),
    order: Sequence[int] | None = None,
    tap: Tap | None = None,
) -> Any:
    """One step of `program` on the caller's tensors; what the program returns (a training step: the loss).

    Raises ShapeMismatch or Stale as `program.bind` does.
    """
    inputs: dict[int, Any] = dict(program.bind(tuple(args), dict(kwargs or {}), tuple(targets)))
    inputs.update(program.scalars())
    outputs = run_graph(program.graph, inputs, order, tap)
    program.advance()
    return program.result.rebuild({**inputs, **outputs})
