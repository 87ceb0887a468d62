"""A recomputed node merged again with its original by our own clean-up (xla#3455, jax#13999).

A merge would be right in its numbers and wrong in its bytes, so what is counted is nodes, at every stage that
rewrites a graph, and bytes when run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tests.issues.ladder import build, ordered, recomputed, recomputed_inside, rungs, split
from torch import nn

from lowtide.analysis.key import graph_key
from lowtide.capture import capture
from lowtide.ir import Fission, Graph, Node
from lowtide.ir.ops import Aten
from lowtide.run.measure import measure_plan
from lowtide.run.plan import build_plan
from lowtide.run.saved import load_plan
from lowtide.run.verify import verify
from lowtide.transforms import remat
from lowtide.transforms.algebra import take_apart
from lowtide.transforms.masks import pack_masks
from lowtide.transforms.normalise import normalise
from lowtide.transforms.rewriting.rewrite import rewrite
from lowtide.workload import Workload


def workload() -> Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Softplus())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, (torch.randn(64, 16),), loss=lambda y: y.square().mean(), optimizer=optimizer)


def named(node: Node, overload: str) -> bool:
    return isinstance(node.op, Aten) and node.op.overload == overload


def count(graph: Graph, overload: str = "aten.tanh.default") -> int:
    bodies = [body for n in graph if isinstance(n.op, Fission) for body in n.op.bodies]
    here = sum(named(node, overload) for node in graph)
    return here + sum(count(body, overload) for body in bodies)


def test_no_rewrite_merges_them() -> None:
    graph = capture(workload()).graph
    twice = recomputed(graph)
    assert (count(graph), count(twice)) == (3, 6)
    for change in (take_apart, normalise, pack_masks, rewrite):
        assert count(change(twice).graph) == 6, change.__name__
    parts = split(twice, 2)
    assert count(parts) == 6
    assert count(split(graph, 2)) == 3
    assert count(recomputed_inside(split(graph, 2))) >= 5


def test_the_copies_are_run_and_the_bytes_are_saved() -> None:
    """Recomputing each softplus from the kept tanh saves two of the three."""
    step = workload()
    program = capture(step)
    graph = program.graph
    made = {graph.values[n.outputs[0]].storage for n in graph if named(n, "aten.softplus.default")}
    late = remat.late_nodes(graph)
    twice = remat.apply(graph, remat.RematCandidate(frozenset(made & remat.recomputable(graph, late)), late))
    loose, tight = build_plan(program), build_plan(program, twice.graph)
    for change in (take_apart, normalise, pack_masks, rewrite):
        assert count(change(twice.graph).graph, "aten.softplus.default") == 6, change.__name__
    peaks = [measure_plan(plan, step, seconds=0.0).peak_bytes for plan in (loose, tight)]
    assert peaks[1] <= peaks[0] - 64 * 16 * 4
    assert verify(program, tight).bit_equal


def test_keys_and_files_tell_them_apart(tmp_path: Path) -> None:
    step = workload()
    program = capture(step)
    twice = recomputed(program.graph)
    assert graph_key(program.graph) != graph_key(twice)
    plan = build_plan(program, twice, ordered(twice))
    plan.save(tmp_path / "plan.lt")
    again = load_plan(tmp_path / "plan.lt", step.model, step.optimizer)
    assert count(again.graph) == 6
    assert again.arena_bytes == plan.arena_bytes


def test_the_clones_come_after_what_they_are_for() -> None:
    """A schedule that pulls a clone up to its original keeps the bytes alive all the same."""
    program = capture(workload())
    for rung in rungs(program, ()):
        if rung.name != "all recomputed, reordered":
            continue
        position = {node: k for k, node in enumerate(rung.order)}
        originals = [n.id for n in rung.graph if getattr(n.op, "overload", "") == "aten.tanh.default"]
        first_half, second_half = originals[:3], originals[3:]
        assert min(position[node] for node in second_half) > max(position[node] for node in first_half)
        assert build(program, rung).step_count > 0
