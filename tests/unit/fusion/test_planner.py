"""Which groups the planner finds, and which it must not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.differential.fusion_bodies import trace
from torch.nn import functional

from lowtide.fusion.planner import Limits, plan_blocks
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten, Fused
from lowtide.ir.verify import verify
from lowtide.transforms.fuse import FuseCandidate, IllegalFusion, apply


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def names(graph: Graph, block: frozenset[int]) -> list[str]:
    ops = [graph.node[number].op for number in sorted(block)]
    return [op.overload.split(".")[1] for op in ops if isinstance(op, Aten)]


def planned(function: Callable[..., Any], inputs: Sequence[torch.Tensor], **limits: Any) -> list[list[str]]:
    graph = trace(function, inputs)
    blocks = plan_blocks(graph, limits=Limits(**limits))
    verify(apply(graph, FuseCandidate(blocks)).graph)
    return [names(graph, block) for block in blocks]


def test_a_chain_is_one_block() -> None:
    assert planned(lambda x: torch.relu(x + 1) * 2, [rand(64, 64)]) == [["add", "relu", "mul"]]


def test_a_residual_around_an_unfusable_operator_stays_convex() -> None:
    """add reads relu's result and cumsum's: fusing relu with add would put cumsum before and after it."""

    def skip(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return y + torch.cumsum(y, 0)

    assert planned(skip, [rand(64, 64)]) == []


def test_a_residual_around_fusable_operators_collapses() -> None:
    def skip(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        return y + torch.tanh(y) * 3

    assert planned(skip, [rand(64, 64)]) == [["relu", "tanh", "mul", "add"]]


def test_views_connect_their_neighbours() -> None:
    found = planned(lambda x, w: functional.gelu((x @ w).view(4, 32, 64)), [rand(128, 48), rand(48, 64)])
    assert found == [["mm", "gelu"]]


def test_two_products_are_two_blocks() -> None:
    def network(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ v) @ w

    found = planned(network, [rand(256, 128), rand(128, 256), rand(256, 128)])
    assert sorted(found) == [["mm"], ["mm", "relu"]]


def test_attention_written_out_is_one_block() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v

    found = planned(attention, [rand(4, 128, 64)] * 3)
    assert found == [["bmm", "mul", "_softmax", "bmm"]]


def test_softmax_takes_in_its_scale_and_mask() -> None:
    mask = torch.ones(64, 64).tril().bool()
    found = planned(lambda x: torch.softmax((x * 0.1).masked_fill(~mask, -1e9), -1), [rand(4, 64, 64)])
    assert [set(block) for block in found] == [{"mul", "masked_fill", "_softmax"}] or "mul" in found[0]


def test_random_operators_are_never_members() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * torch.bernoulli(torch.full_like(x, 0.5)) + 1

    assert all("bernoulli" not in block for block in planned(noisy, [rand(64, 64)]))


def test_blocks_respect_the_limits() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = torch.relu(x) + 1
        return x

    assert max(len(block) for block in planned(chain, [rand(64, 64)], operators=5)) == 5


def test_expensive_values_are_not_recomputed_for_every_reader() -> None:
    """exp of a row's statistics broadcast back is one block; exp inlined into a product's columns is not."""
    found = planned(lambda x, w: torch.exp(torch.tanh(x)) @ w, [rand(512, 256), rand(256, 4096)])
    assert ["mm"] in found


def test_groups_that_depend_on_each_other_are_refused() -> None:
    def ladder(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = torch.relu(x), torch.tanh(y)
        return a + b, torch.exp(a * b)

    graph = trace(ladder, [rand(8, 8), rand(8, 8)])
    by_name = {node.op.overload.split(".")[1]: node.id for node in graph.nodes if isinstance(node.op, Aten)}
    fine = frozenset({by_name["relu"], by_name["mul"]})
    apply(graph, FuseCandidate((fine,)))
    with pytest.raises(IllegalFusion, match="before each other"):
        apply(
            graph, FuseCandidate((frozenset({by_name["relu"], by_name["exp"]}), frozenset({by_name["mul"]})))
        )


def test_bodies_have_inputs_of_their_own() -> None:
    """Two windows of one storage become two inputs, each alone on its storage."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        left, right = x.split(32, 1)
        return torch.relu(left) * right

    graph = trace(halves, [rand(16, 64)])
    fused = apply(graph, FuseCandidate(plan_blocks(graph))).graph
    body = next(node.op.body for node in fused.nodes if isinstance(node.op, Fused))
    assert len(body.inputs) == 2
    assert len({body.values[value].storage for value in body.inputs}) == 2
    assert all(body.values[value].offset == 0 for value in body.inputs)
