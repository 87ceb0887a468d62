"""The one place where the command line calls the library.

The heavy parts are imported when a command needs them, so that `--help` and a typing error answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import UsageError

if TYPE_CHECKING:
    from lowtide.report.accuracy import Accuracy
    from lowtide.run.measure import Measurement
    from lowtide.search.driver import Frontier
    from lowtide.search.outcome import OnProgress, Outcome
    from lowtide.workload import Workload

__all__ = [
    "Request",
    "explain",
    "explore",
    "judge_estimator",
    "load_workload",
    "measure",
    "measure_fresh",
    "optimize",
    "run_plan",
    "write_report",
]


@dataclass(frozen=True)
class Request:
    """What `lowtide optimize` was asked for; exactly one of `memory` and `latency` is given."""

    memory: str | None
    latency: str | None
    seconds: float
    seed: int
    threads: int | None
    rng: str
    device: str | None
    fuse: bool
    swap: bool


def load_workload(text: str, device: str | None = None) -> Workload:
    """The workload that the user names; without data for a device that is not here, whatever its size."""
    from lowtide.capture.internals import building_without_data
    from lowtide.cost.devices import device_named
    from lowtide.search.foreign import is_foreign
    from lowtide.workloads import load_workload as load

    if not is_foreign(device):
        return load(text)
    device_named(device or "")
    with building_without_data():
        return load(text)


def optimize(workload: Workload, request: Request, on_progress: OnProgress) -> Outcome:
    """Search, verify and measure a plan, with the requested threads from here on in this process.

    An interrupt returns the best verified plan so far, or raises KeyboardInterrupt where there is none.
    """
    import torch

    from lowtide.search.driver import optimize as search

    torch.set_num_threads(request.threads or torch.get_num_threads())
    return search(
        workload,
        memory=request.memory,
        latency=request.latency,
        seconds=request.seconds,
        seed=request.seed,
        threads=request.threads,
        rng=request.rng,
        device=request.device,
        fuse=request.fuse,
        swap=request.swap,
        on_progress=on_progress,
    )


def measure_fresh(outcome: Outcome, spec: str) -> Outcome:
    """`outcome` with what fresh processes tell: both resident sizes, and eager with a tuned malloc.

    What could not be run here is not tried: any step on a device that is not here, eager where it does not
    fit, a second process where there is no room for one.
    """
    from lowtide.run.measure import Measurement
    from lowtide.search.fresh import has_room, run_fresh

    if not has_room(max(outcome.measured.peak_bytes, outcome.eager.peak_bytes)):
        return outcome
    if isinstance(outcome.measured, Measurement):
        plan = run_fresh(spec, outcome.plan, seconds=0.0)
        rss = plan.rss_peak_bytes if plan else None
        outcome = replace(outcome, measured=replace(outcome.measured, rss_peak_bytes=rss))
    if isinstance(outcome.eager, Measurement):
        eager, tuned = run_fresh(spec, seconds=0.0), run_fresh(spec, tuned=True)
        rss = eager.rss_peak_bytes if eager else None
        outcome = replace(
            outcome,
            eager=replace(outcome.eager, rss_peak_bytes=rss),
            tuned_latency_s=tuned.latency_s if tuned else None,
        )
    return outcome


def measure(workload: Workload) -> Measurement:
    """One eager step, measured as plans are."""
    from lowtide.run.measure import measure_eager

    return measure_eager(workload)


def write_report(outcome: Outcome, path: Path) -> None:
    """Write the HTML report."""
    from lowtide.report import write_report as write

    write(outcome, path)


def explore(
    workload: Workload, *, seconds: float, seed: int, device: str | None, on_progress: OnProgress
) -> Frontier:
    """The frontier of a workload."""
    from lowtide.search.driver import Frontier, explore

    return explore(workload, seconds, seed, device=device, on_progress=on_progress, kind=Frontier)


def run_plan(file: Path, workload: Workload, *, steps: int, trace: Path | None) -> Outcome:
    """Load a plan for a workload, run it, measure it beside eager; write a trace of one step."""
    from lowtide.report import write_trace
    from lowtide.run.measure import watch_plan
    from lowtide.search.replay import run_saved

    outcome = run_saved(file, workload, steps=steps)
    if trace is not None:
        runs = watch_plan(outcome.plan, workload)
        write_trace(outcome.plan, runs[len(runs) // 2], trace)
    return outcome


def judge_estimator(file: Path, spec: str | None) -> Accuracy:
    """Run the plan in `file` and set its steps' times against what the estimator says.

    `spec` names the workload; where it is absent, the one that the plan was made for, if it is bundled.
    """
    from lowtide.report.accuracy import accuracy_of
    from lowtide.run.measure import watch_plan
    from lowtide.run.saved import inspect_plan
    from lowtide.search.replay import load_compiled
    from lowtide.workloads import BUNDLED

    name = spec or inspect_plan(file).program.workload.name
    if spec is None and name.partition(":")[0] not in BUNDLED:
        raise UsageError(
            f"the plan in {file} was made for {name}, which is not bundled",
            remedy=f"name its workload: lowtide explain {file} FILE.py:FUNCTION --estimator",
        )
    workload = load_workload(name)
    plan = load_compiled(file, workload)
    return accuracy_of(plan, watch_plan(plan, workload, runs=9))


def explain(file: Path) -> str:
    """What a saved plan does, without its model."""
    from lowtide.report import explain
    from lowtide.run.saved import inspect_plan

    return explain(inspect_plan(file))
