"""The page as a file: well-formed, self-contained, safe with hostile names, small, the same every time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tests.report.fixture import RESIDENT_BYTES, make

from lowtide.report.data import (
    Curve,
    Figures,
    Holder,
    Limit,
    Move,
    ReportData,
    Step,
    Verdict,
)
from lowtide.report.page import render

VOID = {"meta", "br", "path", "rect", "link", "img", "hr", "input"}


class Outline(HTMLParser):
    """Collects elements and fails on a tag that closes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.island = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (
            f"</{tag}> closes {self.open[-3:]} at line {self.getpos()[0]}"
        )
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.island = self.island or data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def by_id(self, name: str) -> dict[str, str | None]:
        return next(attrs for _, attrs in self.elements if attrs.get("id") == name)


def read(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


@pytest.fixture(scope="module")
def page() -> str:
    return render(make())


def test_every_id_is_there_once_and_labels_point_to_one(page: str) -> None:
    outline = read(page)
    ids = [attrs["id"] for _, attrs in outline.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for name in ("aria-labelledby", "href"):
        for _, attrs in outline.elements:
            if attrs.get(name):
                assert str(attrs[name]).removeprefix("#") in ids


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert not re.search(r"""\b(src|href)\s*=\s*["']?[^#"'\s]""", page)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", page)


def test_the_page_shows_each_part(page: str) -> None:
    outline = read(page)
    text = " ".join(" ".join(outline.text).split())
    for expected in (
        "limit 60%",
        "bit-equal to eager",
        "Who is alive at the peak",
        "enc.0.block0",
        "unet.py:31",
        "The floor: 40.0 MiB",
        "convolution_backward in dec.3.block1 (unet.py:91)",
        "mylib.fancy_attention.default",
        "lowtide optimize unet:batch=8,size=128,width=16,mode=train --memory 60% --seed 0",
        "2.13.0",
        "1,284 states",
        "3 values recomputed. Together they cost 3.67 ms",
    ):
        assert expected in text, expected


def test_curves_end_where_the_numbers_say(page: str) -> None:
    data = make()
    outline = read(page)
    line = str(outline.by_id("eager-line")["d"])
    heights = [int(number) for number in re.findall(r"V(\d+)", line)]
    limit = int(re.findall(r"M0 (\d+)", str(outline.by_id("limit-line")["d"]))[0])
    assert data.limit.memory_bytes is not None
    bottom = 10_000
    measured = (bottom - limit) / (bottom - min(heights))
    assert measured == pytest.approx(data.limit.memory_bytes / data.eager_curve.peak_bytes, rel=1e-3)


def test_the_island_holds_the_steps_and_blocks() -> None:
    data = make()
    island = json.loads(read(render(data)).island)
    assert island["plan"]["b"] == [step.above_bytes for step in data.plan_curve.steps]
    assert [island["names"][i] for i in island["eager"]["s"]] == [
        step.source for step in data.eager_curve.steps
    ]
    assert sorted(island["blocks"]["n"]) == sorted(block.nbytes for block in data.blocks)
    assert len(island["plan"]["x"]) == len(data.plan_curve.steps) + 1


def test_names_from_the_program_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script><b>&\u2028"
    steps = (Step(10, evil, evil, evil, "forward"), Step(5, evil, evil, evil, "backward"))
    data = make(
        workload=evil,
        eager_curve=Curve(steps, 7),
        plan_curve=Curve(steps, 7),
        blocks=(),
        eager_holders=(Holder(10, evil, evil, evil, evil),),
        moves=(Move(evil, evil, evil),),
        command=evil,
        opaque=(evil,),
        settings=((evil, evil),),
    )
    page = render(data)
    outline = read(page)
    assert page.count("<script") == 2 and "alert(1)</script>" not in page
    assert not any(tag == "b" and "alert" in str(attrs) for tag, attrs in outline.elements)
    assert evil in json.loads(outline.island)["names"]


def test_a_report_without_anything_optional_is_still_a_page() -> None:
    steps = (Step(0, "aten.relu.default"),)
    data = ReportData(
        workload="bare",
        device="cpu",
        limit=Limit(),
        verdict=Verdict(True, "none"),
        eager=Figures(),
        plan=Figures(),
        eager_curve=Curve((), 0),
        plan_curve=Curve(steps, 0),
    )
    text = " ".join(" ".join(read(render(data)).text).split())
    assert "One inference of bare" in text and "numbers not checked" in text
    assert "were enough" in text and "The floor" not in text and "The trade-off" not in text


def test_a_missed_limit_is_said_so() -> None:
    text = " ".join(read(render(make(verdict=Verdict(False, "eager", 2.5e-7, False)))).text)
    assert "✗ limit 60%" in text and "not met" in text and "within 2.5e-07" in text


def test_two_thousand_steps_stay_small() -> None:
    data = make(levels=6, layers=20)
    assert len(data.plan_curve.steps) > 2_000
    page = render(data)
    assert len(page.encode()) < 1_500_000
    read(page)


def test_the_same_data_gives_the_same_page(page: str) -> None:
    assert render(make()) == page


def test_the_fixture_agrees_with_itself() -> None:
    data = make()
    assert sum(holder.nbytes for holder in data.plan_holders) + RESIDENT_BYTES == data.plan_curve.peak_bytes


def test_what_eager_holds_beyond_its_curve_is_said() -> None:
    data = make()
    more = replace(data.eager, peak_bytes=data.eager_curve.peak_bytes + 8 * 2**20)
    text = " ".join(" ".join(read(render(replace(data, eager=more))).text).split())
    assert "eager itself was measured 8.0 MiB higher" in text
    assert "held by the program after the last reader 8.0 MiB" in text and "Eager: 210.0 MiB" in text
    assert "held by the program" not in " ".join(read(render(data)).text)
