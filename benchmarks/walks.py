"""Random walks of legal moves, orders and placements, held against eager: `python -m benchmarks.walks`.

Problem.  Moves are right one by one; what a search runs is a dozen of them on top of each other.

Method.  The walks of `tests/differential/walking.py`, as many as there is time for: over its workloads and
the bundled tiny ones in float64, where nothing hides behind rounding, over the tiny ones in float32, where
kernels are those of real models, and over random graphs.  Of two walks one compiles its groups; all kernels
of a batch of walks are compiled together.  A walk is named by its subject and its seed: `--seed N --walks 1
--only SUBJECT` repeats it.

Not done.  Timing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from tests.differential.walking import WORKLOADS, Walk, grown, plan_of, scattered, shuffled
from tests.issues.ladder import Trace, assert_traces, eager_trace, plan_trace, tolerance_of
from tests.strategies import graphs
from torch.utils import _pytree as pytree

from lowtide.capture import Program, capture
from lowtide.fusion.kernels import Foundry
from lowtide.ir import Graph
from lowtide.run.allocator import load_hook
from lowtide.run.arena import ArenaExecutor
from lowtide.run.eager import run_graph
from lowtide.run.kernels import NO_KERNELS, Kernels
from lowtide.run.layout import lay_out
from lowtide.run.probe import How, probe_tree
from lowtide.run.verify import verify
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload

RANDOM = "random graphs"
LENGTH = 6
"""Most moves of a walk."""

BATCH = 24
"""Walks whose kernels are compiled together."""

LIMIT_32 = 1e-2
"""Relative error in float32, where gradients that are zero but for rounding differ: only what is plainly
wrong is seen there, the rest in float64."""


def subjects(only: str) -> dict[str, Callable[[], Workload]]:
    """Makers of workloads by name."""
    tiny = {f"tiny {name}": (lambda text=text: doubled(load_workload(text))) for name, text in TINY.items()}
    single = {f"float32 {name}": (lambda text=text: load_workload(text)) for name, text in TINY.items()}
    found = {**WORKLOADS, **tiny, **single}
    return {name: make for name, make in found.items() if only in name}


def doubled(workload: Workload) -> Workload:
    """In float64."""

    def widen(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if floating else leaf

    workload.model.double()
    args, kwargs, targets = pytree.tree_map(widen, (workload.args, dict(workload.kwargs), workload.targets))
    return replace(workload, args=args, kwargs=kwargs, targets=targets)


@dataclass
class Subject:
    """A captured workload, what eager does with it, and the kernels that its walks have made."""

    name: str
    program: Program
    eager: Trace | None
    foundry: Foundry

    @staticmethod
    def of(name: str, make: Callable[[], Workload]) -> Subject:
        torch.manual_seed(0)
        workload = make()
        # Adam divides by gradients that are rounding errors of zero: `verify` applies it to the plan's own.
        plain = type(workload.optimizer) is not torch.optim.AdamW
        program = capture(workload)
        return Subject(name, program, eager_trace(workload, 1) if plain else None, Foundry())

    def failures(self, seeds: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Walks of these seeds that went wrong, and how."""
        walks: dict[int, Walk] = {}
        for seed in seeds:
            try:
                walks[seed] = grown(self.program, seed, LENGTH)
            except Exception as error:  # the walk is what is judged: it is counted and shown
                yield f"{self.name} {seed}", f"{type(error).__name__}: {error}"
        compiled = self.foundry.kernels(*(walk.graph for seed, walk in walks.items() if seed % 2))
        for seed, walk in walks.items():
            try:
                self._judge(walk, seed, compiled if seed % 2 else NO_KERNELS)
            except Exception as error:  # as above
                yield f"{self.name} {seed}", f"{type(error).__name__}: {error}"

    def _judge(self, walk: Walk, seed: int, kernels: Kernels) -> None:
        """One in three walks has no measured facts."""
        how: How = "assumed" if seed % 3 == 2 else "arena"
        plan = plan_of(self.program, walk, scattered, partial(probe_tree, how=how, kernels=kernels), kernels)
        exact = walk.exact and not (kernels and walk.fused)
        limit = 0.0 if exact else tolerance_of(self.program)
        if self.eager is not None:
            ours = plan_trace(plan, self.program.workload, 1)
            assert_traces(ours, self.eager, limit, f"{walk.steps}")
            return
        verdict = verify(self.program, plan)
        limit = LIMIT_32 if limit == 1e-5 else limit
        if verdict.faults or verdict.max_rel_error > limit or (exact and not verdict.bit_equal):
            raise AssertionError(f"{verdict.explain()} after {walk.steps}")


def walk_graph(graph: Graph, seed: int, foundry: Foundry) -> None:
    """One walk over a random graph, against the reference executor."""
    torch.manual_seed(seed)
    inputs = {value: torch.rand(graph.values[value].meta.shape) + 0.5 for value in graph.inputs}
    walk = Walk(graph, random.Random(seed))
    for _ in range(3):
        walk.move()
    kernels = foundry.kernels(walk.graph) if seed % 8 == 0 else NO_KERNELS
    order = shuffled(walk.graph, walk.random)
    tree = probe_tree(walk.graph, "arena", kernels=kernels)
    layout = lay_out(walk.graph, order, tree[()], scattered(walk.graph, order, tree[()], walk.random))
    ours = {value: tensor.clone() for value, tensor in inputs.items()}
    executor = ArenaExecutor(walk.graph, order, tree, layout, load_hook(), poison=True, kernels=kernels)
    found = executor.run(ours, {})
    expected = run_graph(graph, inputs)
    pairs = [(found[new], expected[old]) for old, new in zip(graph.outputs, walk.graph.outputs, strict=True)]
    pairs += [(ours[value], inputs[value]) for value in graph.inputs]
    for mine, theirs in pairs:
        rtol = 0.0 if walk.exact and not kernels else 1e-4
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol, equal_nan=True, msg=str(walk.steps))


def random_walks(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Failures of walks over random graphs."""
    numbers = iter(range(seed, seed + 2 * count))
    failures: list[tuple[str, str]] = []
    foundry = Foundry()

    @seeded(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(graphs(max_nodes=20), st.none())
    def check(graph: Graph, _: None) -> None:
        number = next(numbers)
        try:
            walk_graph(graph, number, foundry)
        except Exception as error:  # as above
            failures.append((f"{RANDOM} {number}", f"{type(error).__name__}: {error}"))

    check()
    yield from failures


def workload_walks(seed: int, count: int, only: str) -> Iterator[tuple[str, str]]:
    """Failures of walks over workloads, in turn."""
    found = list(subjects(only).items())
    for index, (name, make) in enumerate(found):
        seeds = range(seed + index, seed + count, len(found))
        subject = Subject.of(name, make) if seeds else None
        for start in range(0, len(seeds), BATCH):
            assert subject is not None
            yield from subject.failures(seeds[start : start + BATCH])


def main() -> int:
    """Walk; exit status 1 if any walk failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--walks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a subject's name")
    given_ = parser.parse_args()
    warnings.simplefilter("ignore")
    start, failures = time.perf_counter(), Counter[str]()
    on_graphs = given_.walks // 4 if given_.only in RANDOM else 0
    on_workloads = workload_walks(given_.seed, given_.walks - on_graphs, given_.only)
    for name, why in chain(on_workloads, random_walks(given_.seed, on_graphs) if on_graphs else ()):
        failures[name.rsplit(" ", 1)[0]] += 1
        print(f"{name}: {why[:600]}", flush=True)
    took = time.perf_counter() - start
    print(f"{given_.walks} walks from seed {given_.seed} in {took:.0f} s: {sum(failures.values())} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
