"""The door: what `import lowtide as lt` offers beyond capturing, with reports attached.

Problem.  A plan that runs (`run.plan`) must not know how plans are searched or shown, but a user wants one
object that can do all three.

Method.  `Plan` adds `report` and `explain` to the running plan and remembers the Outcome that it came from.

Not done here: anything of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn, optim

from lowtide import report as reports
from lowtide.capture import Program
from lowtide.errors import UsageError
from lowtide.fusion.kernels import compile_plan
from lowtide.run import plan as running
from lowtide.run.saved import load_plan
from lowtide.search import driver
from lowtide.search.cache import PlanCache as KeptPlans
from lowtide.search.outcome import OnProgress, Outcome
from lowtide.workload import Workload

__all__ = ["Frontier", "Plan", "PlanCache", "explore", "load", "optimize"]


class Plan(running.Plan):
    """A runnable plan: `plan(x)` or `plan.step(x, y)`, `save(path)`, `report(path)`, `explain()`."""

    outcome: Outcome | None = None

    @staticmethod
    def of(outcome: Outcome) -> Plan:
        """The plan of an outcome, which it remembers for its report."""
        known = outcome.plan
        known.release()  # one arena is enough
        plan = Plan(known.program, known.recipe, known.hook, kernels=known.kernels)
        plan.outcome = outcome
        return plan

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML page; UsageError for a loaded plan, which was not measured here."""
        if self.outcome is None:
            raise UsageError(
                "this plan was loaded, so what was measured when it was made is not known",
                remedy="call plan.explain(), or write the report where the plan is made",
            )
        reports.write_report(self.outcome, path)

    def explain(self) -> str:
        """What the plan does, who is alive at its peak, and the floor, as text."""
        return reports.explain(self, self.outcome)


class Frontier(driver.Frontier):
    """The memory/latency trade-off of one program; `pick` turns a limit into a verified plan."""

    def pick(self, *, memory: str | int | None = None, latency: str | float | None = None) -> Plan:
        """The verified plan for a limit, from the points found; raises Infeasible with the floor."""
        return Plan.of(self.pick_outcome(memory=memory, latency=latency))


def explore(program: Program | Workload, seconds: float = 30.0, seed: int = 0) -> Frontier:
    """The whole trade-off of a captured program in one search of at most `seconds`."""
    return driver.explore(program, seconds, seed, kind=Frontier)


def optimize(
    workload: Workload,
    *,
    memory: str | int | None = None,
    latency: str | float | None = None,
    seconds: float = 30.0,
    seed: int = 0,
    device: str | None = None,
    threads: int | None = None,
    rng: str = "eager",
    on_progress: OnProgress | None = None,
) -> Plan:
    """The fastest verified plan within a memory limit, or the smallest within a latency limit.

    `memory` limits the total peak: "50%" of eager's, "2GiB", or bytes; `latency` is a multiple of eager's
    ("1.1x").  Leaves model, optimizer, gradients and random state bit-identical.  Raises Infeasible (with
    the floor), CaptureError, UsageError.
    """
    return Plan.of(
        driver.optimize(
            workload,
            memory=memory,
            latency=latency,
            seconds=seconds,
            seed=seed,
            device=device,
            threads=threads,
            rng=rng,
            on_progress=on_progress,
        )
    )


def load(
    path: str | Path, model: nn.Module, optimizer: optim.Optimizer | None = None, *, loss: Any = None
) -> Plan:
    """The plan saved at `path`, for the same model (and optimizer); no search, and no code is run.

    `loss` is only needed if it is a module with tensors of its own.  Raises PlanFileError, Stale.
    """
    plan: Plan = load_plan(path, model, optimizer, loss=loss, kind=Plan)
    compile_plan(plan)
    return plan


class PlanCache(KeptPlans):
    """One plan per input shape within a limit, at most `max_plans` of them; other options as `optimize`."""

    def __init__(
        self,
        make_workload: Callable[..., Workload],
        *,
        memory: str | int | None = None,
        latency: str | float | None = None,
        max_plans: int = 8,
        **options: Any,
    ) -> None:
        def planner(workload: Workload) -> Plan:
            return optimize(workload, memory=memory, latency=latency, **options)

        super().__init__(make_workload, planner, max_plans)
