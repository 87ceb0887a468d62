"""Captured inferences return what eager returns: the bits, the Python types, the aliases."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from tests.unit.capture.interpreter import run
from tests.unit.capture.same import assert_bits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lowtide.capture import Program, capture
from lowtide.capture.assemble import assemble
from lowtide.capture.inference import record_exported, record_inference
from lowtide.capture.trace import Trace
from lowtide.ir.graph import Role
from lowtide.ir.ops import Op
from lowtide.ir.verify import verify
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload


def assert_same_result(model: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> tuple[Program, Any]:
    kwargs = kwargs or {}
    twin = copy.deepcopy(model)
    program = capture(Workload(model, args, kwargs))
    verify(program.graph)
    torch.manual_seed(2)
    ours, _ = run(program, args, kwargs)
    torch.manual_seed(2)
    with torch.no_grad():
        theirs = twin(*args, **kwargs)
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if isinstance(other, Tensor):
            assert_bits("output", one, other)
            assert one.stride() == other.stride()
        else:
            assert one == other and type(one) is type(other)
    for name, tensor in twin.state_dict().items():
        assert_bits(name, model.state_dict()[name], tensor)
    return program, ours


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Everything(nn.Module):
    """Views of inputs, of intermediates and of each other, in every container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        y = self.layer(x) * scale
        self.count.add_(1)
        halves = y.chunk(2, dim=1)
        return {
            "whole": y,
            "halves": halves,
            "row": y[0],
            "input": x,
            "of_input": x.t(),
            "weight": self.layer.weight[1:],
            "table": self.table,
            "pair": Pair(halves[0], [None, "text", 3, scale, mask]),
            "ordered": OrderedDict(a=y.sum(), b=y),
            "count": self.count,
        }


def test_every_kind_of_result() -> None:
    x = torch.randn(3, 4)
    program, result = assert_same_result(Everything(), (x,), {"scale": 2.0})
    assert result["input"] is x
    assert result["row"].untyped_storage().data_ptr() == result["whole"].untyped_storage().data_ptr()
    assert result["ordered"]["b"] is result["whole"]
    assert isinstance(result["pair"], Pair)
    roles = {program.graph.storage_of(value).role for value in program.graph.outputs}
    assert roles == {Role.OUTPUT, Role.INPUT, Role.PARAM, Role.CONST, Role.BUFFER}


def test_model_outputs_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    w = load_workload("bert-base:batch=2,seq=8,layers=1,dim=16,heads=2,vocab=32,mode=infer")
    _, result = assert_same_result(w.model, w.args, w.kwargs)
    assert isinstance(result, transformers.modeling_outputs.MaskedLMOutput)


@pytest.mark.parametrize("name", ["unet", "gpt2", "mobilenetv2", "gptneo-1.3b"])
def test_bundled_models(name: str) -> None:
    w = load_workload(TINY[name] + ",mode=infer")
    assert_same_result(w.model, w.args, w.kwargs)


def test_mutated_argument_is_written_back() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 1:].mul_(3)
            return x + 1

    x = torch.ones(2, 3)
    program = capture(Workload(Adds(), (x,)))
    assert torch.equal(x, torch.ones(2, 3))
    result, _ = run(program, (x,))
    assert torch.equal(x, torch.tensor([[1.0, 3.0, 3.0]] * 2))
    assert torch.equal(result, x + 1)


def test_training_mode_inference_draws_and_counts() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.5))
    assert_same_result(model, (torch.randn(2, 2, 6, 6),))
    assert model[1].num_batches_tracked.item() == 1


def test_recurrent_layer_with_its_hidden_workspace() -> None:
    assert_same_result(nn.LSTM(4, 6, batch_first=True), (torch.randn(2, 3, 4),))


def test_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4)
    program = capture(Workload(model, (x,), autocast=torch.bfloat16))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    ours, _ = run(program, (x,))
    assert_bits("output", ours, expected)


def test_a_model_that_export_refuses_is_captured_all_the_same() -> None:
    class Rebinds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x) + len(repr(type(self)))

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Rebinds()

        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(__import__("numpy").ones(3, dtype="float32")) + self.inner(x)

    assert_same_result(Parallel(), (torch.randn(2, 3),))


def operators(trace: Trace) -> list[Op]:
    return [node.op for node in assemble(trace, None).graph]


@pytest.mark.parametrize("name", sorted(set(TINY) - {"bert-base", "vit-base"}))
def test_export_and_the_plain_call_run_the_same_operators(name: str) -> None:
    w = load_workload(TINY[name] + ",mode=infer")
    exported = record_exported(w)
    assert exported is not None
    assert operators(exported) == operators(record_inference(w))


def test_where_a_model_behaves_differently_under_export_eager_is_right() -> None:
    """transformers makes an attention mask when it is exported and none when it runs."""
    w = load_workload(TINY["bert-base"] + ",mode=infer")
    exported, plain = record_exported(w), record_inference(w)
    assert exported is not None
    assert len(operators(exported)) > len(operators(plain))
    assert [node.op for node in capture(w).graph] == operators(plain)
