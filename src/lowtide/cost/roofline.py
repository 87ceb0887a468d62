"""Analytic cost: the larger of arithmetic and traffic, plus a launch.

Problem.  A plan can be made for a device that is not here, and unmeasured operators need a price.

Method.  Floating-point operations come from PyTorch's own formulas (`torch.utils.flop_counter`);
traffic is the bytes of the inputs and outputs once each.  Views and host numbers cost nothing.
Parts of a Fission and bodies of a Fused node are priced node by node; a fused kernel's intermediates
move no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.flop_counter import flop_registry

from lowtide.cost.devices import Device
from lowtide.ir import Aten, Fission, Fused, Graph, Load, Node, Store, Value
from lowtide.ir.aten import resolve, substitute
from lowtide.ir.graph import Role

__all__ = ["node_bytes", "node_flops", "roofline_costs", "roofline_s"]


def roofline_costs(graph: Graph, device: Device) -> dict[int, float]:
    """Seconds by node id on `device`."""
    return {node.id: roofline_s(graph, node, device) for node in graph.nodes}


def roofline_s(graph: Graph, node: Node, device: Device) -> float:
    """Predicted seconds of one node."""
    if graph.is_view(node):
        return 0.0
    if isinstance(node.op, Store | Load):
        return node_bytes(graph, node) / 2 / device.link
    if isinstance(node.op, Fission):
        costs = [sum(roofline_costs(body, device).values()) for body in node.op.bodies]
        return sum(costs[part.body] for part in node.op.parts)
    traffic = node_bytes(graph, node) / device.bandwidth
    if isinstance(node.op, Fused):
        arithmetic = sum(_arithmetic_s(node.op.body, inner, device) for inner in node.op.body.nodes)
    else:
        arithmetic = _arithmetic_s(graph, node, device)
    return device.launch_s + max(arithmetic, traffic)


def node_bytes(graph: Graph, node: Node) -> int:
    """Bytes that a node reads and writes, each tensor once."""
    touched = [*dict.fromkeys(node.inputs), *node.outputs, *node.writes]
    return sum(_tensor_bytes(graph.values[value], graph) for value in touched)


def _tensor_bytes(value: Value, graph: Graph) -> int:
    if graph.storages[value.storage].role is Role.HOST:
        return 0
    return value.meta.nbytes


def _arithmetic_s(graph: Graph, node: Node, device: Device) -> float:
    values = [graph.values[value] for value in (*node.outputs, *node.inputs)]
    dtype = values[0].meta.dtype if values else torch.float32
    return node_flops(graph, node) / device.flops_for(dtype)


def node_flops(graph: Graph, node: Node) -> int:
    """Floating-point operations of an Aten node; one per output element where no formula is known."""
    if not isinstance(node.op, Aten) or graph.is_view(node):
        return 0
    operator = resolve(node.op.overload)
    formula = cast("Callable[..., int] | None", flop_registry.get(operator.overloadpacket))
    outputs = [_blank(graph.values[value]) for value in node.outputs]
    if formula is None:
        return sum(out.numel() for out in outputs)
    inputs = [_blank(graph.values[value]) for value in node.inputs]
    args = [substitute(arg, inputs) for arg in node.op.args]
    kwargs = {name: substitute(arg, inputs) for name, arg in node.op.kwargs}
    return int(formula(*args, **kwargs, out_val=_results(node.op, args, outputs)))


def _results(op: Aten, args: list[Any], outputs: list[torch.Tensor]) -> Any:
    """The outputs in the places where the operator returns them; absent gradients are None."""
    if op.overload == "aten.convolution_backward.default":
        remaining = iter(outputs)
        return tuple(next(remaining) if wanted else None for wanted in args[-1])
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _blank(value: Value) -> torch.Tensor:
    meta = value.meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
