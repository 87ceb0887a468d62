"""Captured training steps and inferences, fused by the planner, against the same graphs unfused."""

from __future__ import annotations

import pytest
import torch
from tests.models.fused_run import run_graph

from lowtide.capture.door import capture
from lowtide.fusion.planner import plan_blocks
from lowtide.ir.graph import Graph, Role
from lowtide.ir.ops import Aten, Fused
from lowtide.ir.verify import verify
from lowtide.transforms.fuse import FuseCandidate, apply
from lowtide.workloads.parse import load_workload

WORKLOADS = (
    "gpt2:layers=2,dim=64,heads=4,seq=32,batch=2,vocab=128,mode=train",
    "gpt2:layers=2,dim=64,heads=4,seq=32,batch=2,vocab=128,mode=train,attention=explicit",
    "gpt2:layers=2,dim=64,heads=4,seq=32,batch=2,vocab=128,mode=infer,attention=explicit",
    "unet:batch=2,size=32,width=8,mode=train",
    "unet:batch=2,size=32,width=8,mode=infer",
    "mlp:batch=64,dim=32,layers=3,mode=train",
)


def given_of(program: object) -> dict[int, object]:
    """Fresh copies of everything resident, and host scalars, by value id."""
    workload = program.workload  # type: ignore[attr-defined]
    bound = program.bind(workload.args, workload.kwargs, workload.targets)  # type: ignore[attr-defined]
    copies: dict[int, torch.Tensor] = {}
    result: dict[int, object] = {}
    for value, tensor in bound.items():
        key = tensor.untyped_storage()._cdata
        if key not in copies:
            copies[key] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone())
        result[value] = torch.as_strided(copies[key], tensor.shape, tensor.stride(), tensor.storage_offset())
    result.update(program.scalars() if program.mode == "train" else {})  # type: ignore[attr-defined]
    return result


def kernels(graph: Graph) -> int:
    return sum(not graph.is_view(node) for node in graph.nodes)


@pytest.mark.parametrize("text", WORKLOADS)
def test_fused_graph_computes_the_same(text: str) -> None:
    workload = load_workload(text)
    program = capture(workload)
    if program.mode == "train":
        program.ensure_state()
    graph = program.graph
    fused = apply(graph, FuseCandidate(plan_blocks(graph))).graph
    verify(fused)
    assert kernels(fused) < kernels(graph)
    assert any(isinstance(node.op, Fused) and node.op.kind == "kernel" for node in fused.nodes)
    torch.manual_seed(0)
    with torch.no_grad():
        plain = run_graph(graph, given_of(program))
        torch.manual_seed(0)
        ours = run_graph(fused, given_of(program))
    buffers = [v for v in graph.inputs if graph.storage_of(v).role is Role.BUFFER]
    largest = max((plain[v].abs().max().item() for v in program.gradients.values()), default=0.0)
    for value in (*graph.outputs, *buffers, *program.gradients.values()):
        compare(ours[value], plain[value], largest)


def compare(ours: object, plain: object, largest: float) -> None:
    """1e-5 of the value's own scale; a bias before a batch norm has a true gradient of zero, what is there
    is rounding noise on the scale of the largest gradient."""
    assert isinstance(ours, torch.Tensor) and isinstance(plain, torch.Tensor)
    if plain.dtype.is_floating_point:
        assert (ours - plain).abs().max().item() <= max(1e-5 * plain.abs().max().item(), 1e-6 * largest)
    else:
        assert torch.equal(ours, plain)


def test_every_operator_is_kept_once() -> None:
    program = capture(load_workload(WORKLOADS[0]))
    graph = program.graph
    fused = apply(graph, FuseCandidate(plan_blocks(graph))).graph
    inside = [
        n.id
        for node in fused.nodes
        if isinstance(node.op, Fused) and node.op.kind == "kernel"
        for n in node.op.body
    ]
    outside = [node.id for node in fused.nodes if isinstance(node.op, Aten)]
    computing = [n.id for n in graph.nodes if isinstance(n.op, Aten) and not graph.is_view(n)]
    counted = [n for n in inside + outside if not graph.is_view(graph.node[n])]
    assert sorted(counted) == sorted(computing)
