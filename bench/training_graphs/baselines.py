"""The rows that a search has to beat: order alone, one split along the batch, and two free rewrites.

Each baseline takes a file's record and gives (latency, peak) relative to the recorded order.
`published_row` has what `magis.md`'s measurement of the same rows says, latency/peak.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lowtide.search.residence import evaluate

from .files import graph_of
from .flatten import flatten
from .structure import Structure, build

__all__ = ["BASELINES", "published_row"]

Baseline = Callable[[Mapping[str, Any]], tuple[float, float]]

_PUBLISHED: Mapping[str, Mapping[str, str]] = {
    "bert_b32": {
        "order only": "1.000/0.990", "n=2": "1.013/0.543", "n=4": "1.095/0.301", "n=8": "1.264/0.180",
        "n=16": "1.395/0.120", "n=32": "1.812/0.090", "masks late": "1.000/0.855",
    },
    "vit_b64": {
        "order only": "1.000/0.798", "n=2": "1.018/0.474", "n=4": "1.051/0.327", "n=8": "1.103/0.210",
        "n=16": "1.736/0.151", "n=32": "2.223/0.128", "masks late": "1.000/0.824",
    },
    "resnet50_b64": {
        "order only": "1.000/1.000", "n=2": "1.066/0.561", "n=4": "1.140/0.324", "n=8": "1.241/0.196",
        "n=16": "1.762/0.135", "n=32": "2.702/0.104", "masks late": "1.000/0.768",
    },
    "unet_b32": {
        "order only": "1.000/0.862", "n=2": "1.015/0.450", "n=4": "1.041/0.237", "n=8": "1.066/0.131",
        "n=16": "1.101/0.078", "n=32": "1.144/0.051", "masks late": "1.000/0.876",
    },
}  # fmt: skip


def published_row(workload: str, name: str) -> str:
    """What was measured elsewhere for this row."""
    return _PUBLISHED.get(workload, {}).get(name, "")


def _baseline(structure: Structure) -> Baseline:
    def run(record: Mapping[str, Any]) -> tuple[float, float]:
        built, late = build(graph_of(record["base"]), structure, record["hw"])
        flat = flatten(built, late, record["hw"])
        outcome = evaluate(flat.program, flat.default * 0)
        base = record["base"]["sim"]
        return outcome.latency_s / base["latency_ms"], outcome.peak_bytes / base["peak_bytes"]

    return run


_PLAIN = {"fold": False, "merge": False}

BASELINES: Mapping[str, Baseline] = {
    "order only": _baseline(Structure(masks=False, **_PLAIN)),
    **{f"n={parts}": _baseline(Structure(parts, masks=False, **_PLAIN)) for parts in (2, 4, 8, 16, 32)},
    "masks late": _baseline(Structure(**_PLAIN)),
    "folded division": _baseline(Structure(masks=False, merge=False)),
}
