"""Channels-last where convolutions want it: the layout of a block by its dominant operator (DNNFusion).

Problem.  A convolution's kernel reads and writes pixels with their channels side by side; ATen's default
keeps channels apart.  Converting around every convolution costs as much as small convolutions do.

Method.  In a graph with convolutions, every image-shaped intermediate whose producer and readers all have
kernels is declared to lie channels-last.  No node is added: kernels read and write whatever strides their
values say, so what stays (arguments, results, what is viewed) is converted by the kernel next to it.

rewrite:    strides of values ``[n, c, h, w]`` from row-major to channels innermost.
legal when: the value is a temporary, alone on its storage, and what makes and reads it has a kernel.
effect:     no bytes and no nodes; windows read contiguous channels.

Not done here: weighing (all or nothing per graph), other layouts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.analysis.key import node_key
from lowtide.fusion.codegen.lower import knows, lower
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir.edit import Edit
from lowtide.ir.extract import extract
from lowtide.ir.graph import Graph, Node, Role, TensorMeta
from lowtide.ir.ops import Aten

__all__ = ["channels_last"]


def channels_last(graph: Graph) -> Edit:
    """`graph` with its images channels-last; itself if it has no convolution with a kernel."""
    able = _able(graph)
    if not any(_overload(graph.node[number]) == "aten.convolution.default" for number in able):
        return Edit(graph)
    values = {
        number: replace(value, meta=_turned(value.meta)) if _movable(graph, number, able) else value
        for number, value in graph.values.items()
    }
    return Edit(Graph(graph.nodes, values, graph.storages, graph.inputs, graph.outputs))


def _overload(node: Node) -> str:
    return node.op.overload if isinstance(node.op, Aten) else ""


def _able(graph: Graph) -> frozenset[int]:
    """Nodes that have a kernel of their own."""
    known: dict[str, bool] = {}
    found = set()
    for node in graph.nodes:
        if graph.is_view(node) or node.writes or not knows(node.op):
            continue
        key = node_key(graph, node)
        if key not in known:
            known[key] = _compiles(graph, node)
        if known[key]:
            found.add(node.id)
    return frozenset(found)


def _compiles(graph: Graph, node: Node) -> bool:
    try:
        lower(extract(graph, {node.id}).body, keep=True)
    except Unfusable:
        return False
    return True


def _movable(graph: Graph, number: int, able: frozenset[int]) -> bool:
    value = graph.values[number]
    meta, storage = value.meta, graph.storages[value.storage]
    if len(meta.shape) != 4 or meta.dtype != torch.float32 or not meta.contiguous or not meta.numel:
        return False
    if storage.role is not Role.TEMP or len(graph.views_of[storage.id]) > 1 or value.offset:
        return False
    nodes = {graph.producer.get(number, -1), *graph.readers[number]}
    return nodes <= able


def _turned(meta: TensorMeta) -> TensorMeta:
    _, c, h, w = meta.shape
    return replace(meta, stride=(c * h * w, 1, w * c, c))
