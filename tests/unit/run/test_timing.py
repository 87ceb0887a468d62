"""Seconds per node: every node that works has some, equal nodes the same, and nothing is disturbed."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tests.unit.run import graphs

from lowtide.ir.text import parse_graph
from lowtide.run import timing
from lowtide.run.store import ProfileStore
from lowtide.run.timing import SMALL_BYTES, alone, time_nodes


def test_nodes_take_time_and_views_do_not() -> None:
    graph = graphs.network()
    before = torch.get_rng_state()
    found = time_nodes(graph, store=ProfileStore(None))
    assert found.keys() == {node.id for node in graph.nodes}
    assert found[9] == 0.0 and all(found[node] > 0.0 for node in found if node != 9)
    assert torch.equal(torch.get_rng_state(), before)


def test_updates_and_draws_are_timed() -> None:
    for graph in (graphs.update(), graphs.random_graph()):
        found = time_nodes(graph, store=ProfileStore(None))
        assert all(found[node.id] > 0.0 for node in graph.nodes if not graph.is_view(node))


def test_bigger_takes_longer_and_is_remembered() -> None:
    graph = parse_graph(
        "input %0: f32[8,8]\ninput %1: f32[512,512]\n"
        "%2: f32[8,8] = aten.mm.default(%0, %0)\n%3: f32[512,512] = aten.mm.default(%1, %1)\nreturn %2, %3\n"
    )
    store = ProfileStore(None)
    found = time_nodes(graph, store=store)
    assert found[3] > 3 * found[2]
    assert time_nodes(graph, seconds=0.0, store=store) == found


def test_node_alone_has_the_callers_inputs() -> None:
    graph = graphs.network()
    single = alone(graph, graph.node[12])
    assert single.inputs == (8,) and single.outputs == () and len(single) == 1
    assert single.storage_of(8).role.resident and not single.storage_of(12).role.resident


@dataclass
class Cached:
    """Stands for an executor whose operands are found in a cache unless somebody swept it."""

    timer: timing._Timer
    seen: list[int] = field(default_factory=list)

    def time_runs(self, tensors: object, scalars: object, count: int) -> list[float]:
        sweeps = int(self.timer.sweep[0])
        warm = bool(self.seen) and self.seen[-1] == sweeps
        self.seen.append(sweeps)
        return [1e-5 if warm else 3e-5] * count


def timer_of(store: ProfileStore) -> timing._Timer:
    return timing._Timer(store, None, float("inf"), {}, None)


def test_warm_runs_follow_each_other_and_cold_ones_a_sweep() -> None:
    timer = timer_of(ProfileStore(None))
    cached = Cached(timer)
    assert timer._least(cached, {}, {})[0] == 1e-5  # type: ignore[arg-type]
    assert timer._cold(cached, {}, {})[0] == 3e-5  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [16, 1024])
def test_large_operands_are_half_cold(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph(f"input %0: f32[{rows},256]\n%1: f32[{rows},256] = aten.exp.default(%0)\nreturn %1\n")
    monkeypatch.setattr(timing._Timer, "_least", lambda *_: (2.0, True))
    monkeypatch.setattr(timing._Timer, "_cold", lambda *_: (5.0, True))
    large = 2 * rows * 256 * 4 > SMALL_BYTES
    assert time_nodes(graph, store=ProfileStore(None))[1] == (3.5 if large else 2.0)


def test_interrupted_runs_count_only_where_there_is_no_other() -> None:
    runs = [timing._Run(1e-3, 1), timing._Run(2e-3, 0), timing._Run(0.1, 4)]
    assert timing._left_alone(runs) == ([runs[1], runs[2]], True)
    assert timing._left_alone(runs[:1]) == (runs[:1], False)


@pytest.mark.parametrize("disturbed", [False, True])
def test_what_was_measured_beside_others_is_not_kept(
    disturbed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = parse_graph("input %0: f32[8,8]\n%1: f32[8,8] = aten.mm.default(%0, %0)\nreturn %1\n")
    switches = iter(range(10**6)) if disturbed else iter([0] * 10**4)
    monkeypatch.setattr(timing, "_interruptions", lambda: next(switches))
    monkeypatch.setattr(timing, "_is_overloaded", lambda: False)
    first = time_nodes(graph, store=ProfileStore(tmp_path / "p.sqlite"))
    monkeypatch.setattr(timing._Timer, "_measure", lambda *_: (7.0, True))
    again = time_nodes(graph, store=ProfileStore(tmp_path / "p.sqlite"))
    assert again == ({1: 7.0} if disturbed else first)
