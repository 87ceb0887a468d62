"""Convexity, pieces, dominators and waists of small graphs."""

from __future__ import annotations

from lowtide.analysis.region import before, connected_parts, immediate_dominators, leaks, narrow_waists
from lowtide.ir.text import parse_graph

DIAMOND = parse_graph(
    """
    input %0: f32[4]
    %1: f32[4] = aten.relu.default(%0)
    %2: f32[4] = aten.exp.default(%1)
    %3: f32[4] = aten.neg.default(%1)
    %4: f32[4] = aten.add.Tensor(%2, %3)
    %5: f32[4] output = aten.exp.default(%4)
    return %5
    """
)

DRAWS = parse_graph(
    """
    input %0: f32[4]
    %1: f32[4] = aten.bernoulli.p(%0, 0.5)
    %2: f32[4] = aten.relu.default(%0)
    %3: f32[4] output = aten.bernoulli.p(%2, 0.5)
    return %3
    """
)

CHAINED = parse_graph(
    """
    input %0: f32[4]
    %1: f32[4] output = aten.bernoulli.p(%0, 0.5)
    %2: f32[4] = aten.bernoulli.p(%0, 0.5)
    %3: f32[4] output = aten.relu.default(%2)
    return %1, %3
    """
)

WRITES = parse_graph(
    """
    input %0: f32[4] param
    %1: f32[4] = aten.relu.default(%0)
    %2: f32[4] = aten.exp.default(%1)
    n9: aten.copy_.default(%0!, %2)
    %3: f32[4] output = aten.neg.default(%0)
    return %3
    """
)


def test_a_path_that_leaves_and_returns_is_named() -> None:
    assert leaks(DIAMOND, {1, 2, 3}) == ()
    assert leaks(DIAMOND, {1, 2, 4}) == ((3, 4),)
    assert leaks(DIAMOND, {1, 5}) == ((4, 5),)


def test_hazards_and_draws_order_as_data_does() -> None:
    assert before(DRAWS)[3] == (2, 1)
    assert leaks(DRAWS, {2, 3}) == ()
    assert leaks(CHAINED, {1, 3}) == ((2, 3),)  # nothing flows from 1 to 2, but 1 draws first
    assert leaks(WRITES, {1, 3}) == ((9, 3),)


def test_pieces_hang_together_by_values_made_inside() -> None:
    assert connected_parts(DIAMOND, [5, 3, 2, 4]) == ((2, 3, 4, 5),)
    assert connected_parts(DIAMOND, [2, 3, 5]) == ((2,), (3,), (5,))


def test_dominators() -> None:
    assert immediate_dominators(DIAMOND) == {1: None, 2: 1, 3: 1, 4: 1, 5: 4}
    assert immediate_dominators(WRITES) == {1: None, 2: 1, 9: None, 3: None}


def test_waists_count_what_is_independent() -> None:
    assert narrow_waists(DIAMOND) == {1: 0, 2: 1, 3: 1, 4: 0, 5: 0}
