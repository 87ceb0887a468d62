"""Where things go in the three pictures of a report: the timeline, the arena and the frontier.

Method.  Every picture is drawn in integer units, `WIDE` to the right and `HIGH` upwards, and stretched to
the place that the page has for it.  Labels and markers are not part of the stretched drawing, they are
placed over it by percent; so text keeps its size on a telephone, and zooming is a change of the view box.

    timeline   x: time (or steps) of both orders on one axis, y: bytes, resident ones at the bottom
    arena      x: the same axis as the timeline, y: offset
    frontier   x: peak bytes, y: latency

The timeline and the arena share `Axis`, hence stand exactly one above the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.report.data import Block, Curve, Point, ReportData

__all__ = [
    "HIGH",
    "KINDS",
    "PHASES",
    "WIDE",
    "Arena",
    "Axis",
    "Frontier",
    "Timeline",
    "draw_arena",
    "draw_frontier",
    "draw_timeline",
    "time_axis",
]

WIDE = 100_000
HIGH = 10_000
KINDS = ("saved", "forward", "recomputed", "backward", "workspace", "output")
PHASES = ("forward", "loss", "backward", "update")
MOST_BLOCKS = 6_000  # more cannot be told apart on a screen, and the page has to stay fluid
LEAST_SPAN = 0.1  # differences of a few percent should look like that
OUTLINED_HEIGHT, OUTLINED_WIDTH = 0.012, 0.003  # an outline would cover what is smaller


@dataclass(frozen=True)
class Axis:
    """The shared horizontal axis: `total` seconds or steps fill the width."""

    timed: bool
    total: float
    eager: tuple[int, ...]
    plan: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """Paths of the two curves; heights are bytes, `top_bytes` is the upper border."""

    top_bytes: int
    ticks: tuple[int, ...]
    eager_line: str
    eager_area: str
    plan_line: str
    plan_area: str
    eager_phases: tuple[tuple[str, str], ...]
    plan_phases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arena:
    """One path per kind and size of block; `left_out` blocks were too small to see.

    A path is (kind, whether its blocks are large enough to be outlined, the drawing).
    """

    top_bytes: int
    ticks: tuple[int, ...]
    paths: tuple[tuple[str, bool, str], ...]
    blocks: tuple[Block, ...]
    left_out: int


@dataclass(frozen=True)
class Frontier:
    """Points with their place in percent, and the staircase that joins those that nothing dominates.

    Ticks are (number, percent); latencies are multiples of eager's where that is known, else seconds.  The
    limit is a line at `limit_left` or `limit_bottom` percent, None where there is none in the picture.
    """

    byte_ticks: tuple[tuple[int, float], ...]
    latency_ticks: tuple[tuple[float, float], ...]
    relative: bool
    placed: tuple[tuple[Point, float, float], ...]
    staircase: str
    limit_left: float | None = None
    limit_bottom: float | None = None


def time_axis(eager: Curve, plan: Curve) -> Axis:
    """The axis of both orders: seconds where both are timed, else steps."""
    timed = eager.timed and plan.timed
    both = (eager.edges(timed), plan.edges(timed))
    total = max(both[0][-1], both[1][-1]) or 1.0
    units = [tuple(round(WIDE * edge / total) for edge in edges) for edges in both]
    return Axis(timed, total, units[0], units[1])


def draw_timeline(data: ReportData, axis: Axis) -> Timeline:
    """The two curves of live bytes, with room for the limit above them."""
    curves = (data.eager_curve, data.plan_curve)
    highest = max([curve.peak_bytes for curve in curves] + [data.limit.memory_bytes or 0, 1])
    ticks = byte_ticks(0, highest)
    top = max(ticks[-1], round(1.12 * highest))
    eager, plan = (
        _corners(curve, edges, top) for curve, edges in zip(curves, (axis.eager, axis.plan), strict=True)
    )
    return Timeline(
        top,
        ticks,
        _line(eager),
        _area(eager),
        _line(plan),
        _area(plan),
        _phases(data.eager_curve, axis.eager),
        _phases(data.plan_curve, axis.plan),
    )


def _corners(curve: Curve, edges: Sequence[int], top: int) -> list[tuple[int, int, int]]:
    """(left, right, height) of each flat piece, equal neighbours joined."""
    pieces: list[tuple[int, int, int]] = []
    for index, step in enumerate(curve.steps):
        height = round(HIGH * (1 - (curve.resident_bytes + step.above_bytes) / top))
        left, right = edges[index], edges[index + 1]
        if pieces and pieces[-1][2] == height:
            left = pieces.pop()[0]
        pieces.append((left, right, height))
    return pieces


def _line(pieces: Sequence[tuple[int, int, int]]) -> str:
    if not pieces:
        return ""
    steps = "".join(f"V{height}H{right}" for _, right, height in pieces)
    return f"M{pieces[0][0]} {pieces[0][2]}{steps}"


def _area(pieces: Sequence[tuple[int, int, int]]) -> str:
    if not pieces:
        return ""
    return f"M{pieces[0][0]} {HIGH}" + "".join(f"V{y}H{x}" for _, x, y in pieces) + f"V{HIGH}Z"


def _phases(curve: Curve, edges: Sequence[int]) -> tuple[tuple[str, str], ...]:
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, step in enumerate(curve.steps):
        phase = step.phase if step.phase in PHASES else "update"
        found = spans[phase]
        if found and found[-1][1] == edges[index]:
            found[-1] = (found[-1][0], edges[index + 1])
        elif edges[index] < edges[index + 1]:
            found.append((edges[index], edges[index + 1]))
    return tuple((phase, "".join(f"M{a} 0H{b}V1H{a}Z" for a, b in spans[phase])) for phase in PHASES)


def draw_arena(data: ReportData, axis: Axis) -> Arena:
    """The blocks of the plan as rectangles in time and offset."""
    top = max([block.offset_bytes + block.nbytes for block in data.blocks] + [data.plan.arena_bytes or 0, 1])
    seen = sorted(data.blocks, key=lambda b: -b.nbytes * (axis.plan[b.stop] - axis.plan[b.start]))
    kept = tuple(sorted(seen[:MOST_BLOCKS], key=lambda block: (block.start, block.offset_bytes)))
    paths: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for block in kept:
        kind = block.kind if block.kind in KINDS else "forward"
        left, right = axis.plan[block.start], axis.plan[block.stop]
        outlined = block.nbytes > OUTLINED_HEIGHT * top and right - left > OUTLINED_WIDTH * WIDE
        paths[kind, outlined].append(_rectangle(block, left, right, top))
    drawn = tuple((kind, outlined, "".join(found)) for (kind, outlined), found in sorted(paths.items()))
    return Arena(top, byte_ticks(0, top, inside=True), drawn, kept, len(data.blocks) - len(kept))


def _rectangle(block: Block, left: int, right: int, top: int) -> str:
    upper = round(HIGH * (1 - (block.offset_bytes + block.nbytes) / top))
    lower = round(HIGH * (1 - block.offset_bytes / top))
    return f"M{left} {upper}H{right}V{lower}H{left}Z"


def draw_frontier(data: ReportData, given: Sequence[Point] | None = None) -> Frontier | None:
    """The trade-off, cheap on the left and fast at the bottom; None with fewer than two points.

    `given` replaces the points of `data`.
    """
    points = sorted(
        data.points if given is None else given, key=lambda point: (point.peak_bytes, point.latency_s)
    )
    if len(points) < 2:
        return None
    unit_s = data.eager.latency_s or 1.0
    left, right = _padded([point.peak_bytes for point in points])
    low, high = _padded([point.latency_s / unit_s for point in points])
    spare = max(0.0, LEAST_SPAN * high - (high - low)) / 2
    low, high = max(0.0, low - spare), high + spare

    def across(nbytes: float) -> float:
        return round(100 * (nbytes - left) / (right - left), 2)

    def up(latency: float) -> float:
        return round(100 * (latency - low) / (high - low), 2)

    placed = tuple((point, across(point.peak_bytes), up(point.latency_s / unit_s)) for point in points)
    memory, ratio = data.limit.memory_bytes, data.limit.latency_ratio
    return Frontier(
        tuple((tick, across(tick)) for tick in byte_ticks(round(left), round(right), inside=True, about=6)),
        tuple((tick, up(tick)) for tick in _number_ticks(low, high)),
        data.eager.latency_s is not None,
        placed,
        _staircase(_undominated(placed)),
        None if memory is None else _inside(across(memory)),
        None if ratio is None or data.eager.latency_s is None else _inside(up(ratio)),
    )


def _inside(percent: float) -> float | None:
    return percent if 0 <= percent <= 100 else None


def _staircase(best: Sequence[tuple[Point, float, float]]) -> str:
    first = f"M{best[0][1]} 0V{100 - best[0][2]:.2f}"
    return first + "".join(f"H{x}V{100 - y:.2f}" for _, x, y in best[1:]) + "H100"


def _undominated(placed: Iterable[tuple[Point, float, float]]) -> list[tuple[Point, float, float]]:
    best: list[tuple[Point, float, float]] = []
    for entry in placed:
        if not best or entry[2] < best[-1][2]:
            best.append(entry)
    return best


def _padded(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    margin = 0.08 * (high - low) or 0.1 * high or 1.0
    return max(0.0, low - margin), high + margin


def byte_ticks(low: int, high: int, inside: bool = False, about: float = 4.5) -> tuple[int, ...]:
    """Round byte counts from `low` to past `high` (not past it if `inside`), about `about` of them."""
    unit = 1
    while unit * 1024 <= high - low:
        unit *= 1024
    size = _nice((high - low) / unit / about) * unit
    size = max(1, round(size))
    first = -(-low // size)
    last = high // size if inside else -(-high // size)
    return tuple(size * index for index in range(first, last + 1))


def _number_ticks(low: float, high: float) -> tuple[float, ...]:
    size = _nice((high - low) / 4.5)
    first, last = int(low // size) + 1, int(high // size)
    return tuple(round(size * index, 12) for index in range(first, last + 1))


def _nice(rough: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= 0.999 * rough)
