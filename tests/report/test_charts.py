"""Geometry of the pictures."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from tests.report.fixture import make

from lowtide.report.charts import (
    HIGH,
    MOST_BLOCKS,
    WIDE,
    byte_ticks,
    draw_arena,
    draw_frontier,
    draw_timeline,
    time_axis,
)
from lowtide.report.data import Block, Curve, Figures, Point, Step

MIB = 2**20


def curve(*above: int, seconds: float = 0.0) -> Curve:
    return Curve(tuple(Step(nbytes, "aten.relu.default", seconds=seconds) for nbytes in above), 0)


def test_untimed_curves_share_an_axis_of_steps() -> None:
    axis = time_axis(curve(1, 2), curve(1, 2, 3, 4, seconds=1.0))
    assert not axis.timed and axis.total == 4
    assert axis.eager == (0, WIDE // 4, WIDE // 2)


def test_timed_curves_share_a_clock() -> None:
    axis = time_axis(curve(1, seconds=1.0), curve(1, 1, seconds=2.0))
    assert axis.timed and axis.total == 4.0
    assert axis.eager == (0, WIDE // 4) and axis.plan == (0, WIDE // 2, WIDE)


def test_equal_neighbours_are_one_piece() -> None:
    data = make(
        eager_curve=curve(4, 4, 8, 8),
        plan_curve=curve(4, 4, 4, 4),
        limit=replace(make().limit, memory_bytes=None),
    )
    timeline = draw_timeline(data, time_axis(data.eager_curve, data.plan_curve))
    assert len(re.findall("V", timeline.eager_line)) == 2
    assert len(re.findall("V", timeline.plan_line)) == 1


def test_a_block_lies_at_its_offset() -> None:
    blocks = (Block(0, 1, 0, 25, "a"), Block(1, 2, 25, 75, "b", kind="saved"))
    data = make(
        plan_curve=curve(25, 75),
        eager_curve=curve(25, 75),
        blocks=blocks,
        plan=replace(make().plan, arena_bytes=100),
    )
    arena = draw_arena(data, time_axis(data.eager_curve, data.plan_curve))
    drawn = {kind: path for kind, _, path in arena.paths}
    assert drawn["forward"] == f"M0 {3 * HIGH // 4}H{WIDE // 2}V{HIGH}H0Z"
    assert drawn["saved"] == f"M{WIDE // 2} 0H{WIDE}V{3 * HIGH // 4}H{WIDE // 2}Z"


def test_the_smallest_blocks_are_left_out_of_a_crowd() -> None:
    crowd = tuple(Block(0, 1, 64 * i, 1 + i, "a") for i in range(MOST_BLOCKS + 5))
    data = make(plan_curve=curve(1), eager_curve=curve(1), blocks=crowd)
    arena = draw_arena(data, time_axis(data.eager_curve, data.plan_curve))
    assert arena.left_out == 5 and min(block.nbytes for block in arena.blocks) == 6


@pytest.mark.parametrize("high", [1, 900, 3 * MIB, 202 * MIB, 5 * 2**30])
def test_ticks_cover_the_range_in_few_steps(high: int) -> None:
    ticks = byte_ticks(0, high)
    assert ticks[0] == 0 and ticks[-1] >= high and len(ticks) <= 7
    assert len({b - a for a, b in itertools.pairwise(ticks)}) == 1


def test_the_staircase_skips_dominated_points() -> None:
    points = (Point(100, 2.0), Point(200, 1.0), Point(150, 3.0))
    frontier = draw_frontier(make(points=points))
    assert frontier is not None
    assert frontier.staircase.count("V") == 2 and len(frontier.placed) == 3


def test_equal_points_do_not_divide_by_zero() -> None:
    frontier = draw_frontier(make(points=(Point(100, 1.0), Point(100, 1.0))))
    assert frontier is not None
    assert all(0 <= left <= 100 and 0 <= bottom <= 100 for _, left, bottom in frontier.placed)


def test_one_point_is_no_frontier() -> None:
    assert draw_frontier(make(points=(Point(100, 1.0),))) is None


def test_a_limit_is_a_line_where_it_is_in_the_picture() -> None:
    data = make()
    shown = draw_frontier(data)
    assert shown is not None and shown.limit_left is not None and shown.limit_bottom is None
    (chosen,) = [left for point, left, _ in shown.placed if point.chosen]
    assert 0 < shown.limit_left - chosen < 2
    latency = draw_frontier(replace(data, limit=replace(data.limit, memory_bytes=None, latency_ratio=1.1)))
    assert latency is not None and latency.limit_left is None and latency.limit_bottom is not None
    far = draw_frontier(replace(data, limit=replace(data.limit, memory_bytes=1)))
    assert far is not None and far.limit_left is None


def test_nearly_equal_latencies_look_nearly_equal() -> None:
    frontier = draw_frontier(
        make(points=(Point(100, 1.0), Point(50, 1.001)), eager=Figures(100, 10, latency_s=1.0))
    )
    assert frontier is not None
    heights = [bottom for _, _, bottom in frontier.placed]
    assert max(heights) - min(heights) < 5
    assert len({f"{tick:.2f}" for tick, _ in frontier.latency_ticks}) == len(frontier.latency_ticks)
