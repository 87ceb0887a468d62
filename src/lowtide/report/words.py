"""The sentences of a report: what the numbers mean, said once for the page and the text.

Every function takes plain data and returns one or two sentences, or table cells; none knows HTML.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lowtide.report.data import Figures, Floor, Limit, Point, ReportData, SearchRecord, Verdict
from lowtide.units import format_bytes, format_percent, format_ratio, format_seconds

__all__ = [
    "Chip",
    "Row",
    "chips",
    "figure_rows",
    "floor_sentence",
    "headline",
    "moves_sentence",
    "operator_name",
    "point_sentence",
    "search_sentence",
    "splits_under_floor",
    "timeline_sentence",
]


@dataclass(frozen=True)
class Chip:
    """A short fact; `tone` is good, bad or empty."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table of figures: eager, plan, their ratio, the plan as predicted."""

    name: str
    cells: tuple[str, str, str, str]
    note: str = ""


def operator_name(overload: str) -> str:
    """ "aten.convolution_backward.default" -> "convolution_backward"; other overloads stay."""
    return overload.removeprefix("aten.").removesuffix(".default")


def headline(data: ReportData) -> tuple[tuple[str, str], ...]:
    """The result in one sentence, as pieces (text, series): series is eager, plan or empty."""
    eager = data.eager.peak_bytes or data.eager_predicted.peak_bytes
    plan = data.plan.peak_bytes or data.plan_predicted.peak_bytes
    steps = (*data.eager_curve.steps, *data.plan_curve.steps)
    verb = "One training step" if any(step.phase == "backward" for step in steps) else "One inference"
    if plan is None:
        return ((f"{verb} of {data.workload}", ""),)
    if eager is None:
        return ((f"{verb} in ", ""), (format_bytes(plan), "plan"), (" (predicted)", ""))
    ratio = _latency_ratio(data)
    measured = data.plan.peak_bytes is not None
    return (
        (f"{verb} in ", ""),
        (format_bytes(plan), "plan"),
        (" instead of ", ""),
        (format_bytes(eager), "eager"),
        (f": {format_percent(plan / eager)} of eager's peak", ""),
        (f", at {ratio:.2f} times its latency" if ratio else "", ""),
        ("" if measured else " (predicted)", ""),
    )


def _latency_ratio(data: ReportData) -> float | None:
    if data.latency_ratio is not None:
        return data.latency_ratio
    for eager, plan in ((data.eager, data.plan), (data.eager_predicted, data.plan_predicted)):
        if eager.latency_s and plan.latency_s:
            return plan.latency_s / eager.latency_s
    return None


def chips(data: ReportData) -> tuple[Chip, ...]:
    """The limit and whether it is met, and what the numbers were compared with."""
    found = [_limit_chip(data.limit, data.verdict)] if _has_limit(data.limit) else []
    return (*found, *_verdict_chips(data.verdict))


def _has_limit(limit: Limit) -> bool:
    return limit.memory_bytes is not None or limit.latency_ratio is not None


def _limit_chip(limit: Limit, verdict: Verdict) -> Chip:
    if limit.memory_bytes is not None:
        asked = f"{limit.asked}, " if limit.asked else ""
        text = f"limit {asked}{format_bytes(limit.memory_bytes)}"
    else:
        text = f"latency limit {format_ratio(limit.latency_ratio or 0.0)}"
    return Chip(f"✓ {text}: met", "good") if verdict.met else Chip(f"✗ {text}: not met", "bad")


def _verdict_chips(verdict: Verdict) -> tuple[Chip, ...]:
    if not verdict.against:
        return ()
    if verdict.against == "none":
        return (Chip("numbers not checked: the device is not here"),)
    against = {
        "eager": "eager",
        "reference": "the reference executor",
        "scaled": "eager at a smaller batch",
    }.get(verdict.against, verdict.against)
    if verdict.bit_equal:
        return (Chip(f"✓ bit-equal to {against}", "good"),)
    if verdict.max_rel_error is None:
        return (Chip(f"checked against {against}"),)
    return (Chip(f"✓ equal to {against} within {verdict.max_rel_error:.1e}", "good"),)


def figure_rows(data: ReportData) -> tuple[Row, ...]:
    """Eager beside the plan; rows without any number are left out."""
    eager, plan, predicted = _with_fallback(data.eager, data.eager_predicted), data.plan, data.plan_predicted
    rows = [
        _byte_row("Peak memory", eager.peak_bytes, plan.peak_bytes, predicted.peak_bytes),
        _byte_row(
            "Resident",
            eager.resident_bytes,
            plan.resident_bytes,
            predicted.resident_bytes,
            "parameters, state, inputs",
        ),
        _byte_row(
            "Above the start",
            eager.above_bytes,
            plan.above_bytes,
            predicted.above_bytes,
            "peak less resident",
        ),
        _byte_row("Arena", None, plan.arena_bytes, predicted.arena_bytes, "one block"),
        _byte_row(
            "Process high-water mark",
            eager.rss_peak_bytes,
            plan.rss_peak_bytes,
            None,
            "above the start, fresh process",
        ),
        _time_row("Latency", eager.latency_s, plan.latency_s, predicted.latency_s, data.latency_ratio),
    ]
    return tuple(row for row in rows if any(row.cells))


def _with_fallback(measured: Figures, predicted: Figures) -> Figures:
    return measured if measured.peak_bytes is not None else predicted


def _byte_row(name: str, eager: int | None, plan: int | None, predicted: int | None, note: str = "") -> Row:
    ratio = format_percent(plan / eager) if eager and plan is not None else ""
    cells = tuple("" if number is None else format_bytes(number) for number in (eager, plan, predicted))
    return Row(name, (cells[0], cells[1], ratio, cells[2]), note)


def _time_row(
    name: str, eager: float | None, plan: float | None, predicted: float | None, paired: float | None
) -> Row:
    ratio = paired if paired is not None else plan / eager if eager and plan is not None else None
    cells = tuple("" if number is None else format_seconds(number) for number in (eager, plan, predicted))
    note = "ratio of interleaved pairs" if paired is not None else ""
    return Row(name, (cells[0], cells[1], "" if ratio is None else format_ratio(ratio), cells[2]), note)


def timeline_sentence(data: ReportData) -> str:
    """Both peaks, for readers who do not see the picture."""
    peaks = (("eager", data.eager_curve), ("the plan", data.plan_curve))
    told = [
        f"{name} peaks at {format_bytes(curve.peak_bytes)}"
        f" in step {curve.peak_step + 1} of {len(curve.steps)}"
        for name, curve in peaks
        if curve.steps
    ]
    return ", ".join(told) or "no curve"


MOVE_WORDS = {
    "fission": ("region split into parts", "regions split into parts"),
    "remat": ("value recomputed", "values recomputed"),
    "swap": ("value swapped out", "values swapped out"),
    "fuse": ("group of operators fused", "groups of operators fused"),
    "rewrite": ("rewrite", "rewrites"),
}


def moves_sentence(data: ReportData) -> str:
    """How many moves of which kind, and what they cost together."""
    counts = Counter[str]()
    for move in data.moves:
        counts[move.kind] += move.count
    told = [f"{count} {_words(kind)[count > 1]}" for kind, count in sorted(counts.items())]
    text = ", ".join(told) + "."
    costs = [move.cost_s for move in data.moves if move.cost_s is not None]
    if costs and sum(costs) > 0:
        text += f" Together they cost {format_seconds(sum(costs))} per step, as predicted."
    if any(move.saved_bytes for move in data.moves):
        text += (
            " What is saved is what need not be kept; it counts in full only where it would lie at the peak."
        )
    return text


def _words(kind: str) -> tuple[str, str]:
    return MOVE_WORDS.get(kind, (kind, kind))


def point_sentence(data: ReportData, point: Point) -> str:
    """A point in words: bytes, latency, both relative to eager, and how they are known."""
    peak = data.eager.peak_bytes or data.eager_predicted.peak_bytes
    of_peak = f" ({format_percent(point.peak_bytes / peak)} of eager's)" if peak else ""
    latency_s = data.eager.latency_s
    times = f" ({format_ratio(point.latency_s / latency_s)})" if latency_s else ""
    name = f"{point.name}: " if point.name else ""
    known = "measured" if point.measured else "predicted"
    peak_text, latency_text = format_bytes(point.peak_bytes), format_seconds(point.latency_s)
    return f"{name}{peak_text}{of_peak} at {latency_text}{times}, {known}"


def floor_sentence(data: ReportData) -> str:
    """What the floor is and which node makes it."""
    floor = data.floor
    if floor is None:
        return ""
    resident = sum(entry.nbytes for entry in data.resident)
    text = f"{format_bytes(resident)} are resident"
    if floor.operator:
        text += f", and {_place(floor)} needs {format_bytes(max(0, floor.nbytes - resident))} at once"
    if splits_under_floor(data):
        least = "" if floor.least is None else f" The smallest plan found needs {format_bytes(floor.least)}."
        return f"With every operator whole: {text}. A plan that runs a region in parts can go below.{least}"
    return f"No order, placement or recomputation goes under {format_bytes(floor.nbytes)}: {text}."


def splits_under_floor(data: ReportData) -> bool:
    """Whether this plan, or another that was found, lies under the floor of whole operators."""
    if data.floor is None:
        return False
    peak = data.plan.peak_bytes or data.plan_predicted.peak_bytes
    return data.floor.least is not None or (peak is not None and peak < data.floor.nbytes)


def _place(floor: Floor) -> str:
    where = f" in {floor.module}" if floor.module else ""
    source = f" ({floor.source})" if floor.source else ""
    return f"{operator_name(floor.operator)}{where}{source}"


def search_sentence(search: SearchRecord) -> str:
    """How much was looked at and why the search stopped."""
    rate = f", {search.states / search.seconds:,.0f} per second" if search.seconds > 0 else ""
    looked = f"{search.states:,} states in {format_seconds(search.seconds)}{rate}"
    return f"{looked}. What ended it: {search.stop_reason}."
