"""The closing tables: eager beside the plan, and the bundled workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from lowtide.terminal.record import MOVES
from lowtide.units import format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from lowtide.report.accuracy import Accuracy
    from lowtide.run.measure import Measurement
    from lowtide.search.driver import Frontier
    from lowtide.search.outcome import Limit, Outcome

__all__ = [
    "limit_line",
    "print_accuracy",
    "print_frontier",
    "print_measurement",
    "print_outcome",
    "print_workloads",
]

NOTHING = "-"
HOW_TO_NAME = """\
Write name:option=value,option=value, for example unet:batch=4,mode=infer; what you leave out is as shown.
Your own: file.py:function, a function without required arguments that returns a lowtide.Workload."""


def print_outcome(console: Console, workload: str, outcome: Outcome) -> None:
    """Eager beside the plan, then the verdict, the moves, the floor and the search in one line each."""
    console.print(_comparison(workload, outcome))
    for line in _closing_lines(outcome):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _comparison(workload: str, outcome: Outcome) -> Table:
    eager, plan = outcome.eager, outcome.measured
    table = Table(title=workload, title_justify="left")
    table.add_column()
    for heading, step in (("eager", eager), ("plan", plan)):
        table.add_column(f"{heading}, predicted" if step.predicted else heading, justify="right")
    table.add_column("plan / eager", justify="right")
    table.add_row("peak", *_byte_cells(eager.peak_bytes, plan.peak_bytes))
    table.add_row(
        "above start",
        *_byte_cells(eager.peak_bytes - eager.resident_bytes, plan.peak_bytes - plan.resident_bytes),
    )
    table.add_row("arena", NOTHING, format_bytes(outcome.plan.arena_bytes), NOTHING)
    table.add_row("process above start", *_byte_cells(eager.rss_peak_bytes, plan.rss_peak_bytes))
    table.add_row(
        "latency",
        format_seconds(eager.latency_s),
        format_seconds(plan.latency_s),
        format_ratio(outcome.latency_ratio) + (f" ±{outcome.noise:.2f}" if outcome.noise else ""),
    )
    if outcome.tuned_latency_s is not None:
        ratio = format_ratio(plan.latency_s / outcome.tuned_latency_s)
        table.add_row("eager, malloc tuned", format_seconds(outcome.tuned_latency_s), NOTHING, ratio)
    if outcome.verified != "none":
        error = "0 (bit-equal)" if outcome.bit_equal else f"{outcome.max_rel_error:.1e}"
        table.add_row("largest relative error", NOTHING, error, NOTHING)
    return table


def _byte_cells(eager_bytes: int | None, plan_bytes: int | None) -> tuple[str, str, str]:
    share = NOTHING if not eager_bytes or plan_bytes is None else format_percent(plan_bytes / eager_bytes)
    return _bytes_or_nothing(eager_bytes), _bytes_or_nothing(plan_bytes), share


def _bytes_or_nothing(nbytes: int | None) -> str:
    return NOTHING if nbytes is None else format_bytes(nbytes)


def _closing_lines(outcome: Outcome) -> list[str]:
    search = outcome.search
    verdict = "limit met" if outcome.met else "limit NOT met"
    moves = [f"{outcome.count(kind)} {kind}" for kind in MOVES if outcome.count(kind)]
    return [
        f"{verdict}: {limit_line(outcome.limit)}; {_trust(outcome)}",
        f"moves: {', '.join(moves) or 'none needed but order and placement'}",
        f"floor: {format_bytes(outcome.floor_bytes)} ({outcome.floor_bytes} bytes) at {outcome.floor_node}",
        f"search: {search.states:,} states in {format_seconds(search.seconds)}"
        f" ({search.states_per_s:,.0f} per second), stopped: {search.stop_reason}",
    ]


def _trust(outcome: Outcome) -> str:
    if outcome.verified == "none":
        return f"predicted for {outcome.device}, nothing was run"
    return f"verified against {outcome.verified}"


def limit_line(limit: Limit) -> str:
    """The limit as resolved."""
    if limit.memory_bytes is not None:
        return f"peak at most {format_bytes(limit.memory_bytes)} ({limit.memory_bytes} bytes)"
    if limit.latency_ratio is not None:
        return f"latency at most {format_ratio(limit.latency_ratio)} eager's"
    return "none given"


MOST_ROWS = 16


def print_frontier(console: Console, workload: str, frontier: Frontier) -> None:
    """At most `MOST_ROWS` points, evenly spread: predicted peak and time, and both in proportion."""
    points = frontier.points
    eager = frontier.setting.eager
    table = Table(title=f"{workload}: predicted", title_justify="left")
    for heading in ("peak", "of eager's", "above start", "latency", "of the fastest"):
        table.add_column(heading, justify="right")
    stride = -(-len(points) // MOST_ROWS) or 1
    fastest = points[0][1] if points else 1.0
    for peak, seconds in dict.fromkeys((*points[::stride], *points[-1:])):
        above = format_bytes(peak - eager.resident_bytes)
        share = format_percent(peak / eager.peak_bytes)
        table.add_row(
            format_bytes(peak), share, above, format_seconds(seconds), format_ratio(seconds / fastest)
        )
    console.print(table)


def print_measurement(console: Console, workload: str, measurement: Measurement) -> None:
    """The figures of one eager step."""
    table = Table(title=workload, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "peak": measurement.peak_bytes,
        "resident": measurement.resident_bytes,
        "above start": measurement.peak_bytes - measurement.resident_bytes,
        "process above start": measurement.rss_peak_bytes,
    }
    for name, nbytes in rows.items():
        table.add_row(name, _bytes_or_nothing(nbytes))
    table.add_row("latency", format_seconds(measurement.latency_s))
    console.print(table)


def print_accuracy(console: Console, accuracy: Accuracy) -> None:
    """The estimator's error by family of operators, largest share of the error first."""
    table = Table(title="the estimator's error by family of operators", title_justify="left")
    table.add_column("family")
    for heading in ("steps", "predicted", "measured", "predicted / measured", "share of error"):
        table.add_column(heading, justify="right")
    for row in accuracy.rows:
        times = (format_seconds(row.predicted_s), format_seconds(row.measured_s))
        ratio = f"{row.predicted_s / row.measured_s:.2f}" if row.measured_s else NOTHING
        table.add_row(row.family, str(row.steps), *times, ratio, format_percent(row.share))
    console.print(table)
    whole = accuracy.predicted_s / accuracy.measured_s if accuracy.measured_s else 0.0
    told = f"{format_seconds(accuracy.predicted_s)} predicted, {format_seconds(accuracy.measured_s)} measured"
    console.print(f"all steps: {told}, {whole:.2f} of measured", highlight=False, soft_wrap=True)


def print_workloads(console: Console) -> None:
    """Every bundled workload with its summary and options; the first of several words is the default."""
    from lowtide.workloads import BUNDLED, options_of, summary_of

    for name, builder in BUNDLED.items():
        options = "  ".join(map(str, options_of(builder)))
        console.print(f"[bold]{name}[/bold]  {summary_of(builder)}", highlight=False, soft_wrap=True)
        console.print(f"    {options}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{HOW_TO_NAME}", markup=False, highlight=False, soft_wrap=True)
