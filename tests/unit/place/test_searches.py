"""The two exact searches: every combination of their ideas, proofs, limits, and the frozen instances."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from benchmarks.placement.instances import frozen, generate, read

from lowtide.place import Block, PlacementProblem, check_placement, lower_bound, place_exact, place_greedy
from lowtide.place.blocks import Blocks, Ints, blocks_of
from lowtide.place.exact import SEARCHES
from lowtide.place.fit import DOES_NOT, FITS, LIMIT, Pruning, fit
from lowtide.place.valleys import Digging, fit_valleys


def blocks_from(*rows: tuple[int, int, int]) -> Blocks:
    return blocks_of([Block(k, *row) for k, row in enumerate(rows)], 1)


# Greedy is above the optimum in the first two; the optimum is above the bound in the last.
TRICKY = (
    (blocks_from((5, 1, 6), (2, 5, 9), (3, 6, 12), (4, 6, 10), (3, 2, 8), (1, 2, 8), (4, 1, 7)), 17),
    (blocks_from((3, 5, 7), (3, 5, 10), (3, 2, 8), (3, 5, 9), (4, 0, 3), (4, 0, 3), (2, 2, 6)), 14),
    (blocks_from((3, 2, 6), (5, 6, 9), (5, 7, 10), (4, 0, 5), (2, 5, 7), (4, 0, 1), (3, 1, 7)), 11),
)
RANK = np.arange(7)


def is_sound(blocks: Blocks, capacity: int, offsets: Ints) -> bool:
    ends = offsets + blocks.size
    apart = [
        blocks.high[i] <= blocks.low[j] or blocks.high[j] <= blocks.low[i]
        or ends[i] <= offsets[j] or ends[j] <= offsets[i]
        for i in range(len(blocks)) for j in range(i)
    ]  # fmt: skip
    return all(apart) and bool((offsets >= 0).all()) and bool((ends <= capacity).all())


@pytest.mark.parametrize(("blocks", "best"), TRICKY)
def test_no_pruning_idea_of_fit_changes_the_answer(blocks: Blocks, best: int) -> None:
    for switches in product((False, True), repeat=len(Pruning._fields)):
        pruning = Pruning(*switches)
        status, offsets, _ = fit(blocks, best, RANK, 100_000, pruning)
        assert (status, is_sound(blocks, best, offsets)) == (FITS, True), pruning
        assert fit(blocks, best - 1, RANK, 100_000, pruning)[0] == DOES_NOT, pruning


@pytest.mark.parametrize(("blocks", "best"), TRICKY)
def test_no_idea_of_fit_valleys_changes_the_answer(blocks: Blocks, best: int) -> None:
    for switches in product((False, True), repeat=len(Digging._fields)):
        digging = Digging(*switches)
        status, offsets, _ = fit_valleys(blocks, best, RANK, 100_000, digging)
        assert (status, is_sound(blocks, best, offsets)) == (FITS, True), digging
        assert fit_valleys(blocks, best - 1, RANK, 100_000, digging)[0] == DOES_NOT, digging


def nodes_used(search: Callable[[Blocks, Ints], int]) -> int:
    """Nodes on small frozen instances, each with two orders of preference."""
    small = [i.problem for i in frozen() if len(i.problem.blocks) <= 220 and i.name.startswith("tiles")]
    used = 0
    for problem in small:
        blocks = blocks_of(problem.blocks, problem.alignment)
        for key in (blocks.size * blocks.width, blocks.size):
            rank = np.empty(len(blocks), np.int64)
            rank[np.argsort(-key, kind="stable")] = np.arange(len(blocks))
            used += search(blocks, rank)
    return used


@pytest.mark.parametrize("idea", ["fewest", "both_ends", "memory", "decompose"])
def test_ideas_of_fit_valleys_save_nodes(idea: str) -> None:
    without = Digging()._replace(**{idea: False})
    assert nodes_used(lambda b, rank: fit_valleys(b, b.bound, rank, 3000)[2]) < nodes_used(
        lambda b, rank: fit_valleys(b, b.bound, rank, 3000, without)[2]
    )


@pytest.mark.parametrize("idea", ["canonical", "inference", "monotonic", "open_floor"])
def test_ideas_of_fit_save_nodes(idea: str) -> None:
    blocks, best = TRICKY[2]
    without = Pruning()._replace(**{idea: False})
    used = [fit(blocks, best - 1, RANK, 1000, pruning)[2] for pruning in (Pruning(), without)]
    assert used[0] < used[1]


@pytest.mark.parametrize("search", [fit, fit_valleys])
def test_a_node_limit_says_nothing(search: object) -> None:
    blocks, best = TRICKY[0]
    status, _, used = (fit if search is fit else fit_valleys)(blocks, best, RANK, 3)
    assert (status, used) == (LIMIT, 3)


@pytest.mark.parametrize("name", SEARCHES)
def test_either_search_alone_proves_what_both_prove(name: str) -> None:
    rows = ((3, 2, 6), (5, 6, 9), (5, 7, 10), (4, 0, 5), (2, 5, 7), (4, 0, 1), (3, 1, 7))
    problem = PlacementProblem(tuple(Block(k, *row) for k, row in enumerate(rows)), 1)
    exact = place_exact(problem, 30.0, (name,))
    assert (exact.proven, exact.placement.arena_bytes) == (True, 11)


EASY = ("tiles-160-1", "tiles-220-1", "loose-160-0")


def test_the_frozen_instances_are_what_they_say() -> None:
    instances = {instance.name: instance for instance in frozen()}
    assert len(instances) >= 16
    for instance in instances.values():
        assert len(instance.problem.blocks) > 100
        assert lower_bound(instance.problem) == instance.optimum_bytes
        assert place_greedy(instance.problem).arena_bytes > 1.1 * instance.optimum_bytes


@pytest.mark.parametrize("name", EASY)
def test_exact_search_reaches_the_bound_where_greedy_wastes_a_tenth(name: str) -> None:
    instance = next(instance for instance in frozen() if instance.name == name)
    exact = place_exact(instance.problem, 30.0)
    assert exact.proven
    assert exact.placement.arena_bytes == instance.optimum_bytes
    assert check_placement(instance.problem, exact.placement) == []


def test_the_files_are_what_the_generator_writes(tmp_path: object) -> None:
    known = {instance.name: instance for instance in frozen()}
    first = next(generate())
    assert known[first.name] == first
    assert read.__doc__
