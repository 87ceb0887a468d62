"""One HTML file from a `ReportData`: no network, no external script, readable without JavaScript.

Method.  Everything is drawn here, in Python, as SVG and tables (`lowtide.report.charts`); the script only
adds what needs a pointer or keys: reading off a moment, zooming, walking through blocks.  The template and
its style and script are package data.  Text that comes from the user's program is escaped by Jinja, and the
numbers for the script sit in a JSON island with `<` escaped.

Not done: a picture of several plans side by side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from lowtide.report.charts import (
    HIGH,
    PHASES,
    WIDE,
    Arena,
    Axis,
    Frontier,
    Timeline,
    draw_arena,
    draw_frontier,
    draw_timeline,
    time_axis,
)
from lowtide.report.data import Curve, Figures, Floor, ReportData
from lowtide.report.tree import group_by_module
from lowtide.report.words import (
    chips,
    figure_rows,
    floor_sentence,
    headline,
    moves_sentence,
    operator_name,
    point_sentence,
    search_sentence,
    splits_under_floor,
    timeline_sentence,
)
from lowtide.units import format_bytes, format_seconds

__all__ = ["render"]

KIND_WORDS = {
    "saved": "made in the forward pass, kept for the backward",
    "forward": "forward",
    "recomputed": "recomputed",
    "backward": "backward and update",
    "workspace": "workspace of an operator",
    "output": "results",
}


def render(data: ReportData) -> str:
    """The page as text; the same `data` always gives the same text."""
    environment = _environment()
    template = environment.from_string(_asset("page.html.j2"))
    return template.render(_context(data)) + "\n"


def _asset(name: str) -> str:
    return resources.files("lowtide.report").joinpath(name).read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters.update(
        bytes=_bytes,
        seconds=format_seconds,
        cost=_cost,
        operator=operator_name,
        tick=_tick,
        share=lambda nbytes, top: f"{100 * nbytes / top:.2f}%",
        height=lambda nbytes, top: round(HIGH * (1 - nbytes / top)),
        moment=_moment,
    )
    return environment


def _context(data: ReportData) -> dict[str, Any]:
    axis = time_axis(data.eager_curve, data.plan_curve)
    timeline, arena, frontier = draw_timeline(data, axis), draw_arena(data, axis), draw_frontier(data)
    kinds = {kind for kind, _, _ in arena.paths}
    phases = {step.phase for curve in (data.eager_curve, data.plan_curve) for step in curve.steps}
    return {
        "data": data,
        "css": Markup(_asset("page.css")),
        "js": Markup(_asset("page.js")),
        "embedded": _embedded(data, axis, arena),
        "wide": WIDE,
        "high": HIGH,
        "most_groups": 14,
        "most_holders": 16,
        "most_moves": 25,
        "headline": {"sentence": headline(data), "short": data.workload, "chips": chips(data)},
        "gauge": _gauge(data),
        "figures": figure_rows(data),
        "axis": axis,
        "timeline": timeline,
        "timeline_words": timeline_sentence(data),
        "marks": _marks(data, axis, timeline),
        "strips": (("eager", timeline.eager_phases), ("plan", timeline.plan_phases)),
        "phases": [phase for phase in PHASES if phase in phases],
        "peak_card": _peak_card,
        "arena": arena,
        "kinds": [(kind, words) for kind, words in KIND_WORDS.items() if kind in kinds],
        "eager_tree": group_by_module(data.eager_holders),
        "plan_tree": group_by_module(data.plan_holders),
        "alive_top": max(data.eager_curve.peak_bytes, data.plan_curve.peak_bytes, 1),
        "moves_words": moves_sentence(data),
        "frontier": frontier,
        "dots": list(_dots(data, frontier)) if frontier else [],
        "chosen_words": next((point_sentence(data, p) for p in data.points if p.chosen), "Choose a point."),
        "floor": _floor(data.floor, data) if data.floor else None,
        "search": _search(data),
    }


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _cost(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds == 0:
        return "nothing"
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds)


def _tick(nbytes: int, ticks: Sequence[int]) -> str:
    """A label of an axis, in the unit of its largest tick: "0", "0.5 GiB", "1 GiB"."""
    if nbytes == 0:
        return "0"
    unit = max(1, 1024 ** int(math.log(max(ticks), 1024) + 1e-9))
    name = format_bytes(unit).split()[1]
    return f"{nbytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"


def _moment(at: float, axis: Axis) -> str:
    if not axis.timed:
        return f"step {round(at)}"
    return format_seconds(at) if at else "0"


def _peak_card(title: str, curve: Curve) -> Markup:
    """What the script shows first, for readers without it."""
    if not curve.steps:
        return Markup("{}: unknown").format(title)
    step = curve.steps[curve.peak_step]
    where = " · ".join(filter(None, (step.module, step.source, step.phase, step.part)))
    lines = (
        escape(f"{title}, step {curve.peak_step + 1} of {len(curve.steps)}"),
        Markup("<b>{}</b>").format(format_bytes(curve.peak_bytes)),
        Markup("<code>{}</code>").format(step.operator),
        escape(where),
    )
    return Markup("<br>").join(lines)


def _gauge(data: ReportData) -> dict[str, Any] | None:
    """The two bars at the top: eager's peak and the plan's on one scale, with the limit across."""
    shown = [
        ("eager", _best(data.eager, data.eager_predicted)),
        ("plan", _best(data.plan, data.plan_predicted)),
    ]
    known = [(name, figures, figures.peak_bytes) for name, figures in shown if figures.peak_bytes]
    if not known:
        return None
    top = max([peak for _, _, peak in known] + [data.limit.memory_bytes or 0])
    bars = [
        {
            "name": name,
            "series": name,
            "nbytes": peak,
            "width": round(100 * peak / top, 2),
            "base": round(100 * (figures.resident_bytes or 0) / peak, 2),
        }
        for name, figures, peak in known
    ]
    label = ", ".join(f"{name} {format_bytes(peak)}" for name, _, peak in known)
    limit = None if data.limit.memory_bytes is None else round(100 * data.limit.memory_bytes / top, 2)
    if data.limit.memory_bytes is not None:
        label += f", limit {format_bytes(data.limit.memory_bytes)}"
    return {"bars": bars, "limit": limit, "label": f"Peak memory: {label}"}


def _best(measured: Figures, predicted: Figures) -> Figures:
    return measured if measured.peak_bytes is not None else predicted


def _marks(data: ReportData, axis: Axis, timeline: Timeline) -> Iterator[Mapping[str, Any]]:
    """The two peaks; where they nearly coincide, the plan's label goes below its mark."""
    earlier: list[tuple[float, float]] = []
    for series, curve, edges in (
        ("eager", data.eager_curve, axis.eager),
        ("plan", data.plan_curve, axis.plan),
    ):
        if not curve.steps:
            continue
        at = (edges[curve.peak_step] + edges[curve.peak_step + 1]) // 2
        left, height = 100 * at / WIDE, 100 * curve.peak_bytes / timeline.top_bytes
        crowded = any(abs(left - x) < 20 and abs(height - y) < 8 for x, y in earlier)
        earlier.append((left, height))
        yield {
            "series": series,
            "x": at,
            "left": round(left, 2),
            "bottom": f"{height:.2f}%",
            "raised": "-1.7rem" if crowded else "0.5rem",
            "shift": "-100%" if left > 75 else "0" if left < 25 else "-50%",
            "text": f"{series} {format_bytes(curve.peak_bytes)}",
        }


def _dots(data: ReportData, frontier: Frontier) -> Iterator[Mapping[str, Any]]:
    for point, left, bottom in frontier.placed:
        classes = (" measured" if point.measured else "") + (" chosen" if point.chosen else "")
        classes += " eager" if point.name == "eager" else ""
        label = point_sentence(data, point)
        yield {"classes": classes, "left": left, "bottom": bottom, "label": label, "name": point.name}


def _floor(floor: Floor, data: ReportData) -> Mapping[str, Any]:
    resident = [(f"r{i % 6}", entry.role, entry.nbytes) for i, entry in enumerate(data.resident)]
    parts = resident + [(f"s{i % 6}", name, nbytes) for i, (name, nbytes) in enumerate(floor.parts)]
    total = max(floor.nbytes, sum(nbytes for _, _, nbytes in parts), 1)
    shown = [
        {"name": name, "nbytes": nbytes, "width": round(100 * nbytes / total, 2), "shade": shade}
        for shade, name, nbytes in parts
    ]
    label = ", ".join(f"{name} {format_bytes(nbytes)}" for _, name, nbytes in parts)
    title = "The floor without splitting" if splits_under_floor(data) else "The floor"
    return {
        "title": title,
        "words": floor_sentence(data),
        "parts": shown,
        "label": f"The floor is made of {label}",
    }


def _search(data: ReportData) -> Mapping[str, Any] | None:
    if data.search is None:
        return None
    found = data.search.iterations
    shown: dict[str, Any] = {"words": search_sentence(data.search), "line": ""}
    if len(found) < 2:
        return shown
    low, high = min(entry.peak_bytes for entry in found), max(entry.peak_bytes for entry in found)
    seconds = max(data.search.seconds, found[-1].seconds) or 1.0
    span = max(1, high - low)
    corners = [
        (
            round(WIDE * entry.seconds / seconds),
            round(HIGH * (0.06 + 0.88 * (high - entry.peak_bytes) / span)),
        )
        for entry in found
    ]
    line = f"M{corners[0][0]} {corners[0][1]}" + "".join(f"H{x}V{y}" for x, y in corners[1:]) + f"H{WIDE}"
    first, last = found[0].peak_bytes, found[-1].peak_bytes
    label = f"Best predicted peak from {format_bytes(first)} to {format_bytes(last)}"
    return shown | {"line": line, "first": first, "last": last, "label": label}


class _Names:
    """Each distinct text once, in order of first use."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, texts: Sequence[str]) -> list[int]:
        return [self.index.setdefault(text, len(self.index)) for text in texts]


def _embedded(data: ReportData, axis: Axis, arena: Arena) -> Markup:
    """The numbers that the script reads, as JSON that is safe inside a script element."""
    names = _Names()

    def curve(curve: Curve, edges: Sequence[int]) -> dict[str, Any]:
        return {
            "x": edges,
            "b": [step.above_bytes for step in curve.steps],
            "o": names([step.operator for step in curve.steps]),
            "m": names([step.module for step in curve.steps]),
            "s": names([step.source for step in curve.steps]),
            "p": names([", ".join(filter(None, (step.phase, step.part))) for step in curve.steps]),
        }

    blocks = arena.blocks
    island = {
        "wide": WIDE,
        "timed": axis.timed,
        "total": axis.total,
        "resident": data.plan_curve.resident_bytes,
        "arena": arena.top_bytes,
        "eager": curve(data.eager_curve, axis.eager),
        "plan": curve(data.plan_curve, axis.plan),
        "blocks": {
            "a": [block.start for block in blocks],
            "z": [block.stop for block in blocks],
            "y": [block.offset_bytes for block in blocks],
            "n": [block.nbytes for block in blocks],
            "o": names([block.label for block in blocks]),
            "m": names([block.module for block in blocks]),
            "s": names([block.source for block in blocks]),
            "k": names([block.kind for block in blocks]),
        },
    }
    island["names"] = list(names.index)
    text = json.dumps(island, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))
