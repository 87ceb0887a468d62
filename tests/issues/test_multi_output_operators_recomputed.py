"""Operators with several outputs as units of recomputation, of swapping and of parts (pytorch PR#188014).

Some outputs are read at once, others only by the backward, others by nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.differential.small_steps import outcome
from tests.issues.ladder import Rung, assert_traces, build, climb, eager_trace, ordered, parts_of, plan_trace
from torch import Tensor, nn
from torch.nn import functional

from lowtide.capture import capture
from lowtide.ir.verify import verify
from lowtide.transforms import remat, swap
from lowtide.workload import Workload


class Planes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.batch = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = functional.max_pool2d(self.norm(self.convolution(x)), 2, return_indices=True)
        whole = functional.max_unpool2d(pooled.relu(), places, 2)
        small, where = functional.adaptive_max_pool2d(whole, 2, return_indices=True)
        return self.batch(small * (1 + where % 2))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed + functional.scaled_dot_product_attention(q, k, v, torch.ones(6, 6).tril().bool())
        return self.out(mixed.transpose(1, 2).flatten(2)) + x


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        best, where = y.max(1, keepdim=True)
        first, second, third = y.tensor_split(3, 1)
        values, _ = y.topk(2, 1)
        low, high = torch.aminmax(y, dim=1, keepdim=True)
        variance, mean = torch.var_mean(y, 1, keepdim=True)
        ordered, order = y.sort(1)
        mantissa, _ = torch.frexp(y.detach())
        parts = first * second + third * values + (best + low + high + variance + mean) / (1 + where)
        return parts.sum(1) + (ordered * order).sum(1) + mantissa.sum(1)


class Factors(nn.Module):
    """Linear algebra that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        square = y.mT @ y + 4 * torch.eye(4, dtype=y.dtype)
        q, r = torch.linalg.qr(y)
        values, vectors = torch.linalg.eigh(square)
        sign, size = torch.linalg.slogdet(square)
        return ((q @ r).sum() + values.sum() + vectors.abs().sum() + (sign * size).sum()) / 100


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for token in x.unbind(1):
            state = self.cell(token, state)
        return state


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "planes": (Planes, (4, 2, 8, 8)),
    "attention": (Attends, (4, 6, 8)),
    "rows": (Rows, (6, 6)),
    "linear algebra": (Factors, (4, 6, 4)),
    "recurrent": (Recurrent, (4, 3, 6)),
}


def step_of(name: str) -> Workload:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(shape).double()
    return Workload(model, (x,), loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.mark.parametrize("name", MODELS)
def test_every_rung(name: str) -> None:
    plans = climb(step_of(name), (2,))
    assert name == "linear algebra" or parts_of(plans["2 parts"].graph)


@pytest.mark.parametrize("name", MODELS)
def test_some_outputs_kept_and_others_recomputed(name: str) -> None:
    """Each storage of an operator with several outputs alone, then all of them without it."""
    workload = step_of(name)
    program = capture(workload)
    graph = program.graph
    eager = eager_trace(workload, 1)
    late = remat.late_nodes(graph)
    allowed = remat.recomputable(graph, late)
    several = [n for n in graph if len(n.outputs) > 1 and not graph.is_view(n)]
    made = {graph.values[value].storage for node in several for value in node.outputs} & allowed
    chosen = [frozenset({storage}) for storage in sorted(made)] + [allowed - {s} for s in sorted(made)]
    for storages in chosen[:8]:
        edited = remat.apply(graph, remat.RematCandidate(storages, late)).graph
        plan = build(program, Rung(f"recomputed {sorted(storages)}", edited, ordered(edited)))
        assert_traces(plan_trace(plan, workload, 1), eager, 0.0, f"recomputed {sorted(storages)}")


@pytest.mark.parametrize("name", MODELS)
def test_each_output_that_may_wait_elsewhere(name: str) -> None:
    """Stored and loaded alone, and all of them one after the other; the plain executor runs the copies."""
    program = capture(step_of(name))
    program.ensure_state()
    graph = program.graph
    several = {value for node in graph if len(node.outputs) > 1 for value in node.outputs}
    expected = outcome(program, graph)
    chosen = [each for each in swap.candidates(graph) if each.value in several]
    everything = graph
    for candidate in chosen:
        everything = swap.apply(everything, candidate).graph
        for edited in (swap.apply(graph, candidate).graph, everything):
            verify(edited)
            assert all(map(torch.equal, outcome(program, edited), expected)), candidate
    assert chosen or name in ("recurrent", "linear algebra")
