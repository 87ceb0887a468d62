"""Swap: the same numbers, fewer bytes while the value is away."""

from __future__ import annotations

import pytest
import torch
from tests.differential.fusion_bodies import trace

from lowtide.analysis.facts import assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.ir import Graph
from lowtide.ir.ops import Load, Store
from lowtide.ir.text import print_graph
from lowtide.ir.verify import verify
from lowtide.run.eager import run_graph
from lowtide.transforms.swap import SwapCandidate, apply, candidates, faults


def step() -> tuple[Graph, list[torch.Tensor]]:
    """x is used, then a chain of four, then its square root's exponential again."""

    def body(x: torch.Tensor) -> torch.Tensor:
        kept = torch.exp(x)
        y = torch.sin(kept)
        for _ in range(4):
            y = torch.cos(y)
        return y * kept

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    return trace(body, [x]), [x]


def run(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = run_graph(graph, dict(zip(graph.inputs, inputs, strict=True)))
    return [found[value] for value in graph.outputs]


def test_a_swap_is_bit_equal_and_frees_the_gap() -> None:
    graph, inputs = step()
    (candidate,) = candidates(graph)
    swapped = apply(graph, candidate).graph
    verify(swapped)
    assert all(torch.equal(a, b) for a, b in zip(run(graph, inputs), run(swapped, inputs), strict=True))
    assert [type(node.op) for node in swapped if isinstance(node.op, Store | Load)] == [Store, Load]
    order = [node.id for node in swapped]
    gap = order.index(next(node.id for node in swapped if isinstance(node.op, Load))) - 1
    before = timeline(graph, [node.id for node in graph], assumed_facts(graph))
    after = timeline(swapped, order, assumed_facts(swapped))
    kept = graph.storage_of(candidate.value).id
    assert kept in {s for buffer in before.alive(gap - 1) for s in buffer.storages}
    assert kept not in {s for buffer in after.alive(gap) for s in buffer.storages}


def test_every_candidate_is_legal_and_prints() -> None:
    graph, _ = step()
    for candidate in candidates(graph):
        assert not faults(graph, candidate)
        assert "store" in print_graph(apply(graph, candidate).graph).lower()


def test_what_the_caller_owns_and_results_are_refused() -> None:
    graph, _ = step()
    first, last = graph.nodes[0].id, graph.nodes[-1].id
    with pytest.raises(ValueError, match="the caller's"):
        apply(graph, SwapCandidate(graph.inputs[0], first, last))
    with pytest.raises(ValueError, match="result"):
        apply(graph, SwapCandidate(graph.outputs[0], first, last))


def test_a_load_before_its_store_is_refused() -> None:
    graph, _ = step()
    value = graph.nodes[0].outputs[0]
    with pytest.raises(ValueError, match="order"):
        apply(graph, SwapCandidate(value, graph.nodes[-1].id, graph.nodes[1].id))
