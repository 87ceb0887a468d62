"""Files of training graphs: what is written is what was judged, and the same step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.training_graphs.axes import SUM, Uncuttable, batch_of, cut_along
from bench.training_graphs.baselines import BASELINES
from bench.training_graphs.equality import largest_difference
from bench.training_graphs.files import FORMAT, graph_of, read, record_of, write
from bench.training_graphs.flatten import flatten, rebuild
from bench.training_graphs.model import Graph
from bench.training_graphs.nested import places
from bench.training_graphs.optimise import Goal, optimise
from bench.training_graphs.order import late_nodes
from bench.training_graphs.split import split_batch
from bench.training_graphs.structure import Structure, build, choice
from tests.unit.training_graphs.accounting import account
from tests.unit.training_graphs.small import BATCH, HW, small_graph

from lowtide.search.residence import KEEP, REMAT, SWAP, evaluate
from lowtide.search.residence_search import Limit, anneal

PLAIN = Structure(fold=False, merge=False)


def file_record(graph: Graph) -> dict[str, Any]:
    base = record_of(graph, HW)
    latency, peak = account(base)
    sim = {"latency_ms": latency, "peak_bytes": peak}
    return {
        "format": FORMAT,
        "workload": "small",
        "hw": HW,
        "dtype_bytes": 4,
        "base": {**base, "sim": sim},
        "best": None,
    }


def regions(graph: Graph) -> list[Structure]:
    """Splits with and without a region inside."""
    built, late = build(graph, Structure(), HW)
    at = places(built, late)[-1]
    return [
        Structure(),
        Structure(4),
        Structure(2, ((at, 2),)),
        Structure(1, ((at, 4),)),
        PLAIN,
        Structure(2, waves=True, fuse=True),
    ]


def test_a_written_file_is_read_as_the_same_graph(tmp_path: Path) -> None:
    record = file_record(split_batch(small_graph(), 2))
    write(tmp_path / "small.json", record)
    again = record_of(graph_of(read(tmp_path / "small.json")["base"]), HW)
    assert json.dumps(again) == json.dumps({k: v for k, v in record["base"].items() if k != "sim"})


def test_another_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other.json", {"format": "other"})
    with pytest.raises(ValueError, match="other"):
        read(tmp_path / "other.json")


@pytest.mark.parametrize("number", range(6))
def test_decisions_cost_what_the_accounting_says_of_the_rebuilt_graph(number: int) -> None:
    graph = small_graph()
    built, late = build(graph, regions(graph)[number], HW)
    flat = flatten(built, late, HW)
    random = np.random.default_rng(number)
    swapped = 0
    for _ in range(25):
        mode = flat.default.copy()
        pick = random.random(mode.size)
        mode[(pick < 0.4) & (flat.can_swap == 1)] = SWAP
        mode[(pick > 0.6) & (flat.can_remat == 1)] = REMAT
        outcome = evaluate(flat.program, mode)
        swapped += outcome.swapped.size
        latency, peak = account(record_of(rebuild(flat, outcome, late), HW))
        assert outcome.latency_s == pytest.approx(latency, rel=1e-12)
        assert outcome.peak_bytes == peak
    assert swapped > 0


@pytest.mark.parametrize("number", range(6))
def test_every_structure_updates_the_weights_as_the_base_does(number: int) -> None:
    graph = small_graph()
    built, late = build(graph, regions(graph)[number], HW)
    flat = flatten(built, late, HW)
    mode = np.where(flat.can_swap == 1, SWAP, np.where(flat.can_remat == 1, REMAT, KEEP))
    best = rebuild(flat, evaluate(flat.program, mode), late)
    assert any(node.op == "load" for node in _all(best))
    assert largest_difference(graph, best) < 1e-12


def _all(graph: Graph) -> list[Any]:
    inside = [each for node in graph.nodes if node.split for each in _all(node.split.body)]
    return [*graph.nodes, *inside]


def test_a_wrong_graph_is_told_apart() -> None:
    graph = small_graph()
    wrong = Graph(tuple(replace(n, attrs={"const": 3.0}) if n.op.endswith("div") else n for n in graph.nodes))
    assert largest_difference(graph, wrong) > 1e-3


def test_rewrites_fire_and_pay() -> None:
    graph = small_graph()
    merged, _ = build(graph, Structure(), HW)
    divisions = [node for node in merged.nodes if node.op.endswith("div")]
    assert {len(node.shape) for node in divisions} == {3}, "only weights are divided"
    assert (
        sum(node.op == "flex_matmul" for node in merged.nodes)
        == sum(node.op == "flex_matmul" for node in graph.nodes) - 4
    )


def test_masks_wait_for_the_backward() -> None:
    plain, late = build(small_graph(), PLAIN, HW)
    order = [node.op for node in plain.nodes]
    assert order.index("ewise.uni.const.gt") > order.index("ewise.uni.const.pow")
    assert next(n.id for n in plain.nodes if n.op == "ewise.uni.const.gt") in late


def test_the_batch_is_followed_to_sums() -> None:
    graph = small_graph()
    cut = cut_along(graph, batch_of(graph))
    updates = [node for node in graph.nodes if node.kind == "inplace"]
    assert all(cut[node.inputs[1]] == SUM and cut[node.inputs[0]] is None for node in updates)


def test_parts_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(Uncuttable):
        split_batch(small_graph(), BATCH - 1)


def test_annealing_keeps_the_limit_and_repeats_itself() -> None:
    built, late = build(small_graph(), Structure(2), HW)
    flat = flatten(built, late, HW)
    start = evaluate(flat.program, flat.default)
    limit = Limit(start.latency_s * 1.05, 0, True)
    runs = [anneal(flat.program, choice(flat), flat.default, limit, states=2048, seed=3) for _ in range(2)]
    assert runs[0].feasible and runs[0].peak_bytes < start.peak_bytes
    assert np.array_equal(runs[0].mode, runs[1].mode) and runs[0].states == 2048
    again = evaluate(flat.program, runs[0].mode)
    assert (again.peak_bytes, again.latency_s) == (runs[0].peak_bytes, runs[0].latency_s)


def test_the_search_beats_the_baselines_and_writes_the_same_step() -> None:
    graph = small_graph()
    record = file_record(graph)
    sim = record["base"]["sim"]
    rows = [run(record) for name, run in BASELINES.items() if name not in ("n=16", "n=32")]
    best = optimise(graph, HW, Goal(sim["latency_ms"], sim["peak_bytes"], latency=1.3), seconds=0.5)
    latency, peak = account(record_of(best.graph, HW))
    assert (latency, peak) == (pytest.approx(best.latency_ms), best.peak_bytes)
    assert latency <= 1.3 * sim["latency_ms"]
    assert peak / sim["peak_bytes"] < min(p for time, p in rows if time <= 1.3)
    assert largest_difference(graph, best.graph) < 1e-12
    assert sorted(n.inputs[0] for n in best.graph.nodes if n.kind == "inplace") == sorted(
        n.inputs[0] for n in graph.nodes if n.kind == "inplace"
    )


def test_an_update_stays_behind_all_readers_of_its_weight() -> None:
    for structure in regions(small_graph()):
        built, _ = build(small_graph(), structure, HW)
        at = {node.id: k for k, node in enumerate(built.nodes)}
        for node in built.nodes:
            if node.kind == "inplace":
                readers = [at[reader] for reader in built.readers[node.inputs[0]] if reader != node.id]
                assert not readers or max(readers) < at[node.id]


def test_late_is_what_no_result_needs() -> None:
    graph = small_graph()
    late = late_nodes(graph)
    power = next(node.id for node in graph.nodes if node.op == "ewise.uni.const.pow")
    assert power not in late
    assert all(node.id in late for node in graph.nodes if node.kind == "inplace")
