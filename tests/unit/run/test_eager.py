"""The reference executor: the operators in order, each value dropped after its last reader."""

import pytest
import torch
from tests.unit.run import graphs

from lowtide.analysis.timeline import timeline
from lowtide.ir.graph import Graph, Node
from lowtide.ir.text import parse_graph
from lowtide.run.allocator import load_hook
from lowtide.run.eager import run_graph
from lowtide.run.events import peak_bytes, record_with_hook
from lowtide.run.operands import scalar_operand
from lowtide.run.probe import probe
from lowtide.run.store import ProfileStore


def inputs_of(graph: Graph) -> dict[int, object]:
    """Random tensors for the inputs of a hand-written graph."""
    torch.manual_seed(1)
    metas = {value: graph.values[value].meta for value in graph.inputs}
    return {
        value: scalar_operand() if meta.device == "host" else torch.rand(meta.shape)
        for value, meta in metas.items()
    }


@pytest.mark.parametrize("make", [graphs.network, graphs.random_graph, graphs.update])
def test_measured_peak_is_the_timeline(make: object) -> None:
    graph = make()  # type: ignore[operator]
    facts = probe(graph, "reference", store=ProfileStore(None))
    order = [node.id for node in graph.nodes]
    inputs = inputs_of(graph)
    hook = load_hook()
    assert hook is not None
    run_graph(graph, inputs)
    outputs, log = record_with_hook(hook, lambda: run_graph(graph, inputs))
    assert len(outputs) == len(set(graph.outputs))
    assert peak_bytes(log) == timeline(graph, order, facts).peak_above_bytes


def test_values_are_dropped_after_their_last_reader() -> None:
    graph = graphs.network()
    alive: dict[int, set[int]] = {}
    run_graph(graph, inputs_of(graph), tap=lambda node, values: alive.update({node.id: set(values)}))
    assert 4 in alive[5] and 4 not in alive[8]  # the convolution's result: read by the normalisation only
    assert 8 in alive[12] and 9 in alive[12]  # one storage, two views, still to be read by the pooling
    assert not {8, 9} & alive[14]


def test_tap_sees_operands_before_the_node_runs() -> None:
    graph = graphs.update()
    inputs = inputs_of(graph)
    weight = inputs[0].clone()  # type: ignore[attr-defined]
    seen: list[bool] = []

    def tap(node: Node, values: object) -> None:
        if node.id == 9:
            seen.append(torch.equal(values[0], weight))  # type: ignore[index]

    run_graph(graph, inputs, tap=tap)
    assert seen == [True] and not torch.equal(inputs[0], weight)  # type: ignore[arg-type]


def test_update_writes_parameter_and_state() -> None:
    graph = graphs.update()
    inputs = inputs_of(graph)
    weight, state = inputs[0].clone(), inputs[1].clone()  # type: ignore[attr-defined]
    gradient = inputs[2].t() @ inputs[3]  # type: ignore[attr-defined]
    run_graph(graph, inputs)
    expected = state.mul_(0.9).add_(gradient)
    assert torch.equal(inputs[1], expected)  # type: ignore[arg-type]
    assert torch.equal(inputs[0], weight.sub_((expected * 0.5).sqrt()))  # type: ignore[arg-type]


def test_other_orders_give_the_same() -> None:
    graph = graphs.network()
    inputs = inputs_of(graph)
    plain = run_graph(graph, inputs)
    shuffled = run_graph(graph, inputs, order=[4, 5, 8, 12, 14, 9, 10, 11])
    assert all(torch.equal(plain[value], shuffled[value]) for value in plain)


SWAPPED = """\
input %0: f32[4]
%1: f32[4] = store("disk", %0)
%2: f32[4] = load("disk", %1)
return %2
"""


def test_what_is_stored_is_loaded_again() -> None:
    graph = parse_graph(SWAPPED)
    x = torch.arange(4.0)
    found = run_graph(graph, {0: x})[2]
    assert torch.equal(found, x)
    assert found.data_ptr() != x.data_ptr()
