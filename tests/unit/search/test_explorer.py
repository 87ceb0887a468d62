"""The search on a hand-made graph: bases, targets, interruption, and the record."""

from __future__ import annotations

from tests.unit.search.test_mirror import big_chain

from lowtide.cost.devices import device_named
from lowtide.search.bases import open_base, realise_base
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Explorer, Goal

UNIT = 64 * 64 * 4


def explorer(target: int | None, limit: int = 10**9) -> Explorer:
    calls = iter(range(10**9))
    return Explorer(
        big_chain(24),
        Estimator(device_named("cpu")),
        Goal(target),
        4 * UNIT,
        0,
        lambda: next(calls) > limit,
        lambda states, best: None,
        rounds=0,
    )


def test_a_target_is_met_at_the_least_time() -> None:
    search = explorer(10 * UNIT, limit=3000)
    search.run()
    best = search.best()
    assert best is not None
    assert best.point.peak_bytes <= 10 * UNIT
    others = [s for s in search.spots() if s.point.peak_bytes <= 10 * UNIT]
    assert best.point.latency_s == min(spot.point.latency_s for spot in others)


def test_the_frontier_has_no_dominated_point() -> None:
    search = explorer(None)
    search.run()
    spots = search.spots()
    assert len(spots) > 5
    assert [s.point.peak_bytes for s in spots] == sorted((s.point.peak_bytes for s in spots), reverse=True)
    assert [s.point.latency_s for s in spots] == sorted(s.point.latency_s for s in spots)
    assert search.stop_reason == "frontier traced"


def test_a_realised_point_is_no_worse_than_predicted() -> None:
    search = explorer(None)
    search.run()
    for spot in search.spots()[::4]:
        made = realise_base(spot.base, spot.point, search.estimator)
        assert made.timeline.peak_above_bytes <= spot.point.peak_bytes


def test_the_record_only_gets_better() -> None:
    search = explorer(8 * UNIT)
    search.halted = lambda: search.states > 4000
    search.run()
    within = [i.latency_s for i in search.record if i.peak_bytes <= 8 * UNIT]
    assert within == sorted(within, reverse=True)
    assert search.stop_reason == "time"


def test_a_base_knows_whose_workspace_is_in_the_way() -> None:
    base = open_base("whole", big_chain(12), (), Estimator(device_named("cpu")), 0)
    assert base is not None
    mirror = base.level.search.mirror
    peak = base.level.search.points[0].peak_bytes
    assert base.crowded(peak) == []  # nobody has any: a split would save nothing
    mirror.workspace[5] = peak
    assert base.crowded(peak) == [mirror.node_ids[5]]
