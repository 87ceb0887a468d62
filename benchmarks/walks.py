"""Random walks of legal moves, orders and placements, held against eager: `python -m benchmarks.walks`.

Problem.  Moves are right one by one; what a search runs is a dozen of them on top of each other.

Method.  The walks of `tests/differential/test_random_walks.py`, as many as there is time for: over its
workloads, over the bundled tiny ones, and over random graphs.  A walk is named by its subject and its seed:
`--seed N --walks 1 --only SUBJECT` repeats it.

Not done.  Timing.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from tests.differential.test_random_walks import WORKLOADS, Walk, scattered, shuffled, walk_plan
from tests.issues.ladder import tolerance_of
from tests.strategies import graphs
from torch.utils import _pytree as pytree

from lowtide.capture import Program, capture
from lowtide.fusion.kernels import kernels_for
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


def subjects(only: str) -> dict[str, Callable[[], Workload]]:
    """Makers of workloads by name."""
    tiny = {f"tiny {name}": (lambda text=text: doubled(load_workload(text))) for name, text in TINY.items()}
    return {name: make for name, make in {**WORKLOADS, **tiny}.items() if only in name}


def doubled(workload: Workload) -> Workload:
    """In float64, where nothing hides behind rounding."""

    def widen(leaf: Any) -> Any:
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.double() if floating else leaf

    workload.model.double()
    args, kwargs, targets = pytree.tree_map(widen, (workload.args, dict(workload.kwargs), workload.targets))
    return replace(workload, args=args, kwargs=kwargs, targets=targets)


def walk_workload(program: Program, seed: int, kernels: Kernels) -> None:
    """One walk; of three, one runs updates as compiled kernels and one has no measured facts.

    Updates are judged by eager's optimizer on the plan's gradients: some are rounding errors of zero.
    """
    how: How = "assumed" if seed % 3 == 2 else "arena"
    used = kernels if seed % 3 == 1 else NO_KERNELS
    measure = partial(probe_tree, how=how, kernels=used)
    plan, walk = walk_plan(program, seed, 6, scattered, measure, used)
    verdict = verify(program, plan)
    limit = 0.0 if walk.exact else tolerance_of(program)
    if verdict.faults or verdict.max_rel_error > limit or (walk.exact and not verdict.bit_equal):
        raise AssertionError(f"{verdict.explain()} after {walk.steps}")


def walk_graph(graph: Graph, seed: int) -> None:
    """One walk over a random graph, against the reference executor."""
    torch.manual_seed(seed)
    inputs = {value: torch.rand(graph.values[value].meta.shape) + 0.5 for value in graph.inputs}
    walk = Walk(graph, random.Random(seed))
    for _ in range(3):
        walk.move()
    order = shuffled(walk.graph, walk.random)
    tree = probe_tree(walk.graph, "arena")
    layout = lay_out(walk.graph, order, tree[()], scattered(walk.graph, order, tree[()], walk.random))
    ours = {value: tensor.clone() for value, tensor in inputs.items()}
    found = ArenaExecutor(walk.graph, order, tree, layout, load_hook(), poison=True).run(ours, {})
    expected = run_graph(graph, inputs)
    pairs = [(found[new], expected[old]) for old, new in zip(graph.outputs, walk.graph.outputs, strict=True)]
    pairs += [(ours[value], inputs[value]) for value in graph.inputs]
    for mine, theirs in pairs:
        rtol = 0.0 if walk.exact else 1e-4
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol, equal_nan=True, msg=str(walk.steps))


def random_walks(seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Failures of walks over random graphs."""
    numbers = iter(range(seed, seed + 2 * count))
    failures: list[tuple[str, str]] = []

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
            walk_graph(graph, number)
        except Exception as error:  # the walk is what is judged: it is counted and shown
            failures.append((f"{RANDOM} {number}", f"{type(error).__name__}: {error}"))

    check()
    yield from failures


def workload_walks(seed: int, count: int, only: str) -> Iterator[tuple[str, str]]:
    """Failures of walks over workloads, in turn."""
    found = list(subjects(only).items())
    for index, (name, make) in enumerate(found):
        torch.manual_seed(0)
        workload = make()
        program = capture(workload)
        kernels = kernels_for(program.graph)
        for number in range(seed + index, seed + count, len(found)):
            try:
                walk_workload(program, number, kernels)
            except Exception as error:  # as above
                yield f"{name} {number}", f"{type(error).__name__}: {error}"


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
