"""The JSON objects that `--json` writes: one object, bytes are integers, times are seconds.

A file that cannot be written is found before the search starts, not after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import UsageError

if TYPE_CHECKING:
    from lowtide.cost.estimate import Estimate
    from lowtide.run.measure import Measurement
    from lowtide.search.driver import Frontier
    from lowtide.search.outcome import Outcome

__all__ = [
    "MOVES",
    "check_writable",
    "frontier_record",
    "measurement_record",
    "outcome_record",
    "write_record",
]

MOVES = ("fission", "remat", "swap", "fuse", "rewrite")


def outcome_record(workload: str, outcome: Outcome) -> dict[str, object]:
    """The record of `lowtide optimize`."""
    limit = outcome.limit
    asked = (
        {"memory_bytes": limit.memory_bytes}
        if limit.memory_bytes is not None
        else {"latency_ratio": limit.latency_ratio}
    )
    return {
        "workload": workload,
        "device": outcome.device,
        "limit": asked,
        "met": outcome.met,
        "verified": outcome.verified,
        "eager": measurement_record(outcome.eager),
        "plan": {
            "predicted_peak_bytes": outcome.predicted_peak_bytes,
            "peak_bytes": outcome.measured.peak_bytes,
            "arena_bytes": outcome.plan.arena_bytes,
            "rss_peak_bytes": outcome.measured.rss_peak_bytes,
            "predicted_latency_s": outcome.predicted_latency_s,
            "latency_s": outcome.measured.latency_s,
            "max_rel_error": None if outcome.verified == "none" else outcome.max_rel_error,
            "bit_equal": outcome.bit_equal,
            "allocations_per_step": outcome.allocations_per_step,
        },
        "floor_bytes": outcome.floor_bytes,
        "search": {
            "seconds": outcome.search.seconds,
            "states": outcome.search.states,
            "states_per_s": outcome.search.states_per_s,
            "stop_reason": outcome.search.stop_reason,
        },
        "moves": {kind: outcome.count(kind) for kind in MOVES},
    }


def frontier_record(workload: str, frontier: Frontier) -> dict[str, object]:
    """The record of `lowtide explore`: predicted points by rising time."""
    return {
        "workload": workload,
        "device": frontier.setting.device,
        "eager": measurement_record(frontier.setting.eager),
        "points": [{"peak_bytes": peak, "latency_s": seconds} for peak, seconds in frontier.points],
    }


def measurement_record(measurement: Measurement | Estimate) -> dict[str, object]:
    """The four figures of one step, measured, or predicted where it could not be run."""
    return {
        **({"predicted": True} if measurement.predicted else {}),
        "resident_bytes": measurement.resident_bytes,
        "peak_bytes": measurement.peak_bytes,
        "rss_peak_bytes": measurement.rss_peak_bytes,
        "latency_s": measurement.latency_s,
    }


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """Write one JSON object."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def check_writable(files: Mapping[str, Path | None]) -> None:
    """Refuse a file that cannot be written, or two options that name the same one.

    `files` maps the option to its path.  Each is opened for appending, so an existing file keeps its
    contents; a new one is removed again.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        place = path.resolve()
        if place in seen:
            raise UsageError(
                f"{seen[place]} and {option} both name {path}", remedy="give them different files"
            )
        seen[place] = option
        _probe(option, path)


def _probe(option: str, path: Path) -> None:
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written: {(error.strerror or str(error)).lower()}",
            remedy="name a file in an existing folder that you may write to",
        ) from error
    if not existed:
        path.unlink()
