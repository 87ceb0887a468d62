"""The comparison as one SVG file: a panel per model, peak to the right, latency ratio upwards.

Method.  Written by hand, as the drawing is dots, ticks and names.  Names are placed greedily: each takes the
first of a fixed list of places around its dot that touches no dot and no name placed before; one that ends
far away gets a leader.  Colours follow the reader's light or dark setting.

Invariant.  Every row that ran is a dot inside its panel; names do not leave the panel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.training.record import Comparison, Figures, Panel, Row

__all__ = ["Box", "draw", "place_names", "ticks"]

WIDE, HIGH, COLUMNS = 560, 400, 2
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 46, 46
HEAD = 84
LEGEND = (
    ("eager", "eager"),
    ("peer", "PyTorch's means"),
    ("other", "budgets and cuts that were tried"),
    ("ours", "plans of Lowtide; left and below is better"),
)
LETTER, LINE = 6.3, 14.0  # an upper bound of the mean letter at 12 px, and the height of a name
STYLE = """
  svg { --paper: #ffffff; --ink: #0e2430; --soft: #4d626d; --line: #d9e2e6; --eager: #c98a3d; --ours: #0c6da8; --peer: #6b5b95; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #10202a; --ink: #e6eff3; --soft: #9fb3bd; --line: #29404c; --eager: #e0a458; --ours: #4aaee6; --peer: #b7a6e0; }
  }
  text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif; fill: var(--soft); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }
  .title { font-size: 18px; font-weight: 650; fill: var(--ink); }
  .model { font-size: 13px; font-weight: 600; fill: var(--ink); }
  .grid { stroke: var(--line); fill: none; } .one { stroke: var(--soft); stroke-dasharray: 2 3; fill: none; }
  .leader { stroke: var(--soft); stroke-width: .7; fill: none; }
  .eager { fill: var(--eager); } .peer { fill: var(--peer); } .ours { fill: var(--ours); }
  .other { fill: var(--paper); stroke: var(--peer); stroke-width: 1.2; }
""".strip("\n")  # noqa: E501


@dataclass(frozen=True)
class Box:
    """A rectangle in the picture's units."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)

    def holds(self, other: Box) -> bool:
        """Whether `other` lies inside."""
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


@dataclass(frozen=True)
class _Scale:
    """From bytes and ratios to a panel's units; `low` and `high` are the ratios at its borders."""

    most_bytes: float
    low: float
    high: float

    def x(self, nbytes: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * nbytes / self.most_bytes

    def y(self, ratio: float) -> float:
        return HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * (ratio - self.low) / (self.high - self.low)

    def holds(self, figures: Figures) -> bool:
        """Whether the panel reaches that far; choices that were not taken do not stretch it."""
        return figures.above_bytes <= self.most_bytes and self.low <= figures.ratio <= self.high


def draw(comparison: Comparison, title: str = "Peak memory and latency of one training step") -> str:
    """The text of an SVG file; panels without figures are left out.  Raises ValueError if none has any."""
    panels = [panel for panel in comparison.panels if any(row.figures for row in panel.rows)]
    if not panels:
        raise ValueError("nothing to draw: no row of the comparison ran")
    columns = min(COLUMNS, len(panels))
    across, down = columns * WIDE, HEAD + math.ceil(len(panels) / columns) * HIGH
    parts = []
    for index, panel in enumerate(panels):
        shift = f"{index % columns * WIDE} {HEAD + index // columns * HIGH}"
        parts += [f'<g transform="translate({shift})">', *_panel(panel), "</g>"]
    label = escape(title, {'"': "&quot;"})
    size = f'viewBox="0 0 {across} {down}" width="{across}" height="{down}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
            f"<style>\n{STYLE}\n</style>",
            f'<rect width="{across}" height="{down}" rx="10" style="fill:var(--paper)"/>',
            _text(16, 28, title, css="title"),
            _text(16, 47, comparison.machine),
            *_legend(),
            *parts,
            "</svg>\n",
        )
    )


def _legend() -> Iterator[str]:
    x = 22.0
    for series, meaning in LEGEND:
        yield f'<circle class="{series}" cx="{x:.1f}" cy="64" r="{3 if series == "other" else 5}"/>'
        yield _text(x + 10, 68, meaning)
        x += 34 + LETTER * len(meaning)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten apart) in [low, high], about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _panel(panel: Panel) -> Iterator[str]:
    ran = [(row, row.figures) for row in panel.rows if row.figures is not None]
    others = [figures for row in panel.rows for _, figures in row.others if figures is not None]
    scale = _scale([figures for _, figures in ran])
    yield _text(LEFT, 22, panel.title, css="model")
    yield from _axes(scale)
    small = [(scale.x(one.above_bytes), scale.y(one.ratio)) for one in others if scale.holds(one)]
    for x, y in small:
        yield f'<circle class="other" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    dots = [(scale.x(figures.above_bytes), scale.y(figures.ratio)) for _, figures in ran]
    names = [_name(row) for row, _ in ran]
    for (row, figures), (x, y) in zip(ran, dots, strict=True):
        hint = escape(f"{row.label}: {figures.above_bytes / 2**20:.1f} MiB, {figures.ratio:.2f}x")
        yield f'<circle class="{row.series}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{hint}</title></circle>'
    inside = Box(LEFT, TOP - 14, WIDE - 4, HIGH - BOTTOM)
    for (x, y), name, box in zip(dots, names, place_names(dots, names, inside, small), strict=True):
        yield from _leader(x, y, box)
        yield _text(box.left + 1, box.bottom - 3, name)


def _scale(figures: Sequence[Figures]) -> _Scale:
    """Bytes from zero; ratios with room above and below, eager's 1 always inside."""
    ratios = [1.0, *(one.ratio for one in figures)]
    room = max(0.05, 0.12 * (max(ratios) - min(ratios)))
    most = max(one.above_bytes for one in figures)
    return _Scale(max(1.0, most * 1.08), max(0.0, min(ratios) - room), max(ratios) + room)


def _name(row: Row) -> str:
    """The short form for a picture."""
    short = row.label.replace("torch.compile", "compile").replace(" per block", "").replace("memory ", "")
    if row.choice and row.choice[0].isdigit():
        return short.replace("best budget", f"best budget {row.choice}")
    return short


def _axes(scale: _Scale) -> Iterator[str]:
    floor, right = HIGH - BOTTOM, WIDE - RIGHT
    for tick in ticks(0.0, scale.most_bytes / 2**20):
        x = scale.x(tick * 2**20)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{floor}"/>'
        yield _text(x, floor + 17, f"{tick:g}", "middle")
    for tick in ticks(scale.low, scale.high):
        y = scale.y(tick)
        css = "one" if tick == 1 else "grid"
        yield f'<path class="{css}" d="M{LEFT} {y:.1f}H{right}"/>'
        yield _text(LEFT - 8, y + 4, f"{tick:.2f}x", "end")
    yield _text(right, floor + 34, "peak above the step's start, MiB", "end")
    yield _text(12, TOP - 10, "latency, times eager's")


def place_names(
    dots: Sequence[tuple[float, float]],
    names: Sequence[str],
    inside: Box,
    others: Sequence[tuple[float, float]] = (),
) -> list[Box]:
    """A box for each name, inside `inside`; none touches a dot or another name where there is room.

    `others` are dots without names.
    """
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in (*dots, *others)]
    boxes: list[Box] = []
    for (x, y), name in zip(dots, names, strict=True):
        wide = LETTER * len(name) + 2
        candidates = [_clamped(box, inside) for box in _around(x, y, wide)]
        boxes.append(min(candidates, key=lambda box: sum(box.overlap(other) for other in (*taken, *boxes))))
    return boxes


def _around(x: float, y: float, wide: float) -> Iterator[Box]:
    """Places for a name, the best first: beside the dot, above, below, then further away."""
    for distance in (0.0, 12.0, 24.0, 36.0, 52.0, 68.0):
        for up in (0.0, -distance, distance) if distance else (0.0,):
            middle = y + up
            yield Box(x + 8, middle - LINE / 2, x + 8 + wide, middle + LINE / 2)
            yield Box(x - 8 - wide, middle - LINE / 2, x - 8, middle + LINE / 2)
        for middle in (y - 14 - distance, y + 14 + distance):
            yield Box(x - wide / 2, middle - LINE / 2, x + wide / 2, middle + LINE / 2)


def _clamped(box: Box, inside: Box) -> Box:
    right = max(0.0, box.right - inside.right) + min(0.0, box.left - inside.left)
    down = max(0.0, box.bottom - inside.bottom) + min(0.0, box.top - inside.top)
    return Box(box.left - right, box.top - down, box.right - right, box.bottom - down)


def _leader(x: float, y: float, box: Box) -> Iterator[str]:
    near_x, near_y = min(max(x, box.left), box.right), min(max(y, box.top), box.bottom)
    if math.hypot(near_x - x, near_y - y) > 14:
        yield f'<path class="leader" d="M{x:.1f} {y:.1f}L{near_x:.1f} {near_y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
