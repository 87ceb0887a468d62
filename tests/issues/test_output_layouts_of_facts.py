"""Facts of a row-major result served for one that the graph lays out otherwise: wrong numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import lowtide as lt
from lowtide.analysis.key import node_key
from lowtide.capture import capture
from lowtide.ir import Graph
from lowtide.run.plan import build_plan


def turned(graph: Graph, value: int) -> Graph:
    """`graph` with one image channels-last."""
    old = graph.values[value]
    _, c, h, w = old.meta.shape
    laid = replace(old, meta=replace(old.meta, stride=(c * h * w, 1, w * c, c)))
    return replace(graph, values={**graph.values, value: laid})


def test_a_result_that_lies_otherwise_has_facts_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3)).eval()
    x = torch.randn(1, 3, 12, 12)
    program = capture(lt.Workload(model, (x,)))
    graph = program.graph
    (pad,) = (node for node in graph.nodes if "constant_pad_nd" in repr(node.op))
    other = turned(graph, pad.outputs[0])
    assert node_key(graph, pad) != node_key(other, pad)
    with torch.no_grad():
        expected = build_plan(program, graph)(x)
        assert torch.allclose(build_plan(program, other)(x), expected, atol=1e-6)
