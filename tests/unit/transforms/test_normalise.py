"""Rewrites that make a graph divisible keep its numbers, and happen once."""

from __future__ import annotations

import pytest
import torch

from lowtide.ir import Aten, Graph, Node
from lowtide.ir.text import parse_graph
from lowtide.ir.verify import verify
from lowtide.run.eager import run_graph
from lowtide.transforms.masks import pack_masks
from lowtide.transforms.normalise import normalise

NLL = """
input %0: f32[5,3]
input %1: i64[5]
input %2: f32[3] buffer
%3: f32[] output, %4: f32[] output = aten.nll_loss_forward.default(%0, %1, {weight}, 1, {ignored})
%5: f32[] = aten.full.default([], 1.0)
%6: f32[5,3] output = aten.nll_loss_backward.default(%5, %0, %1, {weight}, 1, {ignored}, %4)
return %3, %4, %6
"""


def overloads(graph: Graph) -> list[str]:
    return [node.op.overload for node in graph.nodes if isinstance(node.op, Aten)]


def results(graph: Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    found = run_graph(graph, dict(zip(graph.inputs, inputs, strict=True)))
    return [found[value] for value in graph.outputs]


def assert_same(before: Graph, after: Graph, *inputs: torch.Tensor, exact: bool = False) -> None:
    verify(after)
    assert after.outputs == before.outputs
    for one, other in zip(results(after, *inputs), results(before, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("weight", ["None", "%2"])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_a_mean_nll_becomes_a_sum_over_a_total_that_is_known_before(weight: str, ignored: int) -> None:
    graph = parse_graph(NLL.format(weight=weight, ignored=ignored))
    edited = normalise(graph).graph
    forward = next(node for node in edited.nodes if "nll_loss_forward" in str(node.op))
    assert isinstance(forward.op, Aten)
    assert forward.op.args[3] == 2
    assert edited.producer[4] != forward.id
    targets = torch.tensor([0, ignored, 2, 1, ignored])
    assert_same(graph, edited, torch.rand(5, 3), targets, torch.rand(3) + 0.5)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss"])
def test_mean_losses_and_their_gradients(name: str) -> None:
    delta = "" if name == "mse_loss" else ", 1.0"
    graph = parse_graph(
        f"""
        input %0: f32[5,3]
        input %1: f32[5,3]
        %2: f32[] output = aten.{name}.default(%0, %1, 1{delta})
        %3: f32[] = aten.full.default([], 2.0)
        %4: f32[5,3] output = aten.{name}_backward.default(%3, %0, %1, 1{delta})
        return %2, %4
        """
    )
    edited = normalise(graph).graph
    assert overloads(edited).count("aten.div.Scalar") == 2
    assert_same(graph, edited, torch.randn(5, 3), torch.randn(5, 3))


def test_a_mean_over_the_batch_becomes_a_sum_and_one_over_rows_stays() -> None:
    graph = parse_graph(
        """
        input %0: f32[4,3]
        %1: f32[3] output = aten.mean.dim(%0, [0])
        %2: f32[4,1] output = aten.mean.dim(%0, [1], True)
        %3: f32[] output = aten.mean.default(%0)
        return %1, %2, %3
        """
    )
    edited = normalise(graph).graph
    assert overloads(edited).count("aten.mean.dim") == 1
    assert "aten.mean.default" not in overloads(edited)
    assert_same(graph, edited, torch.randn(4, 3))


DRAW = """
input %0: f32[4,{width}]
%1: f32[4,{width}] = aten.relu.default(%0)
%2: f32[4,{width}] = aten.bernoulli.p(%1, 0.5)
%3: f32[4,{width}] output = aten.mul.Tensor(%0, %2)
%4: f32[4,{width}] output = aten.rand_like.default(%1)
%5: f32[4,{width}] output = aten.ones_like.default(%1)
return %3, %4, %5
"""


def test_draws_lose_their_false_operand_and_keep_their_bits() -> None:
    graph = parse_graph(DRAW.format(width=3))
    edited = normalise(graph).graph
    assert edited.readers[1] == ()
    assert "aten.ones_like.default" not in overloads(edited)
    assert_same(graph, edited, torch.randn(4, 3), exact=True)


@pytest.mark.parametrize(("width", "largest"), [(8, 4 * 8 // 8), (16, 8), (3, 12)])
def test_masks_are_kept_in_bits_or_bytes(width: int, largest: int) -> None:
    graph = normalise(parse_graph(DRAW.format(width=width))).graph
    edited = pack_masks(graph).graph
    kept = [edited.storage_of(node.outputs[0]).nbytes for node in edited.nodes if _is_kept(edited, node)]
    assert kept == [largest]
    assert_same(graph, edited, torch.randn(4, width), exact=True)


def _is_kept(graph: Graph, node: Node) -> bool:
    """The cast that ends the packing, not that of the powers of two."""
    wanted = (("dtype", torch.uint8),), (("dtype", torch.bool),)
    cast = (
        isinstance(node.op, Aten) and node.op.overload == "aten._to_copy.default" and node.op.kwargs in wanted
    )
    return cast and graph.values[node.inputs[0]].meta.dtype == torch.float32


@pytest.mark.parametrize(
    "text", [NLL.format(weight="%2", ignored=1), DRAW.format(width=8), DRAW.format(width=3)]
)
def test_twice_is_once(text: str) -> None:
    once = normalise(parse_graph(text)).graph
    assert normalise(once).graph is once
    packed = pack_masks(once).graph
    assert pack_masks(packed).graph is packed
    assert normalise(packed).graph is packed
