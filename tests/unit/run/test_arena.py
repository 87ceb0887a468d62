"""The arena executor computes what the reference executor computes, out of one block of memory."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.run import graphs
from tests.unit.run.test_eager import inputs_of

from lowtide.ir.graph import Graph
from lowtide.ir.text import parse_graph
from lowtide.run.allocator import Hook, load_hook
from lowtide.run.arena import ArenaExecutor
from lowtide.run.eager import run_graph
from lowtide.run.events import blocks_of, record_with_profiler
from lowtide.run.layout import lay_out
from lowtide.run.probe import probe_tree
from lowtide.run.store import ProfileStore

STORE = ProfileStore(None)
Make = Callable[[], Graph]


def executor(
    graph: Graph, hook: Hook | None = None, poison: bool = False, order: Any = None
) -> ArenaExecutor:
    steps = order or [node.id for node in graph.nodes]
    tree = probe_tree(graph, "arena", store=STORE)
    return ArenaExecutor(graph, steps, tree, lay_out(graph, steps, tree[()]), hook, poison)


def split(inputs: dict[int, Any]) -> tuple[dict[int, torch.Tensor], dict[int, float]]:
    numbers = {value: x for value, x in inputs.items() if isinstance(x, float)}
    return {value: x for value, x in inputs.items() if value not in numbers}, numbers


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("make", [graphs.network, graphs.random_graph, graphs.update])
def test_equals_the_reference_executor(make: Make, hooked: bool, poison: bool) -> None:
    graph = make()
    runner = executor(graph, load_hook() if hooked else None, poison)
    expected_inputs, inputs = inputs_of(graph), inputs_of(graph)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = run_graph(graph, expected_inputs)
        torch.manual_seed(seed)
        found = runner.run(*split(inputs))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[value], expected[value]) for value in found)
    residents = split(inputs)[0]
    assert all(torch.equal(tensor, expected_inputs[value]) for value, tensor in residents.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [graphs.network, graphs.random_graph, graphs.update])
def test_steady_state_allocates_results_only(make: Make) -> None:
    graph = make()
    runner = executor(graph, load_hook())
    inputs = split(inputs_of(graph))
    runner.run(*inputs)
    _, log = record_with_profiler(lambda: runner.run(*inputs))
    outputs = sorted(graph.storage_of(value).nbytes for value in graph.outputs)
    assert sorted(block.nbytes for block in blocks_of(log)) == outputs
    assert runner.table_counts[1:] == (0, 0)


def test_results_do_not_view_the_arena_and_stay() -> None:
    graph = graphs.network()
    runner = executor(graph, load_hook())
    inputs = split(inputs_of(graph))
    first = runner.run(*inputs)
    copies = {value: tensor.clone() for value, tensor in first.items()}
    inputs[0][0] = torch.rand_like(inputs[0][0])
    second = runner.run(*inputs)
    assert all(torch.equal(first[value], copies[value]) for value in first)
    assert not torch.equal(first[14], second[14])
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in first.values())
    (first[14] * torch.ones((), requires_grad=True)).backward()  # an ordinary tensor to autograd


def test_arguments_are_not_kept() -> None:
    graph = graphs.network()
    runner = executor(graph, load_hook())
    residents, numbers = split(inputs_of(graph))
    runner.run(residents, numbers)
    argument = weakref.ref(residents.pop(0))
    gc.collect()
    assert argument() is None


def test_moved_parameter_is_followed() -> None:
    graph = graphs.network()
    runner = executor(graph, load_hook())
    residents, numbers = split(inputs_of(graph))
    runner.run(residents, numbers)
    residents[1].data = torch.rand_like(residents[1])
    found = runner.run(residents, numbers)
    expected = run_graph(graph, residents)
    assert torch.equal(found[14], expected[14])


def test_view_of_an_argument_and_argument_as_result() -> None:
    graph = parse_graph(
        "input %0: f32[4,6]\n%1: f32[6,4](1,6) @s0 = aten.t.default(%0)\n"
        "%2: f32[6,4](1,6) = aten.neg.default(%1)\nreturn %2, %1, %0\n"
    )
    runner = executor(graph, load_hook())
    for _ in range(2):
        x = torch.rand(4, 6)
        found = runner.run({0: x}, {})
        assert torch.equal(found[2], -x.t()) and found[2].stride() == (1, 6)
        assert found[0] is x and found[1].data_ptr() == x.data_ptr()
        assert torch.equal(found[1], x.t())


def test_results_that_share_a_storage() -> None:
    graph = parse_graph(
        "input %0: f32[4,6]\n%1: f32[4,6] = aten.exp.default(%0)\n"
        "%2: f32[6,4](1,6) @s1 = aten.t.default(%1)\n%3: f32[6] @s1+6 = aten.select.int(%1, 0, 1)\n"
        "return %2, %3\n"
    )
    x = torch.rand(4, 6)
    found = executor(graph, load_hook()).run({0: x}, {})
    assert torch.equal(found[2], x.exp().t()) and torch.equal(found[3], x.exp()[1])
    assert found[2].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr()


def test_error_names_node_module_and_line() -> None:
    graph = parse_graph(
        "input %0: f32[7,4] param\ninput %1: i64[3]\n"
        "%2: f32[3,4] = aten.embedding.default(%0, %1)  # tokens gpt.py:12\nreturn %2\n"
    )
    runner = executor(graph, load_hook())
    weight = torch.rand(7, 4)
    with pytest.raises(IndexError) as caught:
        runner.run({0: weight, 1: torch.tensor([0, 1, 99])}, {})
    note = "in step 1 of 1: node 2 (aten.embedding.default) of tokens, at gpt.py:12"
    assert any(text.startswith(note) for text in caught.value.__notes__)
    found = runner.run({0: weight, 1: torch.tensor([0, 1, 6])}, {})  # and the next call is not disturbed
    assert torch.equal(found[2], weight[[0, 1, 6]])
    assert gc.isenabled()


def test_taps_look_at_operands_before_their_node() -> None:
    graph = graphs.update()
    runner = executor(graph, load_hook())
    inputs = inputs_of(graph)
    seen: list[torch.Tensor] = []
    runner.run(*split(inputs), taps={9: lambda: seen.append(runner.peek(6).clone())})
    assert torch.equal(seen[0], inputs[2].t() @ inputs[3])  # type: ignore[attr-defined]


def test_surrounding_autocast_changes_nothing() -> None:
    graph = graphs.update()
    runner, inputs = executor(graph, load_hook()), inputs_of(graph)
    expected = run_graph(graph, inputs_of(graph))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = runner.run(*split(inputs))
    assert torch.equal(found[8], expected[8])


def test_random_state_ends_as_the_reference_executors() -> None:
    graph = graphs.random_graph()
    inputs = inputs_of(graph)
    torch.manual_seed(3)
    run_graph(graph, inputs)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    executor(graph, load_hook()).run(*split(inputs))
    assert torch.equal(torch.get_rng_state(), expected)


def test_arena_goes_with_its_executor() -> None:
    hook = load_hook()
    assert hook is not None
    graph = graphs.network()
    gc.collect()
    before = hook.arena_count()
    runner = executor(graph, hook)
    assert hook.arena_count() == before  # nothing before the first call
    runner.run(*split(inputs_of(graph)))
    assert hook.arena_count() == before + 1
    runner.release()
    gc.collect()
    assert hook.arena_count() == before
    runner.run(*split(inputs_of(graph)))
    assert hook.arena_count() == before + 1
    del runner
    gc.collect()
    assert hook.arena_count() == before


def test_inplace_reuse_is_real() -> None:
    graph = parse_graph(
        "input %0: f32[1024]\n%1: f32[1024] = aten.exp.default(%0)\n%2: f32[1024] = aten.sin.default(%1)\n"
        "%3: f32[1024] = aten.relu.default(%2)\n%4: f32[] = aten.sum.default(%3)\nreturn %4\n"
    )
    runner = executor(graph, load_hook(), poison=True)
    assert runner.layout.nbytes < 2 * 4096
    x = torch.rand(1024)
    assert torch.equal(runner.run({0: x}, {})[4], x.exp().sin().relu().sum())


def test_operation_without_a_lowering_is_refused_by_name() -> None:
    text = 'input %0: f32[4]\n%1: f32[4] = store("disk", %0)\n%2: f32[4] = load("disk", %1)\nreturn %2\n'
    graph = parse_graph(text)
    with pytest.raises(NotImplementedError, match=r"node 1 \(Store\)"):
        executor(graph, load_hook()).run({0: torch.zeros(4)}, {})
