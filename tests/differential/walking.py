"""Random walks over legal moves: what a search runs is a dozen moves on top of each other.

A walk starts from a captured step and makes random moves one after the other: it recomputes random storages
for random late nodes, splits random regions (inside bodies as well) in random parts, by rows with halos too,
takes operators apart, packs masks, rewrites by random algebraic rules, makes kernels of neighbours.  The
result runs in a random order that only respects dependencies, at offsets found by first fit in random order,
with dead memory poisoned, and is compared with eager: to the bit unless something was split or rounds
otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from tests.differential.small_steps import STEPS
from tests.issues import test_batchnorm_recomputed as norms
from tests.issues import test_custom_function_recomputed as functions
from tests.issues import test_multi_output_operators_recomputed as several
from tests.issues import test_parameters_only_region_recomputed as frozen
from tests.issues.ladder import Trace, assert_traces, plan_trace, tolerance_of
from tests.issues.test_inplace_activation_recomputed import Planes
from tests.issues.test_outputs_that_view_the_arena import Views
from tests.issues.test_python_side_effects_in_plans import Buffered, Rebinds
from tests.issues.test_routing_in_parts import Capacity

from lowtide.analysis.facts import Facts
from lowtide.analysis.region import before
from lowtide.capture import Program
from lowtide.fusion.planner import plan_blocks
from lowtide.ir import Fission, Graph
from lowtide.ir.verify import verify
from lowtide.place.judge import check_placement
from lowtide.place.problem import Placement, aligned
from lowtide.run.kernels import NO_KERNELS, Kernels
from lowtide.run.layout import placement_problem
from lowtide.run.plan import Plan, build_plan
from lowtide.run.probe import FactsTree, probe_tree
from lowtide.schedule.judge import check_order
from lowtide.transforms import fission, fuse, halo, remat
from lowtide.transforms.algebra import take_apart
from lowtide.transforms.masks import pack_masks
from lowtide.transforms.normalise import normalise
from lowtide.transforms.rewriting.rewrite import RULES, RewriteOptions, rewrite
from lowtide.transforms.rewriting.rule import Numerics
from lowtide.transforms.rows import row_candidates
from lowtide.workload import Workload


def training(model: torch.nn.Module, *shape: int) -> Workload:
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(shape).double()
    return Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer)


def inference(model: torch.nn.Module, *shape: int) -> Workload:
    return Workload(model.double(), (torch.randn(shape).double(),))


WORKLOADS: dict[str, Callable[[], Workload]] = {
    **STEPS,
    "norms": norms.workload,
    "functions": lambda: training(functions.Net(), 6, 4),
    "frozen": frozen.workload,
    "in place": lambda: training(Planes(), 4, 2, 5, 5),
    "routing": lambda: training(Capacity(), 6, 4),
    "counter": lambda: training(Buffered(), 6, 4),
    **{f"several: {name}": (lambda name=name: several.step_of(name)) for name in several.MODELS},
    "infer: planes": lambda: inference(Planes(), 4, 2, 5, 5),
    "infer: views": lambda: inference(Views(), 6, 4),
    "infer: rebinds": lambda: inference(Rebinds(), 6, 4),
    "infer: routing": lambda: inference(Capacity(), 6, 4),
}


# -- moves ---------------------------------------------------------------------------------------------


@dataclass
class Walk:
    """A graph under random moves; `steps` says what was done, for the message of a failure."""

    graph: Graph
    random: random.Random
    steps: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every move so far keeps eager's bits (kernels apart)."""
        rounding = ("split", "nest", "rows", "normalise", "rewrite")
        return not any(step.startswith(rounding) for step in self.steps)

    @property
    def fused(self) -> bool:
        """Whether there are groups that a kernel may run."""
        return any("fuse" in step for step in self.steps)

    def move(self) -> None:
        moves = {
            self.recompute: 4, self.split: 3, self.nest: 2, self.rows: 1, self.take_apart: 2,
            self.rewrite: 2, self.fuse: 1, self.group: 1, self.inside: 2,
        }  # fmt: skip
        self.random.choices(list(moves), list(moves.values()))[0]()
        verify(self.graph)

    def recompute(self) -> None:
        nodes = self.graph.nodes
        if not nodes:
            return
        late = remat.late_nodes(self.graph)
        if not late or self.random.random() < 0.3:  # anything from some point of the program on
            late = frozenset(node.id for node in nodes[self.random.randrange(len(nodes)) :])
        allowed = sorted(remat.recomputable(self.graph, late))
        chosen = frozenset(self.random.sample(allowed, self.random.randint(0, len(allowed))))
        try:
            self.graph = remat.apply(self.graph, remat.RematCandidate(chosen, late)).graph
        except ValueError as error:  # legal only in another order: refused, not wrong
            assert "after their update" in str(error)
            return
        self.steps.append(f"recompute {sorted(chosen)} for {len(late)} nodes")

    def split(self) -> None:
        found = list(fission.candidates(self.graph, (2, 3, 4)))
        if not found:
            return
        batch = [each for each in found if each.label == "batch"]
        candidate = self.random.choice(batch if batch and self.random.random() < 0.5 else found)
        if self.random.random() < 0.5:
            candidate = replace(candidate, sizes=self.cut(sum(candidate.sizes)))
        self.graph = fission.apply(self.graph, candidate).graph
        self.steps.append(f"split {candidate.label} {candidate.sizes} of {len(candidate.axes)} nodes")

    def nest(self) -> None:
        """Split regions of the bodies of a Fission, the same in each."""
        fissions = [node for node in self.graph if isinstance(node.op, Fission)]
        if not fissions:
            return
        node = self.random.choice(fissions)
        assert isinstance(node.op, Fission)
        found = list(fission.candidates(node.op.bodies[0], (2, 3)))
        if not found:
            return
        candidate = self.random.choice(found)
        try:
            self.graph = fission.apply_inside(self.graph, node.id, candidate).graph
        except (fission.IllegalFission, ValueError):  # another body is too small for it
            return
        self.steps.append(f"nest {candidate.label} {candidate.sizes} in {node.id}")

    def rows(self) -> None:
        """Cut images in rows, with halos."""
        found = [each for runs in row_candidates(self.graph, (2, 3)) for run in runs for each in run]
        if not found:
            return
        candidate = self.random.choice(found)
        self.graph = halo.apply(self.graph, candidate).graph
        self.steps.append(f"rows {candidate.sizes} of {len(candidate.nodes)} nodes")

    def group(self) -> None:
        """Groups as the planner makes them, all or some."""
        blocks = plan_blocks(self.graph)
        chosen = self.random.sample(blocks, self.random.randint(0, len(blocks)))
        try:
            self.graph = fuse.apply(self.graph, fuse.FuseCandidate(tuple(chosen))).graph
        except fuse.IllegalFusion:  # legal one by one, not together
            return
        if chosen:
            self.steps.append(f"fuse {[sorted(block) for block in chosen]}")

    def fuse(self) -> None:
        """A random node with some of its readers."""
        if not self.graph.nodes:
            return
        group = {self.random.choice(self.graph.nodes).id}
        for _ in range(self.random.randint(1, 3)):
            reached = [n.id for n in self.graph if group & set(self.graph.dependencies[n.id])]
            group.update(self.random.sample(reached, min(1, len(reached))))
        group -= {number for number in group if self.graph.is_view(self.graph.node[number])}
        if not group:
            return
        try:
            self.graph = fuse.apply(self.graph, fuse.FuseCandidate((frozenset(group),))).graph
        except fuse.IllegalFusion:
            return
        self.steps.append(f"fuse {sorted(group)}")

    def cut(self, extent: int) -> tuple[int, ...]:
        """Random sizes that sum to `extent`."""
        points = sorted(self.random.sample(range(1, extent), self.random.randint(1, min(3, extent - 1))))
        return tuple(stop - start for start, stop in zip((0, *points), (*points, extent), strict=True))

    def take_apart(self) -> None:
        change = self.random.choice((take_apart, pack_masks, normalise))
        self.graph = change(self.graph).graph
        self.steps.append(change.__name__)

    def rewrite(self) -> None:
        """Duplicates, rules (random ones, or all), copies; in an inference weights made of weights, too."""
        allowed = frozenset({Numerics.EXACT, self.random.choice((Numerics.EXACT, Numerics.REASSOCIATES))})
        rules = tuple(self.random.sample(RULES, self.random.choice((len(RULES) // 4, len(RULES)))))
        derive = not any(node.writes for node in self.graph)
        done = rewrite(self.graph, RewriteOptions(allowed, derive=derive, rules=rules))
        self.graph = done.graph
        if done.applied:
            names = sorted({each.rule for each in done.applied})
            self.steps.append(f"{'exactly ' if len(allowed) == 1 else ''}rewrite {names}")

    def inside(self) -> None:
        """A walk of one move in the bodies of a Fission: the same in each, as all have the same nodes."""
        fissions = [node for node in self.graph if isinstance(node.op, Fission)]
        if not fissions:
            return
        node, seed = self.random.choice(fissions), self.random.random()
        assert isinstance(node.op, Fission)
        walks = [Walk(body, random.Random(seed)) for body in node.op.bodies]
        for walk in walks:
            walk.recompute()
            walk.fuse()
            walk.graph = replace(
                walk.graph, nodes=tuple(walk.graph.node[n] for n in shuffled(walk.graph, walk.random))
            )
        changed = replace(node, op=replace(node.op, bodies=tuple(walk.graph for walk in walks)))
        nodes = tuple(changed if each.id == node.id else each for each in self.graph)
        self.graph = replace(self.graph, nodes=nodes)
        self.steps.append(f"inside {node.id}: {walks[0].steps}")


def shuffled(graph: Graph, source: random.Random) -> tuple[int, ...]:
    """A random order among those that respect dependencies and the order of random draws."""
    waits = {node: set(earlier) for node, earlier in before(graph).items()}
    order: list[int] = []
    ready = [node for node, earlier in waits.items() if not earlier]
    while ready:
        node = ready.pop(source.randrange(len(ready)))
        order.append(node)
        for other, earlier in waits.items():
            if node in earlier:
                earlier.discard(node)
                if not earlier:
                    ready.append(other)
    return tuple(order)


def scattered(graph: Graph, order: tuple[int, ...], facts: Facts, source: random.Random) -> Placement:
    """Blocks in random order, each at the lowest offset that is free, or some way above it."""
    problem = placement_problem(graph, order, facts)
    blocks = source.sample(problem.blocks, len(problem.blocks))
    offsets: dict[int, int] = {}
    for block in blocks:
        busy = sorted(
            (offsets[other.id], offsets[other.id] + aligned(other.nbytes, problem.alignment))
            for other in problem.blocks
            if other.id in offsets and other.start < block.stop and block.start < other.stop
        )
        offset = 64 * source.choice((0, 0, 1, 5))
        for start, stop in busy:
            if offset + block.nbytes > start and stop > offset:
                offset = stop
        offsets[block.id] = offset
    size = max((offsets[b.id] + aligned(b.nbytes, problem.alignment) for b in problem.blocks), default=0)
    placement = Placement(offsets, size)
    assert check_placement(problem, placement) == []
    return placement


# -- walking -------------------------------------------------------------------------------------------


Placer = Callable[[Graph, tuple[int, ...], Facts, random.Random], Placement]
Prober = Callable[[Graph], FactsTree]


def walk_once(
    program: Program,
    eager: Trace,
    seed: int,
    length: int = 4,
    place: Placer = scattered,
    measure: Prober = probe_tree,
) -> None:
    walk = grown(program, seed, length)
    plan = plan_of(program, walk, place, measure)
    tolerance = 0.0 if walk.exact else tolerance_of(program)
    assert_traces(plan_trace(plan, program.workload, 1), eager, tolerance, f"seed {seed}: {walk.steps}")


def grown(program: Program, seed: int, length: int) -> Walk:
    """A random walk of at most `length` moves."""
    walk = Walk(program.graph, random.Random(seed))
    for _ in range(walk.random.randint(1, length)):
        walk.move()
    return walk


def plan_of(
    program: Program, walk: Walk, place: Placer, measure: Prober, kernels: Kernels = NO_KERNELS
) -> Plan:
    """The plan that a walk ends in, in random order, at random offsets."""
    order = shuffled(walk.graph, walk.random)
    assert check_order(walk.graph, order) == []
    facts = measure(walk.graph)
    placement = place(walk.graph, order, facts[()], walk.random)
    return build_plan(
        program, walk.graph, order, placement=placement, facts=facts, kernels=kernels, poison=True
    )
