"""Regions with menus, and recomputation around and inside them, judged together and built as judged."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.unit.search.test_mirror import big_chain
from torch import Tensor, nn

from lowtide.analysis.facts import assumed_facts
from lowtide.analysis.timeline import timeline
from lowtide.capture import Program, capture
from lowtide.cost.devices import device_named
from lowtide.ir import Fission
from lowtide.run.plan import build_plan
from lowtide.run.verify import verify
from lowtide.schedule.judge import check_order
from lowtide.search.bases import Base, choices_of, open_base, realise_base
from lowtide.search.calibration import Correction
from lowtide.search.copies import copies_of
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Spot
from lowtide.search.levels import _updates_early
from lowtide.search.moves import count_moves
from lowtide.search.splits import inner_splits, large_split
from lowtide.transforms.remat import late_nodes, recomputable
from lowtide.workload import Workload

CPU = Estimator(device_named("cpu"))


class Model(nn.Module):
    """Equal layers and a head that is much wider than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 1024)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.head(x)


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.randint(1024, (64,))
    loss = nn.functional.cross_entropy
    return capture(Workload(model, (torch.randn(64, 32),), targets=(target,), loss=loss, optimizer=optimizer))


def traced(program: Program, inner: bool) -> Base:
    splits = inner_splits(program.graph, CPU)[:1] if inner else (large_split(program.graph, CPU),)
    base = open_base("base", program.graph, [each for each in splits if each is not None], CPU, 0)
    assert base is not None
    base.sweep(1, lambda: False)
    return base


@pytest.mark.parametrize("inner", [True, False])
def test_points_are_built_as_they_were_judged(program: Program, inner: bool) -> None:
    base = traced(program, inner)
    assert len(base.level.regions) == 1
    parts = set()
    for point in base.points():
        made = realise_base(base, point, CPU)
        assert made.timeline.peak_above_bytes <= point.peak_bytes
        assert check_order(made.graph, made.order) == []
        assert made.latency_s == pytest.approx(point.latency_s, rel=0.02)
        regions = [node.op for node in made.graph.nodes if isinstance(node.op, Fission)]
        assert [len(op.parts) for op in regions] == [len(c.variant.op.parts) for c in point.options]
        parts.add(len(regions[0].parts))
    assert len(parts) > 1  # how finely is decided per point, on one menu


def test_the_head_is_the_inner_region_with_the_heat(program: Program) -> None:
    (split, *_) = inner_splits(program.graph, CPU)
    modules = {
        program.graph.node[n].origin.module for n in split.candidates[0].axes if n in program.graph.node
    }
    assert "head" in modules
    assert not any(module.startswith("layers.0") for module in modules)


def test_splits_and_recomputation_in_one_state_give_eagers_numbers(program: Program) -> None:
    """Of the points that split and recompute, the one that does most of both."""
    bases = [traced(program, True), traced(program, False)]
    spots = [Spot(base, point) for base in bases for point in base.points()]
    both = [spot for spot in spots if {"fission", "remat"} <= count_moves(spot, {}).keys()]
    spot = max(both, key=lambda s: sum(count_moves(s, {}).values()))
    assert any(spot.point.chosen or choice.point.chosen for choice in choices_of(spot.point))
    made = realise_base(spot.base, spot.point, CPU)
    verdict = verify(program, build_plan(program, made.graph, made.order))
    assert verdict.passed and not verdict.bit_equal  # sums over parts are re-associated


def test_updates_run_as_soon_as_they_can(program: Program) -> None:
    graph = program.graph
    order = [node.id for node in graph.nodes]
    early = _updates_early(graph, order)
    assert check_order(graph, early) == []
    facts = assumed_facts(graph)
    updates = [node.id for node in graph.nodes if node.origin.phase == "update"]

    def longest_wait(places: Sequence[int]) -> int:
        place = {number: k for k, number in enumerate(places)}
        return max(place[node] - max(place[each] for each in graph.dependencies[node]) for node in updates)

    assert longest_wait(early) <= 4  # weight and bias wait for one another
    assert longest_wait(order) > 20
    assert timeline(graph, early, facts).peak_above_bytes <= timeline(graph, order, facts).peak_above_bytes


def test_equal_layers_are_copies(program: Program) -> None:
    graph = program.graph
    allowed = recomputable(graph, late_nodes(graph))
    groups = copies_of(graph, allowed)
    assert [len(group) for group in groups] and all(len(group) in (3, 4) for group in groups)
    assert copies_of(big_chain(12), recomputable(big_chain(12), late_nodes(big_chain(12)))) == ()


def test_times_are_corrected_by_what_ran(program: Program) -> None:
    one, other = traced(program, True), traced(program, False)
    correction = Correction()
    first, second = Spot(one, one.points()[0]), Spot(other, other.points()[0])
    assert correction.seconds(first) == first.point.latency_s
    correction.learn(first, 2 * first.point.latency_s)
    assert correction.factor(first) == pytest.approx(2.0)
    assert correction.factor(second) == pytest.approx(2.0**0.5)
    correction.learn(second, second.point.latency_s)
    assert correction.factor(first) == pytest.approx(2.0)
    assert correction.factor(second) == pytest.approx(1.0)


def test_who_is_alive_at_the_crest(program: Program) -> None:
    """Against the timeline of the same order."""
    base = open_base("whole", program.graph, (), CPU, 0)
    assert base is not None
    search, graph = base.level.search, base.level.graph
    (crest, *_) = search.crests(search.nothing(), share=1.0)
    curve = timeline(graph, [node.id for node in graph.nodes], CPU.facts(graph), inplace=True)
    held = [buffer.storages for buffer in curve.alive(curve.peak_step) if buffer.kind != "workspace"]
    assert len(held) > 5
    assert all(crest.intersection(storages) for storages in held)  # what was reused in place is gone
