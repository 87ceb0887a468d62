"""The kernel's count of a step in a fresh process: of the allocator's order, eager beside plan."""

import sys

import pytest

from lowtide.capture import capture
from lowtide.run.measure import measure_eager
from lowtide.run.plan import build_plan
from lowtide.search.fresh import run_fresh
from lowtide.workloads import load_workload

SPEC = "mlp:batch=8192,dim=128,layers=4"
SLACK = 8 << 20  # code that is loaded late, the kernel's batching


@pytest.mark.parametrize("planned", [False, True])
def test_resident_size_follows_the_allocators_peak(planned: bool) -> None:
    workload = load_workload(SPEC)
    plan = build_plan(capture(workload)) if planned else None
    expected = plan.arena_bytes if plan else measure_eager(workload, seconds=0.0).above_bytes
    found = run_fresh(SPEC, plan, seconds=0.0)
    assert found is not None and found.rss_peak_bytes is not None
    assert 0.8 * expected < found.rss_peak_bytes < expected + SLACK
    assert found.latency_s > 0 and found.runs == 1


def test_process_that_fails_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run_fresh(SPEC) is None
