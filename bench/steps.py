"""A module as a flat list of steps: kernels on buffers that are allocated once, ATen for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide.capture.door import capture
from lowtide.fusion.codegen.library import compile_bodies
from lowtide.fusion.layout import channels_last
from lowtide.fusion.planner import plan_blocks
from lowtide.fusion.profit import Pricing
from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Fused
from lowtide.transforms.fuse import FuseCandidate, apply
from lowtide.transforms.rewriting.derived import Prepared, split_derived
from lowtide.transforms.rewriting.rewrite import RewriteOptions, rewrite
from lowtide.workload import Workload


def build(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Tensor], int, int]:
    """(a call that returns the output, operators before, kernels and operators after)."""
    program = capture(Workload(module, args=inputs))
    prepared = split_derived(rewrite(program.graph, RewriteOptions(derive=True)).graph)
    graph = fused_graph(prepared.graph)
    given = program.bind(inputs, {}, ())
    values = _allocate(graph, {**given, **_run_once(prepared, given)})
    steps = _steps(graph, values)
    result = graph.outputs[0]

    def run() -> Tensor:
        for step in steps:
            step()
        return values[result]

    count = sum(not program.graph.is_view(node) for node in program.graph.nodes)
    return run, count, len(steps)


def fused_graph(plain: Graph) -> Graph:
    """The graph as kernels: layouts chosen, groups planned and contracted."""
    laid = channels_last(plain).graph
    return apply(laid, FuseCandidate(plan_blocks(laid, Pricing(keep=True)))).graph


def prepared_graph(graph: Graph) -> tuple[Graph, Graph, Graph]:
    """(as captured, rewritten without what runs once, fused): what is launched at each stage."""
    plain = split_derived(rewrite(graph, RewriteOptions(derive=True)).graph).graph
    return graph, plain, fused_graph(plain)


def _run_once(prepared: Prepared, given: dict[int, Tensor]) -> dict[int, Tensor]:
    """Weights made from weights."""
    values = dict(given)
    with torch.no_grad():
        for node in prepared.preparation.nodes:
            assert isinstance(node.op, Aten)
            results = tensors_of(call(node.op, [values[v] for v in node.inputs]))
            values.update(zip(node.outputs, results, strict=False))
    return {value: values[value] for value in prepared.state}


def _allocate(graph: Graph, given: dict[int, Tensor]) -> dict[int, Tensor]:
    """Every value as a tensor: results of kernels on memory of their own, views on what they view."""
    values = dict(given)
    homes = {graph.values[v].storage: t.untyped_storage() for v, t in given.items()}
    for node in graph.nodes:
        for out in node.outputs:
            value = graph.values[out]
            if value.storage not in homes:
                homes[value.storage] = torch.UntypedStorage(graph.storages[value.storage].nbytes)
            blank = torch.empty(0, dtype=value.meta.dtype)
            values[out] = blank.set_(homes[value.storage], value.offset, value.meta.shape, value.meta.stride)
    return values


def _steps(graph: Graph, values: dict[int, Tensor]) -> list[Callable[[], object]]:
    fused = [node for node in graph.nodes if isinstance(node.op, Fused)]
    library = compile_bodies([node.op.body for node in fused if isinstance(node.op, Fused)], keep=True)
    assert library is not None, "no compiler"
    kernels = {node.id: library.kernel(k) for k, node in enumerate(fused)}
    room = torch.empty(
        max((k.signature.scratch_bytes(1) for k in kernels.values()), default=0) + 64, dtype=torch.uint8
    )
    start = (room.data_ptr() + 63) // 64 * 64
    steps: list[Callable[[], object]] = []
    for node in graph.nodes:
        if node.id in kernels:
            kernel = kernels[node.id]
            used = [values[node.inputs[k]] for k in kernel.signature.tensors] + [
                values[o] for o in node.outputs
            ]
            kept = torch.empty(kernel.signature.prepared_bytes + 64, dtype=torch.uint8)
            pointers = [tensor.data_ptr() for tensor in used]
            if kernel.signature.prepared_bytes:
                pointers.append((kept.data_ptr() + 63) // 64 * 64)
                kernel.prepare(pointers, start)
            run = kernel.bind(pointers, [], start, 1)
            steps.append(_holding(run, room, kept))
        elif not graph.is_view(node):
            steps.append(_eager(node, values))
    return steps


def _holding(run: Callable[[], None], *rooms: Tensor) -> Callable[[], object]:
    """`run`, keeping its memory alive."""
    return lambda _rooms=rooms: run()  # type: ignore[misc]


def _eager(node: Node, values: dict[int, Tensor]) -> Callable[[], object]:
    op = node.op
    assert isinstance(op, Aten)

    def run() -> None:
        for out, result in zip(
            node.outputs, tensors_of(call(op, [values[v] for v in node.inputs])), strict=False
        ):
            values[out].copy_(result)

    return run
