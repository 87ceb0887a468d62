"""Stand-alone SVG pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from tests.report.fixture import make

from lowtide.report.data import Point
from lowtide.report.picture import frontier_picture, timeline_picture

SVG = "{http://www.w3.org/2000/svg}"


def test_the_frontier_has_one_dot_a_point_and_names_peers() -> None:
    data = make()
    peer = Point(150 * 2**20, 1.2, True, name="torch.compile & <friends>")
    root = ElementTree.fromstring(frontier_picture(data, "memory < latency", (peer,)))
    dots = root.findall(f"{SVG}circle")
    assert len(dots) == len(data.points) + 1
    assert sum(dot.get("class") == "peer" for dot in dots) == 1
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"memory < latency", "torch.compile & <friends>", "eager", "this plan"} <= texts


def test_peers_do_not_bend_our_staircase() -> None:
    data = make()
    better = Point(data.points[1].peak_bytes, 0.5 * (data.eager.latency_s or 1), True, name="a peer")

    def corners(svg: str) -> int:
        return str(ElementTree.fromstring(svg).find(f"{SVG}path[@class='stairs']").get("d")).count("V")  # type: ignore[union-attr]

    assert corners(frontier_picture(data, "a", (better,))) == corners(frontier_picture(data, "a"))


def test_one_point_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two points"):
        frontier_picture(make(points=(Point(1, 1.0),)), "a")


def test_the_timeline_shows_both_curves_and_the_limit() -> None:
    root = ElementTree.fromstring(timeline_picture(make()))
    assert len(root.findall(f".//{SVG}path[@class='line']")) == 2
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"eager 202.0 MiB", "plan 118.0 MiB", "limit 118.7 MiB"} <= texts
    assert "unet:batch=8,size=128,width=16,mode=train" in texts
