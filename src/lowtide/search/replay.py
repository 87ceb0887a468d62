"""Running a saved plan on its workload: load, verify, measure, compare with eager.

Not done here: searching; a plan for another workload is refused by `run.saved`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lowtide.errors import LowtideError
from lowtide.fusion.kernels import compile_plan
from lowtide.run.measure import measure_plan, plan_step
from lowtide.run.plan import Plan
from lowtide.run.saved import load_for
from lowtide.search.baseline import baseline, compare_latency, compare_numbers
from lowtide.search.estimator import Estimator
from lowtide.search.floors import floor_of
from lowtide.search.outcome import Limit, Move, Outcome, SearchRecord
from lowtide.workload import Workload

__all__ = ["load_compiled", "run_saved"]


def load_compiled(path: Path, workload: Workload) -> Plan:
    """The plan in `path`, its fused groups as kernels.  Raises PlanFileError, CaptureError."""
    plan: Plan = load_for(path, workload, Plan)
    compile_plan(plan)
    return plan


def run_saved(path: Path, workload: Workload, *, steps: int = 1) -> Outcome:
    """Load the plan in `path`, compare one step with eager, measure both, then run `steps` steps.

    Raises PlanFileError, CaptureError, and LowtideError if the plan's numbers are not eager's.
    """
    plan = load_compiled(path, workload)
    eager = baseline(plan.program)
    verdict = compare_numbers(eager, plan.program, plan)
    if not verdict.passed:
        raise LowtideError(f"the plan in {path} does not give eager's numbers: {verdict.explain()}")
    measured = measure_plan(plan, workload)
    pairs = compare_latency(eager, plan.program, plan, measured)
    step = plan_step(plan, workload)
    for _ in range(steps):
        step()
    floor = floor_of(plan.graph, plan.facts)
    return Outcome(
        plan=plan,
        limit=Limit(),
        met=measured.peak_bytes <= plan.predicted_peak_bytes,
        verified=verdict.against,
        eager=eager,
        measured=measured,
        latency_ratio=pairs.ratio,
        noise=pairs.eager_half_width,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_latency_s=sum(Estimator(kernels=plan.kernels).costs(plan.graph).values()),
        max_rel_error=verdict.max_rel_error,
        bit_equal=verdict.bit_equal,
        floor_bytes=floor.total_bytes,
        floor_node=floor.node,
        search=SearchRecord(0.0, 0, "loaded"),
        moves=tuple(Move(kind, "") for kind, count in plan.moves.items() for _ in range(count)),
        settings={"threads": torch.get_num_threads()},
    )
