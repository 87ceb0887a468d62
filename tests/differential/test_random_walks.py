"""Random walks over legal moves (`walking`): not one wrong number.

Operators that nobody measured, all or some of them, have to be as right.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.differential.walking import WORKLOADS, scattered, walk_once
from tests.issues.ladder import eager_trace

from lowtide.analysis.facts import Facts
from lowtide.analysis.key import node_key
from lowtide.capture import capture
from lowtide.ir import Graph, Node
from lowtide.place.problem import Placement
from lowtide.run import probe as probing
from lowtide.run.probe import probe_tree
from lowtide.run.store import ProfileStore


@pytest.mark.parametrize("name", WORKLOADS)
def test_walks(name: str) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    program, eager = capture(workload), eager_trace(workload, 1)
    for seed in range(3):
        walk_once(program, eager, seed)


@pytest.mark.parametrize("name", WORKLOADS)
def test_walks_with_operators_that_nobody_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, as for a device that is not here; then some, as where they fail on made-up operands."""
    torch.manual_seed(0)
    workload = WORKLOADS[name]()
    program, eager = capture(workload), eager_trace(workload, 1)
    walk_once(program, eager, 1, measure=lambda graph: probe_tree(graph, "assumed"))
    make, store = probing.make_operands, ProfileStore(None)

    def fail(graph: Graph, node: Node) -> list[Any]:
        if random.Random(node_key(graph, node)).random() < 0.5:
            raise RuntimeError("these operands are no good")
        return make(graph, node)

    monkeypatch.setattr(probing, "make_operands", fail)
    for seed in range(2):
        with pytest.warns(RuntimeWarning, match="these operands are no good"):
            walk_once(program, eager, seed, measure=lambda graph: probe_tree(graph, store=store))


def test_walks_see_blocks_that_overlap() -> None:
    """Poisoned memory tells: with everything in one place, no walk passes."""

    def stacked(graph: Graph, order: tuple[int, ...], facts: Facts, source: random.Random) -> Placement:
        placement = scattered(graph, order, facts, source)
        return replace(placement, offsets={block: min(at, 64) for block, at in placement.offsets.items()})

    torch.manual_seed(0)
    workload = WORKLOADS["perceptron-dropout"]()
    program, eager = capture(workload), eager_trace(workload, 1)
    for seed in range(3):
        with pytest.raises((AssertionError, RuntimeError), match=r"differs|single memory location"):
            walk_once(program, eager, seed, place=stacked)
