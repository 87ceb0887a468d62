"""What plans are compared with: eager as measured, or as predicted where it does not fit.

Problem.  A plan is wanted most where eager runs out of memory, and there nothing of eager's can be measured;
trying may get the process killed.

Method.  Eager's peak is predicted from what its operators were seen to allocate.  If this process may not
take that much (`lowtide.run.room`), or eager fails for want of memory, its figures are an Estimate, plans
are verified against the captured graph with large tensors in files, and ratios are to the predicted time.

Not done here: finding and trying plans.
"""

from __future__ import annotations

from lowtide.analysis.facts import assumed_facts
from lowtide.capture import Program
from lowtide.cost.estimate import Estimate, estimate_step
from lowtide.cost.profiled import profiled_costs
from lowtide.ir import Graph
from lowtide.run.measure import LatencyPairs, Measurement, measure_eager, measure_pairs
from lowtide.run.native import resident_bytes
from lowtide.run.plan import Plan
from lowtide.run.probe import probe
from lowtide.run.room import free_bytes, out_of_memory
from lowtide.run.verify import Verdict, verify

__all__ = ["baseline", "compare_latency", "compare_numbers", "unpaired"]

AMPLE = 2.0
"""Where this many times the assumed peak is free, eager is run without a closer look."""

LONG_SECONDS, BRIEF_SECONDS = 60.0, 5.0
"""How long a plan is compared with eager: one that is returned, and one that may not be."""

MARGIN = 1.05
"""What the allocator does not show (workspace of libraries, threads' stacks), as a factor on the peak."""


def baseline(program: Program) -> Measurement | Estimate:
    """Eager's figures for one step of the program's workload."""
    graph, free = program.graph, free_bytes()
    here_bytes = resident_bytes(program.workload)
    if free is not None:
        assumed = estimate_step(graph, [node.id for node in graph], assumed_facts(graph), {})
        if AMPLE * (assumed.peak_bytes - here_bytes) > free:
            closer = _predicted(graph)
            if MARGIN * (closer.peak_bytes - here_bytes) > free:
                return closer
    try:
        return measure_eager(program.workload)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    return _predicted(graph)


def _predicted(graph: Graph) -> Estimate:
    order = [node.id for node in graph]
    return estimate_step(graph, order, probe(graph, "reference"), profiled_costs(graph))


def compare_numbers(eager: Measurement | Estimate, program: Program, plan: Plan) -> Verdict:
    """The plan's step against eager's, or against the captured graph where eager does not fit or draws other
    random numbers.
    """
    return verify(program, plan, eager_fits=isinstance(eager, Measurement))


def compare_latency(
    eager: Measurement | Estimate,
    program: Program,
    plan: Plan,
    measured: Measurement,
    *,
    brief: bool = False,
) -> LatencyPairs:
    """Interleaved pairs with eager for a minute at most (`brief`: five seconds, one pair at least), or,
    without pairs, the plan's measured time to eager's predicted one.
    """
    if isinstance(eager, Measurement):
        return measure_pairs(
            plan, program.workload, seconds=BRIEF_SECONDS if brief else LONG_SECONDS, brief=brief
        )
    return unpaired(eager, measured)


def unpaired(eager: Measurement | Estimate, measured: Measurement) -> LatencyPairs:
    """The plan's time to eager's as both are known, nothing interleaved."""
    ratio = measured.latency_s / eager.latency_s
    return LatencyPairs(ratio, 0.0, 0, eager.latency_s, measured.latency_s)
