"""Measured bytes are those of a real step, and measuring changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.capture import capture
from lowtide.run.measure import LatencyPairs, half_width, measure_eager, measure_pairs, measure_plan
from lowtide.run.native import resident_bytes
from lowtide.run.plan import build_plan
from lowtide.workload import Workload


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 4))
    return Workload(
        model,
        args=(torch.rand(128, 64),),
        targets=(torch.randint(0, 4, (128,)),),
        loss=F.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    )


def test_inference_peak_by_hand() -> None:
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.ReLU(), nn.Linear(256, 1, bias=False))
    given = Workload(model, args=(torch.rand(128, 64),))
    found = measure_eager(given, seconds=0.0)
    assert found.resident_bytes == (64 * 256 + 256 + 128 * 64) * 4
    assert found.above_bytes == 2 * 128 * 256 * 4  # the hidden layer before and after the activation


def test_state_that_a_step_creates_is_resident() -> None:
    given = workload()
    parameters = sum(p.numel() for p in given.model.parameters())
    found = measure_eager(given, seconds=0.0)
    assert found.resident_bytes - resident_bytes(given) == 2 * parameters * 4 + 4 * len(
        list(given.model.parameters())
    )


def test_measuring_changes_nothing() -> None:
    given = workload()
    plan = build_plan(capture(given))
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    state = torch.get_rng_state()
    measure_eager(given, seconds=0.0)
    measure_plan(plan, given, seconds=0.0)
    pairs = measure_pairs(plan, given, seconds=0.0)
    assert pairs.pairs == 3 and pairs.ratio > 0 and pairs.eager_half_width >= 0
    assert given.optimizer is not None and not given.optimizer.state
    assert all(torch.equal(before[name], tensor) for name, tensor in given.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in given.model.parameters())


def test_state_that_was_there_stays() -> None:
    given = workload()
    assert given.optimizer is not None
    F.cross_entropy(given.model(*given.args), *given.targets).backward()
    given.optimizer.step()
    given.optimizer.zero_grad(set_to_none=True)
    entries = {p: dict(state) for p, state in given.optimizer.state.items()}
    values = {id(t): t.clone() for state in entries.values() for t in state.values()}
    measure_eager(given, seconds=0.0)
    assert given.optimizer.state.keys() == entries.keys()
    for parameter, state in entries.items():
        for name, tensor in state.items():
            assert given.optimizer.state[parameter][name] is tensor
            assert torch.equal(tensor, values[id(tensor)])


def test_half_width_is_that_of_the_medians_interval() -> None:
    assert half_width([1.0]) == 0.0
    assert half_width([float(k) for k in range(100)]) == pytest.approx(9.5, abs=1.0)


def test_limit_is_met_up_to_the_half_width() -> None:
    pairs = LatencyPairs(1.25, 0.01, 31, 1.0, 1.25)
    assert pairs.meets(1.25) and pairs.meets(1.241) and not pairs.meets(1.2)
    assert not LatencyPairs(1.25, 0.5, 31, 1.0, 1.25).meets(1.2)  # a noisy machine excuses 0.02, no more
