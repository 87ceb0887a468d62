"""The recording on fake tensors is what eager really runs: the same operators, the same results' metas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.capture.same import assert_same_steps
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture import capture
from lowtide.capture.fidelity import run_faithfully
from lowtide.capture.inference import record_inference
from lowtide.capture.internals import FakeTensorMode
from lowtide.capture.recorder import meta_of
from lowtide.capture.training import record_training
from lowtide.ir.aten import tensors_of
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload

FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
HIDDEN = {"prim", "profiler"}
IDENTITIES = {"aten.detach.default", "aten.alias.default"}


class Listing(TorchDispatchMode):
    """Every operator that eager runs, with the metas of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace not in HIDDEN and str(func) not in IDENTITIES:
            # The engine sums gradients in place where it can; on fakes it never can.
            name = "aten.add.Tensor" if str(func) == "aten.add_.Tensor" else str(func)
            self.calls.append((name, [meta_of(tensor) for tensor in tensors_of(result)]))
        return result


# transformers looks at the values of GPT-Neo's positions when it can, and makes its mask without when not.
LOOKS_AT_VALUES = {"gptneo-1.3b"}


@pytest.mark.parametrize("name", sorted(set(TINY) - LOOKS_AT_VALUES))
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_eager_runs_the_recorded_operators(name: str, mode: str) -> None:
    w = load_workload(f"{TINY[name]},mode={mode}")
    recorded = record_training(w) if mode == "train" else record_inference(w)
    with Listing() as eager, torch.set_grad_enabled(mode == "train"):
        output = w.model(*w.args, **w.kwargs)
        if mode == "train":
            loss = w.loss(output, *w.targets) if w.loss is not None else output.loss
            loss.backward()
    ours = [
        (call.op.overload.replace("add_.Tensor", "add.Tensor"), [window.meta for window in call.outputs])
        for call in recorded.calls
    ]
    assert ours == eager.calls


@pytest.mark.parametrize(
    ("given", "parameters"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "group", "batch", "functional batch"])
def test_types_of_statistics(kind: str, given: torch.dtype, parameters: torch.dtype) -> None:
    x, weight = torch.ones(2, 4, 3, 3, dtype=given), torch.ones(4, dtype=parameters)
    aten = torch.ops.aten
    call: tuple[Any, ...] = {
        "layer": (aten.native_layer_norm.default, x[..., 0, 0], [4], weight, weight, 1e-5),
        "group": (aten.native_group_norm.default, x, weight, weight, 2, 4, 9, 2, 1e-5),
        "batch": (aten.native_batch_norm.default, x, weight, weight, weight, weight, True, 0.1, 1e-5),
        "functional batch": (FUNCTIONAL, x, weight, weight, weight, weight, True, 0.1, 1e-5),
    }[kind]
    mode = FakeTensorMode()
    with mode:
        operands = [
            torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype) if isinstance(arg, Tensor) else arg
            for arg in call[1:]
        ]
        fake = run_faithfully(call[0], tuple(operands), {}, mode)
    real = call[0](*call[1:])
    assert [meta_of(tensor) for tensor in fake] == [meta_of(tensor) for tensor in real]


def test_mixed_precision_training_with_normalisations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4),
        nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 2),
    )  # fmt: skip
    assert_same_steps(
        model, (torch.randn(2, 3, 8, 8),), loss=lambda y: y.float().square().mean(), autocast=torch.bfloat16
    )


def test_embedding_bag() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(7, 4, mode="mean"), nn.Linear(4, 2)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.head(self.bag(ids, offsets))

    ids, offsets = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 4])
    assert_same_steps(Bag(), (ids, offsets), loss=lambda y: y.square().mean())


def test_training_a_recurrent_layer_of_onednn_is_refused_with_a_way_out() -> None:
    model = nn.LSTM(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload(model, (torch.ones(2, 3, 4),), loss=lambda y: y[0].sum(), optimizer=optimizer)
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build has no oneDNN")
    with pytest.raises(Exception, match=r"mkldnn\.enabled = False"):
        capture(workload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "1.bias", "0.weight 0.bias"])
def test_partly_frozen_layers(frozen: str, dtype: torch.dtype) -> None:
    """Which gradients a backward returns depends on what is asked for, and on the library."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3)).to(dtype)
    for name in frozen.split():
        model.get_parameter(name).requires_grad_(False)
    assert_same_steps(model, (torch.randn(2, 2, 6, 6, dtype=dtype),), loss=lambda y: y.square().mean())
