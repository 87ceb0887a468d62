"""The paper's planner as printed, the exact one, and measured profit, beside the extended planner."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.differential.fusion_bodies import trace
from torch.nn import functional

from lowtide.fusion.exact import exact_blocks, predicted_seconds
from lowtide.fusion.listing import list_blocks
from lowtide.fusion.modes import MODES
from lowtide.fusion.profile import Profiled
from lowtide.fusion.profit import Pricing
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten
from lowtide.ir.verify import verify
from lowtide.run.store import ProfileStore
from lowtide.transforms.fuse import FuseCandidate, IllegalFusion, apply


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def named(graph: Graph, blocks: Sequence[frozenset[int]]) -> list[list[str]]:
    ops = [[graph.node[n].op for n in sorted(block)] for block in blocks]
    return [[op.overload.split(".")[1] for op in block if isinstance(op, Aten)] for block in ops]


def listed(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[list[str]]:
    graph = trace(function, inputs)
    blocks = list_blocks(graph)
    verify(apply(graph, FuseCandidate(blocks)).graph)
    return named(graph, blocks)


def test_the_papers_example_of_a_grown_block() -> None:
    """Seed add takes the product behind it, becomes Many-to-Many, and then the product before is red."""

    def network(x: torch.Tensor, v: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.relu((torch.mm(x, v) + y) @ w) * 2) - 1

    found = listed(network, [rand(32, 32)] * 4)
    assert found == [["add", "mm", "relu", "mul", "sub"]]


def test_the_seed_is_the_one_to_one_operator_with_the_smallest_result() -> None:
    def two(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(torch.relu(x) + 1), torch.tanh(torch.tanh(y) * 2)

    assert [len(block) for block in listed(two, [rand(64, 64), rand(8, 8)])] == [3, 3]
    assert listed(two, [rand(64, 64), rand(8, 8)])[0][0] == "tanh"


def test_operators_that_no_seed_reaches_stay_single() -> None:
    assert listed(lambda x, v, w: (x @ v) @ w, [rand(32, 32)] * 3) == []
    assert listed(lambda x: torch.softmax(x.sum(0, keepdim=True), -1), [rand(32, 32)]) == []


def test_one_to_many_before_many_to_many_is_red() -> None:
    """The broadcast add has no One-to-One operator beside it: the product behind it does not join."""
    found = listed(lambda x, b, w: torch.relu(x) @ w + (b + x), [rand(32, 32), rand(32), rand(32, 32)])
    assert all(not {"mm", "softmax"} <= set(block) for block in found)


def test_rows_are_where_the_extended_planner_goes_further() -> None:
    """softmax of a layer norm: red for the paper, one kernel here."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(functional.layer_norm(x, (64,)) * 2, -1)

    graph = trace(rows, [rand(256, 64)])
    most = {mode: max(map(len, plan(graph)), default=1) for mode, plan in MODES.items()}
    assert most["dnnfusion"] == 2 and most["extended"] == most["exact"] == 3


def random_graph(seed: int, count: int) -> Graph:
    rng = random.Random(seed)

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pool = [x, y]
        for _ in range(count):
            a, b = rng.choice(pool), rng.choice(pool)
            pool.append(
                rng.choice(
                    [
                        lambda a=a: torch.relu(a),
                        lambda a=a, b=b: a + b,
                        lambda a=a, b=b: a * b,
                        lambda a=a: torch.softmax(a, -1),
                        lambda a=a: a - a.sum(0, keepdim=True),
                        lambda a=a: torch.exp(a),
                    ]
                )()
            )
        return pool[-1], pool[len(pool) // 2 + 1]

    return trace(program, [rand(96, 64), rand(96, 64)])


def partitions(items: list[int]) -> Iterator[list[frozenset[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [item for item in rest if item not in others]
            for found in partitions(left):
                yield [frozenset({first, *others}), *found]


def fits(graph: Graph, blocks: list[frozenset[int]]) -> bool:
    try:
        apply(graph, FuseCandidate(tuple(b for b in blocks if len(b) > 1)))
    except IllegalFusion:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_exact_is_the_best_partition(seed: int) -> None:
    """Against every partition of a handful of operators that leaves no cycle."""
    graph, pricing = random_graph(seed, 4), Pricing()
    blocks = exact_blocks(graph, pricing)
    ours = predicted_seconds(graph, blocks, pricing)
    numbers = [n.id for n in graph.nodes if not graph.is_view(n)]
    best = min(
        predicted_seconds(graph, [b for b in found if len(b) > 1], pricing)
        for found in partitions(numbers)
        if fits(graph, found) and all(linked(graph, b) and priced(graph, b, pricing) for b in found)
    )
    assert ours == pytest.approx(best, rel=1e-9)


def linked(graph: Graph, block: frozenset[int]) -> bool:
    """Whether values that members make or read connect the block."""
    touched = {n: {*graph.node[n].inputs, *graph.node[n].outputs} for n in block}
    reached = {min(block)}
    for _ in block:
        known = set().union(*(touched[n] for n in reached))
        reached |= {n for n in block if touched[n] & known}
    return reached == block


def priced(graph: Graph, block: frozenset[int], pricing: Pricing) -> bool:
    from lowtide.ir.extract import extract

    body = extract(graph, block).body
    return pricing.seconds(body) is not None and pricing.compiles(body)


@pytest.mark.parametrize("seed", range(8))
def test_modes_in_order_of_predicted_time(seed: int) -> None:
    graph, pricing = random_graph(100 + seed, 8), Pricing()
    times = {}
    for mode, plan in MODES.items():
        blocks = plan(graph, pricing)
        verify(apply(graph, FuseCandidate(blocks)).graph)
        times[mode] = predicted_seconds(graph, blocks, pricing)
    assert times["exact"] <= min(times.values()) * (1 + 1e-9)
    assert times["extended"] <= predicted_seconds(graph, (), pricing)


def test_a_measured_block_is_measured_once(tmp_path: Any) -> None:
    """Under its canonical form: other ids, another process, the same number."""
    store = ProfileStore(tmp_path / "profile.sqlite")
    first = Profiled(store=store)
    body = trace(lambda x: torch.relu(x) * 2 + 1, [rand(64, 64)])
    seconds = first.seconds(body)
    assert first.probes == 1 and seconds is not None and 0 < seconds < 0.1
    again = Profiled(store=ProfileStore(tmp_path / "profile.sqlite"))
    assert again.seconds(trace(lambda y: torch.relu(y) * 2 + 1, [rand(64, 64)])) == seconds
    assert again.probes == 0
    assert again.seconds(trace(lambda y: torch.relu(y) * 2 + 1, [rand(64, 65)])) is not None
    assert again.probes == 1


def test_beyond_the_budget_the_prediction_stands() -> None:
    body = trace(lambda x: torch.relu(x) * 2 + 1, [rand(64, 64)])
    assert Profiled(budget=0).seconds(body) == Pricing().seconds(body)
