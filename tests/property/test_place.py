"""Placers on random blocks, against the judge and against trying every order."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

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

SOME = settings(max_examples=150, deadline=None)
FEW = settings(max_examples=30, deadline=None)


@st.composite
def problems(draw: st.DrawFn, max_blocks: int, empty: bool = True) -> PlacementProblem:
    """Blocks with random ids; with `empty`, some have no bytes or no steps."""
    ids = draw(st.lists(st.integers(0, 999), unique=True, max_size=max_blocks))
    blocks = []
    for name in ids:
        start = draw(st.integers(0, 8))
        nbytes = draw(st.integers(0 if empty else 1, 12)) * draw(st.sampled_from((1, 10, 64)))
        blocks.append(Block(name, nbytes, start, start + draw(st.integers(0 if empty else 1, 6))))
    return PlacementProblem(tuple(blocks), draw(st.sampled_from((1, 16, 64))))


def least_arena(problem: PlacementProblem) -> int:
    """The smallest arena: some order, each block standing on what is under it, makes it."""
    step = problem.alignment
    best = 1 << 60
    for order in permutations(problem.blocks):
        ends: list[tuple[Block, int]] = []
        for block in order:
            under = [end for other, end in ends if other.start < block.stop and block.start < other.stop]
            ends.append((block, max(under, default=0) + -(-block.nbytes // step) * step))
        best = min(best, max([end for _, end in ends], default=0))
    return best


@SOME
@given(problems(max_blocks=20))
def test_the_judge_accepts_every_placer(problem: PlacementProblem) -> None:
    bound = lower_bound(problem)
    for placement in (place_greedy(problem), place(problem, 0.05), place(problem, 0)):
        assert check_placement(problem, placement) == []
        assert placement.arena_bytes >= bound


@SOME
@given(problems(max_blocks=6, empty=False))
def test_exact_equals_trying_every_order(problem: PlacementProblem) -> None:
    best = least_arena(problem)
    for searches in (("valleys",), ("offsets",), ("valleys", "offsets")):
        exact = place_exact(problem, 10.0, searches)
        assert exact.proven
        assert exact.placement.arena_bytes == exact.lower_bound_bytes == best
        assert check_placement(problem, exact.placement) == []


@FEW
@given(problems(max_blocks=9))
def test_greedy_is_never_under_the_exact_arena(problem: PlacementProblem) -> None:
    exact = place_exact(problem, 10.0)
    assert exact.proven
    assert lower_bound(problem) <= exact.placement.arena_bytes <= place_greedy(problem).arena_bytes


@SOME
@given(problems(max_blocks=8, empty=False), st.integers(0, 7), st.integers(-3, 3))
def test_the_judge_finds_every_collision(problem: PlacementProblem, which: int, by: int) -> None:
    found = place_greedy(problem)
    if not problem.blocks:
        return
    moved = problem.blocks[which % len(problem.blocks)]
    offset = found.offsets[moved.id] + by * problem.alignment
    shifted = Placement({**found.offsets, moved.id: offset}, found.arena_bytes)
    bytes_of = {
        block.id: set(range(shifted.offsets[block.id], shifted.offsets[block.id] + block.nbytes))
        for block in problem.blocks
    }
    bad = offset < 0 or offset + moved.nbytes > found.arena_bytes
    for other in problem.blocks:
        meets = other.id != moved.id and other.start < moved.stop and moved.start < other.stop
        bad |= meets and bool(bytes_of[other.id] & bytes_of[moved.id])
    assert bool(check_placement(problem, shifted)) == bad
