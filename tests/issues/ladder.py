"""The plans of one workload from loose to the floor, each held against eager, step by step.

A rung is a program after moves: as captured, in another order, with half or all of what may be
recomputed, with the batch in parts, with both.  Dead memory is poisoned after each step of a plan, so that
a plan which reads what is gone computes NaN.  Reordering and recomputation have to give eager's bits; parts
of the batch add up in another order and may differ by rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.analysis.facts import assumed_facts
from lowtide.capture import Program, capture
from lowtide.capture.recording import named_tensors
from lowtide.ir import Fission, Graph
from lowtide.ir.verify import verify as verify_graph
from lowtide.run.measure import measure_eager, measure_plan
from lowtide.run.native import forward_backward, run_step
from lowtide.run.plan import Plan, build_plan
from lowtide.run.snapshot import preserved
from lowtide.run.verify import relative_error
from lowtide.schedule.heuristics import best_schedule
from lowtide.schedule.judge import check_order
from lowtide.transforms import fission, remat
from lowtide.transforms.algebra import take_apart
from lowtide.workload import Workload

TOLERANCE = ((torch.bfloat16, 1e-2), (torch.float16, 1e-2), (torch.float32, 1e-5), (torch.float64, 1e-10))
"""Relative error that parts may differ by: that of the coarsest element type which the step computes in."""


@dataclass(frozen=True)
class Rung:
    """A program after moves, with an order; `exact`: its numbers have to be eager's to the bit."""

    name: str
    graph: Graph
    order: tuple[int, ...]
    exact: bool = True


# -- moves ----------------------------------------------------------------------------------------


def recomputed(graph: Graph, share: float = 1.0, seed: int = 0) -> Graph:
    """`graph` with a share of what may be recomputed made again for the backward (bodies: in themselves)."""
    late = remat.late_nodes(graph)
    allowed = sorted(remat.recomputable(graph, late))
    chosen = random.Random(seed).sample(allowed, round(share * len(allowed)))
    return remat.apply(graph, remat.RematCandidate(frozenset(chosen), late)).graph


def recomputed_inside(graph: Graph) -> Graph:
    """`graph` with everything recomputed inside the bodies of its Fissions."""

    def changed(op: Fission) -> Fission:
        return replace(op, bodies=tuple(recomputed(body) for body in op.bodies))

    nodes = [replace(n, op=changed(n.op)) if isinstance(n.op, Fission) else n for n in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def split(graph: Graph, parts: int, whole_regions: int = 8) -> Graph:
    """`graph` with its batch in `parts` parts, region by region where it cannot be one region."""
    for _ in range(whole_regions):
        found = [each for each in fission.candidates(graph, (parts,)) if each.label == "batch"]
        if not found:
            break
        graph = fission.apply(graph, found[0]).graph
    return graph


def parts_of(graph: Graph) -> list[int]:
    """The number of parts of each Fission in `graph`."""
    return [len(node.op.parts) for node in graph.nodes if isinstance(node.op, Fission)]


def ordered(graph: Graph) -> tuple[int, ...]:
    """The order of least peak that the schedulers find."""
    return best_schedule(graph, assumed_facts(graph), inplace=True).order


def rungs(program: Program, parts: Sequence[int] = (2, 3)) -> Iterator[Rung]:
    """From loose to the floor."""
    graph = take_apart(program.graph).graph
    everything = recomputed(graph)
    yield Rung("as captured", program.graph, tuple(node.id for node in program.graph.nodes))
    yield Rung("reordered", graph, ordered(graph))
    yield Rung("half recomputed", half := recomputed(graph, 0.5), ordered(half))
    yield Rung("all recomputed", everything, tuple(node.id for node in everything.nodes))
    yield Rung("all recomputed, reordered", everything, ordered(everything))
    for count in parts:
        pieces = split(graph, count)
        if not parts_of(pieces):
            continue
        yield Rung(f"{count} parts", pieces, ordered(pieces), exact=False)
        pieces = recomputed(recomputed_inside(pieces))
        yield Rung(f"{count} parts, all recomputed", pieces, ordered(pieces), exact=False)


# -- comparing ------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What steps leave: results, gradients, everything the caller owns, the random generator."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    def take(self, step: int, result: Any, workload: Workload) -> None:
        for index, leaf in enumerate(leaves := pytree.tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self.tensors[f"step {step}: result {index} of {len(leaves)}"] = leaf.detach().clone()
            else:
                self.others[f"step {step}: result {index}"] = leaf
        self.others[f"step {step}: tree"] = pytree.tree_structure(result)
        self.others[f"step {step}: generator"] = torch.get_rng_state().tolist()
        for name, tensor in owned(workload).items():
            self.tensors[f"step {step}: {name}"] = tensor.detach().clone()


def owned(workload: Workload) -> dict[str, Tensor]:
    """Parameters, gradients that are set, buffers and optimizer state by name."""
    found: dict[str, Tensor] = {}
    for named in named_tensors(workload):
        found[named.names[0]] = named.tensor
        if named.tensor.grad is not None:
            found[f"gradient of {named.names[0]}"] = named.tensor.grad
        state = workload.optimizer.state.get(named.tensor, {}) if workload.optimizer else {}
        for key, entry in state.items():
            if isinstance(entry, Tensor):
                found[f"{key} of {named.names[0]}"] = entry
    return found


def clear(workload: Workload) -> None:
    for named in named_tensors(workload):
        named.tensor.grad = None


def eager_trace(workload: Workload, steps: int) -> Trace:
    """Eager's steps from the present state, which comes back afterwards."""
    trace = Trace()
    with preserved(workload):
        for step in range(steps):
            torch.manual_seed(step)
            if workload.optimizer is None:
                trace.take(step, run_step(workload), workload)
                continue
            loss = forward_backward(workload)
            workload.optimizer.step()
            trace.take(step, loss, workload)
            clear(workload)
    return trace


def plan_trace(plan: Plan, workload: Workload, steps: int) -> Trace:
    """The same by a plan."""
    trace = Trace()
    with preserved(workload):
        for step in range(steps):
            torch.manual_seed(step)
            if workload.optimizer is None:
                trace.take(step, plan(*workload.args, **workload.kwargs), workload)
                continue
            loss = plan.step(*workload.args, *workload.targets, keep_grads=True, **workload.kwargs)
            trace.take(step, loss, workload)
            clear(workload)
    return trace


def tolerance_of(program: Program) -> float:
    dtypes = {value.meta.dtype for value in program.graph.values.values()}
    return next(tolerance for dtype, tolerance in TOLERANCE if dtype in dtypes)


def assert_traces(ours: Trace, eager: Trace, tolerance: float, why: str) -> None:
    """Equal trees, numbers, random states; tensors within `tolerance`, or to the bit if it is zero.

    In half precision only the first step: rounding of its updates makes others of the next.
    """
    for name in ours.others.keys() | eager.others.keys():
        assert ours.others[name] == eager.others[name], f"{why}: {name} differs"
    strange = ours.tensors.keys() ^ eager.tensors.keys()
    assert not strange, f"{why}: only one side has {sorted(strange)}"
    floor = 1e-3 * max(
        (float(t.abs().max()) for name, t in eager.tensors.items() if "gradient" in name), default=0.0
    )
    for name, theirs in eager.tensors.items():
        if tolerance >= 1e-3 and not name.startswith("step 0"):
            continue
        mine = ours.tensors[name]
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), f"{why}: {name}"
        if not tolerance or not theirs.is_floating_point():
            same = torch.equal(mine, theirs) or torch.allclose(mine, theirs, 0.0, 0.0, equal_nan=True)
            assert same, f"{why}: {name} differs by {relative_error(mine, theirs)}"
        else:
            error = relative_error(mine, theirs, floor)
            assert error <= tolerance, f"{why}: {name} differs by {error}"


def build(program: Program, rung: Rung) -> Plan:
    """The rung's plan, its dead memory poisoned."""
    verify_graph(rung.graph)
    assert check_order(rung.graph, rung.order) == []
    return build_plan(program, rung.graph, rung.order, poison=True)


def climb(workload: Workload, parts: Sequence[int] = (2, 3), steps: int = 2) -> dict[str, Plan]:
    """Every rung's steps are eager's, its measured peak is what it predicts; the plans by rung.

    The first rung has to be within eager's peak.
    """
    program = capture(workload)
    eager = eager_trace(workload, steps)
    plans: dict[str, Plan] = {}
    for rung in rungs(program, parts):
        plan = plans[rung.name] = build(program, rung)
        tolerance = 0.0 if rung.exact else tolerance_of(program)
        assert_traces(plan_trace(plan, workload, steps), eager, tolerance, rung.name)
        measured = measure_plan(plan, workload, seconds=0.0)
        predicted = plan.predicted_peak_bytes - plan.resident_bytes
        slack = plan.recipe.unplaced_bytes  # scratch of other threads: they may not take it
        difference = predicted - measured.above_bytes
        assert 0 <= difference <= slack, f"{rung.name}: measured {measured.above_bytes}, not {predicted}"
        plan.release()
    return plans


def peak_of_eager(workload: Workload) -> int:
    return measure_eager(workload, seconds=0.0).peak_bytes
