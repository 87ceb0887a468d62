"""A split program's peak is predicted to the byte, by the plain executor's facts and by a plan."""

from __future__ import annotations

import pytest

from lowtide.analysis.timeline import timeline
from lowtide.capture import Program, capture
from lowtide.ir import Graph
from lowtide.run.allocator import load_hook
from lowtide.run.eager import run_graph
from lowtide.run.events import peak_bytes, record_with_hook
from lowtide.run.measure import measure_plan
from lowtide.run.plan import build_plan
from lowtide.run.probe import probe
from lowtide.transforms import fission
from lowtide.workload import Workload
from lowtide.workloads import load_workload

SPLIT = {
    "mlp": "mlp:batch=32,dim=16,layers=2",
    "gpt2": "gpt2:layers=2,dim=16,heads=2,seq=16,batch=4,vocab=32,dropout=0.1",
    "unet": "unet:batch=4,size=16,width=4,depth=2",
}


def split(name: str, count: int) -> tuple[Workload, Program, Graph]:
    workload = load_workload(SPLIT[name])
    program = capture(workload)
    candidate = next(each for each in fission.candidates(program.graph, (count,)) if each.label == "batch")
    return workload, program, fission.apply(program.graph, candidate).graph


@pytest.mark.parametrize(("name", "count"), [("mlp", 4), ("gpt2", 2), ("unet", 3)])
def test_the_plain_executor(name: str, count: int) -> None:
    workload, program, graph = split(name, count)
    predicted = timeline(graph, [node.id for node in graph.nodes], probe(graph, "reference"))
    inputs = {**program.bind(workload.args, workload.kwargs, workload.targets), **program.scalars()}
    run_graph(graph, inputs)
    hook = load_hook()
    assert hook is not None
    _, log = record_with_hook(hook, lambda: run_graph(graph, inputs))
    assert peak_bytes(log) == predicted.peak_above_bytes


@pytest.mark.parametrize(("name", "count"), [("mlp", 4), ("gpt2", 2), ("unet", 3)])
def test_a_plan(name: str, count: int) -> None:
    workload, program, graph = split(name, count)
    plan = build_plan(program, graph)
    measured = measure_plan(plan, workload, seconds=0.0)
    assert measured.peak_bytes == plan.predicted_peak_bytes
    counts = plan.count_allocations(*workload.args, *workload.targets, **workload.kwargs)
    assert (counts.missed, counts.missed_bytes) == (0, 0)


def test_more_parts_take_less() -> None:
    sizes = []
    for count in (1, 2, 4):
        _, program, graph = split("gpt2", max(count, 2))
        sizes.append(build_plan(program, program.graph if count == 1 else graph).arena_bytes)
    assert sizes[0] > sizes[1] > sizes[2]
