"""The comparison as Markdown: one table of peaks for all models, one table of everything for each.

Peaks are MiB above the step's start; the least of each model is bold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.training.record import Comparison, Figures, Panel, Row

__all__ = ["mebibytes", "render"]

MIB = 1 << 20
HEAD = (
    "",
    "peak, MiB",
    "of eager",
    "latency",
    "±",
    "processor",
    "ms",
    "gradients",
    "ready after, s",
    "others",
)
LEGEND = """\
Peak: most live allocator bytes above the level at the step's start, gradients included; of a plan of ours,
its whole arena and what it takes beside it. Latency: median of interleaved rounds against eager in the same
process (the row of tuned malloc: in turns of two processes); ± is the half-width of the 95 % interval of
eager against itself in the same rounds. Processor: the ratio of processor seconds, which other processes
disturb less. Gradients: largest relative difference from eager's. Ready after: the first forward and
backward, compilation included (artefacts of earlier rows are reused), or the search. Others: the share
of the processors that other processes took during the rounds."""


def render(comparison: Comparison) -> str:
    """The whole text, ending with a newline."""
    parts = [_machine(comparison), _table(*_peaks(comparison.panels))]
    for panel in comparison.panels:
        parts += [f"### {panel.title}", _table(*_panel(panel)), *_remarks(panel)]
    return "\n\n".join(part for part in (*parts, LEGEND) if part) + "\n"


def mebibytes(nbytes: int) -> str:
    """Bytes as MiB with one decimal, without the unit."""
    return f"{nbytes / MIB:.1f}"


def _machine(comparison: Comparison) -> str:
    return "\n\n".join(line for line in (comparison.machine, *comparison.notes) if line)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


# -- peaks of all models ------------------------------------------------------------------------------------


def _peaks(panels: Sequence[Panel]) -> tuple[list[str], list[list[str]]]:
    labels = list(dict.fromkeys(row.label for panel in panels for row in panel.rows))
    labels = [label for label in labels if label != "eager, tuned malloc"]
    rows = []
    for panel in panels:
        known = {row.label: row for row in panel.rows}
        low = _least(panel)
        rows.append([panel.title, *(_peak(known.get(label), low) for label in labels)])
    return ["peak, MiB", *labels], rows


def _least(panel: Panel) -> str:
    found = [row.figures.above_bytes for row in panel.rows if row.figures and row.figures.right]
    return mebibytes(min(found)) if found else ""


def _peak(row: Row | None, low: str) -> str:
    if row is None:
        return ""
    if row.figures is None:
        return "refused" if row.problem.startswith("Infeasible") else "-"
    text = mebibytes(row.figures.above_bytes)
    text = f"**{text}**" if text == low else text
    text += f" ({row.choice})" if row.choice else ""
    text += f", {row.figures.ratio:.2f}x" if row.series == "ours" else ""
    return text if row.figures.right else f"{text} wrong gradients"


# -- one model ----------------------------------------------------------------------------------------------


def _panel(panel: Panel) -> tuple[Sequence[str], list[list[str]]]:
    return HEAD, [_row(row, panel.eager) for row in panel.rows]


def _row(row: Row, eager: Figures | None) -> list[str]:
    label = f"{row.label} ({row.choice})" if row.choice else row.label
    figures = row.figures
    if figures is None:
        return [label, *["-"] * (len(HEAD) - 1)]
    share = f"{figures.above_bytes / eager.above_bytes:.0%}" if eager else "-"
    return [
        label,
        mebibytes(figures.above_bytes),
        share,
        f"{figures.ratio:.2f}x",
        f"{figures.noise:.2f}",
        f"{figures.processor_ratio:.2f}x",
        f"{figures.latency_s * 1e3:.0f}",
        "bit-equal" if figures.gradient_error == 0 else f"{figures.gradient_error:.0e}",
        f"{figures.prepare_s:.1f}",
        f"{figures.foreign_share:.0%}",
    ]


def _remarks(panel: Panel) -> Iterator[str]:
    """What does not fit a cell: refusals, choices not taken, statistics that differ, moves."""
    lines = []
    for row in panel.rows:
        if row.problem:
            lines.append(f"- {row.label}: {row.problem}")
        if row.figures and not row.figures.buffers_equal:
            lines.append(f"- {row.label}: buffers (BatchNorm statistics) differ from eager's after a step")
        if row.figures and row.figures.detail:
            lines.append(f"- {row.label}: {row.figures.detail}")
        if row.others:
            tried = "; ".join(_other(choice, figures) for choice, figures in row.others)
            lines.append(f"- {row.label}, all choices: {tried}")
    if lines:
        yield "\n".join(lines)


def _other(choice: str, figures: Figures | None) -> str:
    if figures is None:
        return f"{choice}: did not run"
    wrong = "" if figures.right else ", wrong gradients"
    return f"{choice}: {mebibytes(figures.above_bytes)} at {figures.ratio:.2f}x{wrong}"
