"""A report as text, for a terminal: the recipe, who is alive at the peak, the floor.

Method.  The same `ReportData` as the page, one part a function, each a list of lines.  The tree of modules
is cut where rows get small: a group is opened if it holds a tenth of the peak, and shown if it holds a
fiftieth.

Invariants.  Plain text, no colour, no line over `WIDTH` unless a name of the user's is longer.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from lowtide.report.adaptor import data_of_outcome, data_of_plan
from lowtide.report.data import Block, Curve, Holder, Move, ReportData
from lowtide.report.tree import Group, group_by_module
from lowtide.report.words import (
    chips,
    floor_sentence,
    headline,
    moves_sentence,
    operator_name,
    splits_under_floor,
)
from lowtide.run.plan import Plan
from lowtide.search.outcome import Outcome
from lowtide.units import format_bytes, format_percent, format_seconds

__all__ = ["describe", "explain"]

WIDTH = 100
OPEN_SHARE = 0.1
SHOW_SHARE = 0.02
MOST_MOVES = 20


def explain(plan: Plan, outcome: Outcome | None = None) -> str:
    """What a plan does; with the outcome of its search also what was measured, else nothing is run."""
    return describe(data_of_plan(plan) if outcome is None else data_of_outcome(outcome))


def describe(data: ReportData) -> str:
    """The whole text, ending without a newline; parts without numbers are left out."""
    parts = (_head(data), _recipe(data), _alive(data), _floor(data), _opaque(data))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(data: ReportData) -> list[str]:
    lines = [f"{data.workload} on {data.device}", "".join(text for text, _ in headline(data))]
    if facts := chips(data):
        lines.append("; ".join(chip.text for chip in facts))
    return lines


def _recipe(data: ReportData) -> list[str]:
    lines = ["Recipe"]
    if data.moves:
        lines += _wrapped(moves_sentence(data), "  ")
        lines += _move_rows(data.moves[:MOST_MOVES])
        if len(data.moves) > MOST_MOVES:
            lines.append(f"  and {len(data.moves) - MOST_MOVES} more rows")
    else:
        lines.append("  no move: order, in-place reuse and placement only")
    if data.plan.arena_bytes or data.plan_predicted.arena_bytes:
        lines.append(f"  {_arena_sentence(data)}")
    return lines


def _arena_sentence(data: ReportData) -> str:
    arena = data.plan.arena_bytes or data.plan_predicted.arena_bytes or 0
    text = (
        f"{len(data.plan_curve.steps)} steps; {len(data.blocks)} buffers in an arena of {format_bytes(arena)}"
    )
    arena -= data.kept_bytes
    if data.kept_bytes:
        text += f", {format_bytes(data.kept_bytes)} of it for derived weights"
    live = _live_bytes(data.blocks)
    if not live or arena < live:
        return text
    share = (arena - live) / live
    return (
        f"{text}, {format_percent(share)} over the most live bytes"
        if share > 0.0005
        else f"{text}, none wasted"
    )


def _live_bytes(blocks: Sequence[Block]) -> int:
    """The most bytes of blocks that are alive at once, gaps not counted."""
    change = Counter[int]()
    for block in blocks:
        change[block.start] += block.nbytes
        change[block.stop] -= block.nbytes
    return max(accumulate(change[step] for step in sorted(change)), default=0)


def _move_rows(moves: Sequence[Move]) -> list[str]:
    where = min(44, max(len(move.where) for move in moves))
    source = max(len(move.source) for move in moves)
    return [
        f"  {move.kind:<8} {move.where:<{where}}  {move.source:<{source}}  {_effect(move)}".rstrip()
        for move in moves
    ]


def _effect(move: Move) -> str:
    effects = []
    if move.saved_bytes:
        effects.append(f"saves {format_bytes(move.saved_bytes)}")
    if move.cost_s:
        effects.append(f"costs {format_seconds(move.cost_s)}" if move.cost_s > 0 else "costs no time")
    return ", ".join(effects)


def _alive(data: ReportData) -> list[str]:
    curve = data.plan_curve
    if not curve.steps:
        return []
    lines = [
        f"Alive at the plan's peak of {format_bytes(curve.peak_bytes + data.gap_bytes)}, {_moment(curve)}"
    ]
    if data.resident:
        roles = ", ".join(f"{entry.role} {format_bytes(entry.nbytes)}" for entry in data.resident)
        lines.append(_row(sum(entry.nbytes for entry in data.resident), 0, f"resident: {roles}"))
    root = group_by_module(data.plan_holders)
    lines += _branches(root, root.nbytes, 0)
    return [*lines, _row(data.gap_bytes, 0, "gaps in the arena")] if data.gap_bytes else lines


def _moment(curve: Curve) -> str:
    step = curve.steps[curve.peak_step]
    where = f" in {step.module}" if step.module else ""
    source = f" ({step.source})" if step.source else ""
    number = f"step {curve.peak_step + 1} of {len(curve.steps)}"
    return f"{number}, {operator_name(step.operator)}{where}{source}"


def _branches(group: Group, total: int, depth: int) -> Iterator[str]:
    hidden = 0
    for below in group.groups:
        if below.nbytes < SHOW_SHARE * total:
            hidden += below.nbytes
            continue
        yield _row(below.nbytes, depth, below.path)
        if below.nbytes >= OPEN_SHARE * total:
            yield from _branches(below, total, depth + 1)
    for holder in group.holders:
        if holder.nbytes < SHOW_SHARE * total:
            hidden += holder.nbytes
        else:
            yield _row(holder.nbytes, depth, _named(holder))
    if hidden >= SHOW_SHARE * total:
        yield _row(hidden, depth, "smaller ones")


def _named(holder: Holder) -> str:
    return "  ".join(filter(None, (operator_name(holder.label), holder.source, holder.kind)))


def _row(nbytes: int, depth: int, text: str) -> str:
    return f"  {format_bytes(nbytes):>10}  {'  ' * depth}{text}"


def _floor(data: ReportData) -> list[str]:
    if data.floor is None:
        return []
    title = "Floor without splitting" if splits_under_floor(data) else "Floor"
    return [f"{title} {format_bytes(data.floor.nbytes)}", *_wrapped(floor_sentence(data), "  ")] + [
        _row(nbytes, 0, name) for name, nbytes in data.floor.parts
    ]


def _opaque(data: ReportData) -> list[str]:
    if not data.opaque:
        return []
    return _wrapped(f"Run as they are, without table entries: {', '.join(data.opaque)}", "")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
