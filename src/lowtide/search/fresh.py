"""A step in a fresh process: the resident size as the kernel counts it, and seconds with a tuned malloc.

Problem.  In a process that has run before, the heap keeps pages, so neither the kernel's high-water mark nor
the page faults of a step say anything; and malloc's settings cannot be undone once they are made.

Method.  `run_fresh` starts Python on this module with a workload's text (``unet:batch=8`` or
``file.py:function``) and, for a plan, its saved file.  The child runs one step to warm up, gives the plan's
arena and free heap pages back, resets the high-water mark, and runs the step that counts:

    rss_peak_bytes = VmHWM - VmRSS before the arena exists

with ``MALLOC_MMAP_THRESHOLD_=65536``, so that what is freed leaves the process.  `tuned` instead raises
malloc's thresholds, so that freed blocks stay, and reports the median seconds of a step.

Not done.  Workloads that exist only as objects: they cannot be built again elsewhere.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowtide.fusion.kernels import compile_plan
from lowtide.run.measure import plan_step, repeated, time_of
from lowtide.run.native import run_step
from lowtide.run.plan import Plan
from lowtide.run.resident import high_water_bytes, reset_high_water, resident_bytes, trim_heap
from lowtide.run.room import free_bytes
from lowtide.run.saved import load_for, save_plan
from lowtide.workloads import load_workload

__all__ = ["Fresh", "has_room", "run_fresh"]

_LIMIT_S = 600.0
_MOST_RUNS = 15
_SMALL = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


_PROCESS_BYTES = 600 << 20
"""What Python and PyTorch take before anything is computed."""


def has_room(step_bytes: int) -> bool:
    """Whether a second process may take a step of `step_bytes` beside this one."""
    free = free_bytes()
    return free is None or step_bytes + _PROCESS_BYTES <= free


@dataclass(frozen=True, slots=True)
class Fresh:
    """A step in a process of its own; `rss_peak_bytes` is None where the kernel does not tell."""

    rss_peak_bytes: int | None
    latency_s: float
    runs: int


def run_fresh(
    spec: str, plan: Plan | None = None, *, tuned: bool = False, seconds: float = 5.0
) -> Fresh | None:
    """Eager's step of the workload `spec`, or the plan's, in a fresh process with as many threads as here.

    `seconds` bounds the timed runs.  None if the process fails (out of memory, or over ten minutes).
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-") as directory:
        order: dict[str, Any] = {"spec": spec, "threads": torch.get_num_threads(), "seconds": seconds}
        if plan is not None:
            order["plan"] = str(Path(directory) / "plan.lt")
            save_plan(plan, order["plan"])
        environment = {**os.environ, **(_TUNED if tuned else _SMALL)}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "lowtide.search.fresh", json.dumps(order)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
    if done.returncode:
        return None
    return Fresh(**json.loads(done.stdout.splitlines()[-1]))


def _measure(spec: str, threads: int, seconds: float, plan: str | None = None) -> Fresh:
    """In the child: the step that counts."""
    torch.set_num_threads(threads)
    workload = load_workload(spec)
    loaded = load_for(plan, workload) if plan is not None else None
    if loaded is not None:
        compile_plan(loaded)
    step = plan_step(loaded, workload) if loaded is not None else partial(run_step, workload)
    step()
    if loaded is not None:
        loaded.release()
    trim_heap()
    before = resident_bytes() if reset_high_water() else None
    step()
    after = high_water_bytes()
    times = repeated(lambda: time_of(step), seconds, 1, _MOST_RUNS)
    rise = None if before is None or after is None else max(0, after - before)
    return Fresh(rise, statistics.median(times), len(times))


def main() -> None:
    """Entry of the child: one JSON argument, one line of JSON out."""
    found = _measure(**json.loads(sys.argv[1]))
    print(json.dumps({name: getattr(found, name) for name in ("rss_peak_bytes", "latency_s", "runs")}))


if __name__ == "__main__":
    main()
