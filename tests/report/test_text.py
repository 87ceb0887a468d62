"""The report as text."""

from __future__ import annotations

from dataclasses import replace

from tests.report.fixture import make

from lowtide.report.data import Block, Curve, Figures, Holder, ReportData, Step
from lowtide.report.text import WIDTH, describe


def test_the_text_says_what_changed_who_is_alive_and_what_the_floor_is() -> None:
    lines = describe(make()).splitlines()
    assert lines[1].startswith("One training step in 118.0 MiB instead of 202.0 MiB: 58.4% of eager's peak")
    assert "  remat    enc.0.block0  unet.py:31  saves 9.0 MiB, costs 2.00 ms" in lines
    assert "  123 steps; 143 buffers in an arena of 98.0 MiB, none wasted" in lines
    assert any(line.startswith("Alive at the plan's peak of 118.0 MiB, step 44 of 123") for line in lines)
    assert "    68.0 MiB  dec" in lines and "     8.0 MiB        relu  unet.py:93  saved" in lines
    assert "Floor 40.0 MiB" in lines and "     4.0 MiB  workspace" in lines
    assert all(len(line) <= WIDTH + 4 for line in lines)


def test_rows_at_one_depth_add_up_to_the_peak() -> None:
    data = make()
    lines = describe(data).splitlines()
    top = [line for line in lines if line.startswith("  ") and line.endswith("MiB  dec")]
    assert len(top) == 1
    modules = [holder.nbytes for holder in data.plan_holders if holder.module.startswith("dec")]
    assert sum(modules) == 68 * 2**20


def test_waste_in_the_arena_is_told() -> None:
    curve = Curve((Step(100, "aten.exp.default"), Step(100, "aten.exp.default")), 0)
    blocks = (Block(0, 1, 0, 100, "a"), Block(1, 2, 50, 100, "b"))
    data = make(plan_curve=curve, blocks=blocks, plan=Figures(150, 0, 150))
    assert "2 buffers in an arena of 150 B, 50% over the most live bytes" in describe(data)


def test_many_small_rows_become_one() -> None:
    crowd = tuple(Holder(10, "aten.exp.default", f"layer.{i}") for i in range(100))
    lines = describe(make(plan_holders=crowd)).splitlines()
    at = lines.index("      1000 B  layer")
    assert lines[at + 1] == "      1000 B    smaller ones" and lines[at + 2] == ""


def test_a_plan_without_moves_or_floor() -> None:
    data: ReportData = replace(make(), moves=(), floor=None, opaque=())
    text = describe(data)
    assert "no move: order, in-place reuse and placement only" in text
    assert "Floor" not in text and "table entries" not in text
