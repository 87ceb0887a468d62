"""Pictures that stand alone, for a README or a talk: the frontier and the timeline as SVG files.

Method.  The drawing units of `lowtide.report.charts`, placed at a fixed size with text in the file.  The
style follows the reader's light or dark setting, also inside an ``<img>``.

Not done: bitmaps (a browser or `rsvg-convert` makes them), more than one model a picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from xml.sax.saxutils import escape

from lowtide.report.charts import HIGH, WIDE, Frontier, Timeline, draw_frontier, draw_timeline, time_axis
from lowtide.report.data import Limit, Point, ReportData
from lowtide.units import format_bytes, format_percent

__all__ = ["frontier_picture", "timeline_picture"]

ACROSS, DOWN = 880, 420
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 64, 52
STYLE = """
  svg { --paper: #ffffff; --ink: #0e2430; --soft: #4d626d; --line: #d9e2e6; --eager: #c98a3d; --plan: #0c6da8; --limit: #b3243f; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #10202a; --ink: #e6eff3; --soft: #9fb3bd; --line: #29404c; --eager: #e0a458; --plan: #4aaee6; --limit: #ff7f95; }
  }
  text { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; fill: var(--soft); }
  .title { font-size: 18px; font-weight: 650; fill: var(--ink); }
  .name { font-weight: 600; fill: var(--ink); }
  .grid { stroke: var(--line); fill: none; }
  .stairs { stroke: var(--plan); fill: none; stroke-width: 1.5; stroke-dasharray: 3 3; }
  .measured { fill: var(--plan); } .predicted { fill: var(--paper); stroke: var(--plan); stroke-width: 2; }
  .eager { fill: var(--eager); } .peer { fill: var(--paper); stroke: var(--soft); stroke-width: 2; }
  .line { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
  .limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none; }
""".strip("\n")  # noqa: E501


def frontier_picture(data: ReportData, title: str, peers: Sequence[Point] = ()) -> str:
    """The trade-off of `data` with what others reach (`peers`, named points), as the text of an SVG file.

    Raises ValueError with fewer than two points altogether.
    """
    ours, theirs = set(data.points), set(peers)
    frontier = draw_frontier(data, (*data.points, *peers))
    if frontier is None:
        raise ValueError(
            f"a frontier needs two points, this report of {data.workload} has {len(data.points)}"
        )
    parts = [*_frontier_axes(data, frontier)]
    stairs = _stairs([(x, y) for point, x, y in frontier.placed if point in ours])
    parts.append(f'<path class="stairs" d="{stairs}"/>')
    for point, x, y in sorted(frontier.placed, key=lambda place: (bool(place[0].name), place[0].chosen)):
        parts += _dot(point, _right(x), _down(y), peer=point in theirs and point not in ours)
    return _file(title, parts)


def _stairs(places: Iterable[tuple[float, float]]) -> str:
    """A staircase through the places (percent, sorted) that nothing dominates, in the picture's units."""
    path, lowest = "", float("inf")
    for x, y in places:
        if y < lowest:
            path += f"H{_right(x):.1f}V{_down(y):.1f}" if path else f"M{_right(x):.1f} {_down(y):.1f}"
            lowest = y
    return path + f"H{ACROSS - RIGHT}"


def _right(percent: float) -> float:
    return LEFT + (ACROSS - LEFT - RIGHT) * percent / 100


def _down(percent: float) -> float:
    return DOWN - BOTTOM - (DOWN - TOP - BOTTOM) * percent / 100


def _frontier_axes(data: ReportData, frontier: Frontier) -> Iterator[str]:
    for tick, percent in frontier.byte_ticks:
        x = _right(percent)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{DOWN - BOTTOM}"/>'
        yield _text(x, DOWN - BOTTOM + 20, _share(tick, data), "middle")
    for latency, percent in frontier.latency_ticks:
        y = _down(percent)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{ACROSS - RIGHT}"/>'
        yield _text(LEFT - 10, y + 4, f"{latency:.2f}x" if frontier.relative else f"{latency:g} s", "end")
    yield _text(16, TOP - 14, "latency, times eager's" if frontier.relative else "latency")
    yield _text(ACROSS - RIGHT, DOWN - 10, "peak memory", "end")


def _share(nbytes: int, data: ReportData) -> str:
    peak = data.eager.peak_bytes
    label = format_bytes(nbytes).replace(".0 ", " ")
    return f"{label} ({format_percent(round(nbytes / peak, 2))})" if peak else label


def _dot(point: Point, x: float, y: float, peer: bool) -> Iterator[str]:
    known = "measured" if point.measured else "predicted"
    series = "peer" if peer else "eager" if point.name == "eager" else known
    radius = 8 if point.chosen else 6 if point.name else 4
    yield f'<circle class="{series}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
    if point.name:
        anchor, shift = ("end", -12) if x > 0.75 * ACROSS else ("start", 12)
        yield _text(x + shift, y - 9, point.name, anchor, css="name")


def timeline_picture(data: ReportData, title: str = "") -> str:
    """Live bytes of eager and of the plan over one step, with the limit, as the text of an SVG file."""
    axis = time_axis(data.eager_curve, data.plan_curve)
    timeline = draw_timeline(data, axis)
    parts = [*_byte_axis(timeline)]
    wide, high = (ACROSS - LEFT - RIGHT) / WIDE, (DOWN - TOP - BOTTOM) / HIGH
    parts.append(f'<g transform="translate({LEFT} {TOP}) scale({wide:.6f} {high:.6f})">')
    for series, area, line in (
        ("eager", timeline.eager_area, timeline.eager_line),
        ("plan", timeline.plan_area, timeline.plan_line),
    ):
        parts.append(f'<path d="{area}" style="fill:var(--{series})" opacity=".3"/>')
        parts.append(f'<path class="line" d="{line}" style="stroke:var(--{series})"/>')
    parts.append("</g>")
    for series, curve, edges in (
        ("eager", data.eager_curve, axis.eager),
        ("plan", data.plan_curve, axis.plan),
    ):
        if curve.steps:
            x, y = (
                _right(100 * edges[curve.peak_step] / WIDE),
                _down(100 * curve.peak_bytes / timeline.top_bytes),
            )
            parts.append(
                _text(x, y - 8, f"{series} {format_bytes(curve.peak_bytes)}", "middle", "name", series)
            )
    parts += _limit_line(data.limit, timeline.top_bytes)
    across = "one step, start to end" if axis.timed else "one step, operator by operator"
    parts.append(_text(ACROSS - RIGHT, DOWN - 24, across, "end"))
    return _file(title or data.workload, parts)


def _byte_axis(timeline: Timeline) -> Iterator[str]:
    for tick in timeline.ticks:
        if tick <= timeline.top_bytes:
            y = _down(100 * tick / timeline.top_bytes)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{ACROSS - RIGHT}"/>'
            yield _text(LEFT - 10, y + 4, format_bytes(tick).replace(".0 ", " ") if tick else "0", "end")


def _limit_line(limit: Limit, top_bytes: int) -> Iterator[str]:
    if limit.memory_bytes:
        y = _down(100 * limit.memory_bytes / top_bytes)
        yield f'<path class="limit" d="M{LEFT} {y:.1f}H{ACROSS - RIGHT}"/>'
        yield _text(ACROSS - RIGHT, y - 6, f"limit {format_bytes(limit.memory_bytes)}", "end", "", "limit")


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "", colour: str = "") -> str:
    style = f' style="fill:var(--{colour})"' if colour else ""
    kind = f' class="{css}"' if css else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _file(title: str, parts: Iterable[str]) -> str:
    label = escape(title, {'"': "&quot;"})
    size = f'viewBox="0 0 {ACROSS} {DOWN}" width="{ACROSS}" height="{DOWN}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    paper = f'<rect width="{ACROSS}" height="{DOWN}" rx="10" style="fill:var(--paper)"/>'
    heading = _text(16, 30, title, css="title")
    return "\n".join((head, f"<style>\n{STYLE}\n</style>", paper, heading, *parts, "</svg>")) + "\n"
