"""Capture as a whole: repeatable, indifferent to its surroundings, without data, quick, leaving no trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.capture.internals import FakeTensorMode
from lowtide.ir.text import parse_graph, print_graph
from lowtide.ir.verify import verify
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload


@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2"])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_two_captures_are_equal_and_survive_the_printed_form(name: str, mode: str) -> None:
    w = load_workload(f"{TINY[name]},mode={mode}")
    first, second = capture(w), capture(w)
    assert first.graph == second.graph and first.names == second.names
    assert parse_graph(print_graph(first.graph)) == first.graph


@pytest.mark.parametrize(
    "surroundings",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        FakeTensorMode,
    ],
)
def test_surroundings_do_not_leak_in(surroundings: Callable[[], AbstractContextManager[object]]) -> None:
    w = load_workload(TINY["unet"])
    plain = capture(w)
    with surroundings():
        inside = capture(w)
    assert [node.op for node in inside.graph] == [node.op for node in plain.graph]
    assert inside.graph.storages == plain.graph.storages


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_model_without_data(mode: str) -> None:
    """Built under fake tensors, as for a device that is not here, it gives the graph that real data gives."""
    real = capture(load_workload(f"{TINY['gpt2']},mode={mode}"))
    with FakeTensorMode():
        fake = capture(load_workload(f"{TINY['gpt2']},mode={mode}"))
    assert fake.graph == real.graph
    verify(fake.graph)


def test_a_model_far_larger_than_this_machine() -> None:
    with FakeTensorMode():
        program = capture(load_workload("gpt2:layers=4,dim=16384,heads=16,seq=128,batch=1"))
    assert program.graph.resident_bytes > 100 << 30


def test_a_recurrent_layer_keeps_its_own_parameters() -> None:
    """`nn.LSTM` notes which tensors it saw last; after capture these are its own again."""
    model = nn.LSTM(4, 4)
    before = [id(weight) for weight in model._flat_weights]
    capture(Workload(model, (torch.ones(2, 1, 4),)))
    assert [id(weight) for weight in model._flat_weights] == before
    assert all(type(weight) is nn.Parameter for weight in model._flat_weights)


def test_capture_is_quick() -> None:
    w = load_workload("gpt2:layers=4,dim=64,heads=4,seq=64,batch=2,vocab=128")
    start = time.process_time()
    capture(w)
    assert time.process_time() - start < 10
