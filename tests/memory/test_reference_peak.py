"""The predicted peak in program order is what the reference executor measures, to the byte."""

import pytest

from lowtide.analysis.timeline import timeline
from lowtide.capture import capture
from lowtide.run.allocator import load_hook
from lowtide.run.eager import run_graph
from lowtide.run.events import peak_bytes, record_with_hook, record_with_profiler
from lowtide.run.native import resident_bytes
from lowtide.run.probe import probe
from lowtide.workloads import TINY, load_workload


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2"])
def test_timeline_is_what_is_measured(name: str, mode: str) -> None:
    workload = load_workload(f"{TINY[name]},mode={mode}")
    program = capture(workload)
    predicted = timeline(
        program.graph, [node.id for node in program.graph.nodes], probe(program.graph, "reference")
    )
    inputs = {**program.bind(workload.args, workload.kwargs, workload.targets), **program.scalars()}

    def step() -> object:
        return run_graph(program.graph, inputs)

    step()
    hook = load_hook()
    assert hook is not None
    _, by_hook = record_with_hook(hook, step)
    _, by_profiler = record_with_profiler(step)
    assert peak_bytes(by_hook) == predicted.peak_above_bytes
    assert peak_bytes(by_profiler) == predicted.peak_above_bytes
    assert program.graph.resident_bytes == resident_bytes(workload)
