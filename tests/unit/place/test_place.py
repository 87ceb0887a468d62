"""Placements of a few blocks, by hand; the judge's words; larger instances with a known optimum."""

from __future__ import annotations

import random

import pytest

from lowtide.place import (
    Block,
    Placement,
    PlacementProblem,
    check_placement,
    lower_bound,
    place,
    place_exact,
    place_greedy,
)
from lowtide.place.blocks import blocks_of, components


def problem_of(*rows: tuple[int, int, int], alignment: int = 1) -> PlacementProblem:
    return PlacementProblem(tuple(Block(k, *row) for k, row in enumerate(rows)), alignment)


def test_the_bound_counts_padding() -> None:
    assert lower_bound(problem_of((1, 0, 2), (65, 1, 3), alignment=64)) == 64 + 128
    assert lower_bound(problem_of((1, 0, 2), (65, 2, 3), alignment=64)) == 128
    assert lower_bound(PlacementProblem(())) == 0


def test_blocks_that_never_meet_share_their_bytes() -> None:
    problem = problem_of((100, 0, 2), (100, 2, 4), (100, 4, 6), alignment=64)
    assert dict(place_greedy(problem).offsets) == {0: 0, 1: 0, 2: 0}
    assert place_greedy(problem).arena_bytes == 128


def test_a_block_goes_into_a_gap_that_fits() -> None:
    problem = problem_of((4, 0, 9), (4, 1, 3), (4, 5, 8), (2, 2, 6))
    assert place_greedy(problem).arena_bytes == lower_bound(problem) == 10


def test_blocks_without_bytes_or_steps_are_placed_anywhere() -> None:
    problem = problem_of((0, 0, 5), (8, 2, 2), (8, 0, 5))
    assert dict(place(problem).offsets) == {0: 0, 1: 0, 2: 0}
    assert check_placement(problem, place(problem)) == []


def test_time_falls_apart_where_nothing_is_alive() -> None:
    problem = problem_of((4, 0, 2), (4, 1, 3), (9, 3, 4), (1, 4, 6), (1, 5, 7))
    assert [[block.id for block in part] for part in components(problem)] == [[0, 1], [2], [3, 4]]


def test_sections_are_the_stretches_between_events() -> None:
    blocks = blocks_of(problem_of((4, 0, 10), (4, 2, 5)).blocks, 1)
    assert blocks.low.tolist() == [0, 1]
    assert blocks.high.tolist() == [3, 2]
    assert blocks.live.tolist() == [4, 8, 4]


@pytest.mark.parametrize(
    ("offsets", "arena_bytes", "complaint"),
    [
        ({0: 0, 1: 64}, 256, "block 2 has no offset"),
        ({0: 0, 1: 64, 2: 128, 9: 0}, 256, "offset for block 9, which is not placed here"),
        ({0: 0, 1: 32, 2: 128}, 256, "block 1 lies at 32, which is not a multiple of 64"),
        ({0: 0, 1: 0, 2: 128}, 256, "blocks 0 and 1 are alive together and share bytes"),
        ({0: 0, 1: 64, 2: 192}, 256, "block 2 ends at 292, the arena at 256"),
        ({0: -64, 1: 64, 2: 128}, 256, "block 0 lies at -64, which is not a multiple of 64"),
    ],
)
def test_the_judge_names_what_is_wrong(offsets: dict[int, int], arena_bytes: int, complaint: str) -> None:
    problem = problem_of((50, 0, 2), (50, 1, 3), (100, 2, 4), alignment=64)
    assert complaint in check_placement(problem, Placement(offsets, arena_bytes))


def test_a_bound_that_no_placement_reaches_is_proven_out_of_reach() -> None:
    problem = problem_of(
        (3, 2, 6), (5, 6, 9), (5, 7, 10), (4, 0, 5), (2, 5, 7), (4, 0, 1), (3, 1, 7), alignment=1
    )
    exact = place_exact(problem, 5.0)
    assert lower_bound(problem) == 10
    assert (exact.proven, exact.placement.arena_bytes, exact.lower_bound_bytes) == (True, 11, 11)


def guillotine(seed: int, count: int, steps: int, units: int) -> PlacementProblem:
    """A rectangle of time x bytes cut into about `count` blocks: they fit without any waste."""
    rng = random.Random(seed)
    pieces = [(0, steps, 0, units)]
    while len(pieces) < count:
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * (piece[3] - piece[2]))
        start, stop, low, high = pieces.pop()
        if (rng.random() < 0.5 and stop - start > 1) or high - low == 1:
            cut = rng.randrange(start + 1, stop)
            pieces += [(start, cut, low, high), (cut, stop, low, high)]
        else:
            cut = rng.randrange(low + 1, high)
            pieces += [(start, stop, low, cut), (start, stop, cut, high)]
    rng.shuffle(pieces)
    return PlacementProblem(
        tuple(Block(k, (high - low) * 64, start, stop) for k, (start, stop, low, high) in enumerate(pieces))
    )


@pytest.mark.parametrize("seed", range(4))
def test_exact_finds_placements_without_waste_where_greedy_does_not(seed: int) -> None:
    problem = guillotine(seed, 100, 60, 200)
    exact = place_exact(problem, 30.0)
    assert exact.placement.arena_bytes == lower_bound(problem) == 200 * 64
    assert place_greedy(problem).arena_bytes > lower_bound(problem)
    assert check_placement(problem, exact.placement) == []


def test_greedy_places_thousands_of_blocks_well() -> None:
    rng = random.Random(0)
    problem = PlacementProblem(
        tuple(
            Block(k, rng.randrange(1, 1 << 20), start := rng.randrange(2000), start + rng.randrange(1, 200))
            for k in range(2000)
        )
    )
    placement = place_greedy(problem)
    assert placement.arena_bytes <= 1.03 * lower_bound(problem)
    assert check_placement(problem, placement) == []
