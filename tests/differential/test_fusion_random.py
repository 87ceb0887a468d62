"""Random fusible bodies against eager: exact programs bit for bit, smooth ones no worse than eager is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.differential.fusion_bodies import trace

from lowtide.fusion.codegen.library import compile_bodies
from lowtide.fusion.codegen.tensor import Unfusable

Program = Callable[..., torch.Tensor]

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.uint8)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -3.5)


def draw_tensor(rng: random.Random, shape: Sequence[int], dtype: torch.dtype, special: bool) -> torch.Tensor:
    """A tensor that broadcasts to `shape`, in a random layout."""
    own = [size if rng.random() < 0.8 else 1 for size in shape]
    own = own[rng.choice((0, 0, 0, len(own) // 2)) :]
    order = list(range(len(own)))
    rng.shuffle(order)
    padded = [size + rng.choice((0, 0, 1)) for size in own]
    seed = torch.Generator().manual_seed(rng.randrange(1 << 30))
    base = torch.randn([padded[k] for k in order], generator=seed) * 3
    base = (
        base.bool()
        if dtype == torch.bool
        else base.abs().to(dtype)
        if dtype == torch.uint8
        else base.to(dtype)
    )
    if special and dtype.is_floating_point and base.numel():
        for _ in range(2):
            base.view(-1)[rng.randrange(base.numel())] = rng.choice(SPECIAL)
    view = base.permute([order.index(k) for k in range(len(own))])
    return view[tuple(slice(0, size) for size in own)]


def exact_step(
    rng: random.Random, pool: Sequence[torch.Tensor]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """One operator whose result does not depend on how it is computed."""
    i, j, k = (rng.randrange(len(pool)) for _ in range(3))
    number = rng.choice((2, -1, 0.5, 3, 0.1))
    dim = rng.choice((-1, 0))
    return rng.choice(
        [
            lambda p: p[i] + p[j],
            lambda p: p[i] * p[j],
            lambda p: p[i] * number,
            lambda p: torch.sub(p[i].float(), p[i] * 3, alpha=number),
            lambda p: torch.add(p[i].float(), p[i].float() * 2, alpha=0.3),
            lambda p: p[i] / (p[j].float() * 2),
            lambda p: torch.maximum(p[i], p[j]),
            lambda p: torch.minimum(p[i], p[j]),
            lambda p: torch.where(p[i] > p[j], p[i].float(), p[k].float()),
            lambda p: torch.relu(p[i].float()),
            lambda p: p[i].float().clamp(-1, 1.5),
            lambda p: p[i].to(torch.bfloat16),
            lambda p: p[i].float().abs(),
            lambda p: torch.floor(p[i].double()),
            lambda p: (p[i] == p[j]).to(torch.int64),
            lambda p: p[i].bool() & p[j].bool(),
            lambda p: (
                p[i].transpose(dim, dim - 1).contiguous().transpose(dim, dim - 1)
                if p[i].dim() > 1
                else p[i] + 1
            ),
            lambda p: p[i].reshape(-1).reshape(p[i].shape) * 1,
            lambda p: torch.isnan(p[i].float()),
            lambda p: torch.sign(p[i]) if p[i].dtype != torch.bool else ~p[i],
            lambda p: p[i].flip(0) * 1 if p[i].dim() else p[i] * 1,
            lambda p: torch.cat([p[i].float(), p[i].float() + 1], 0) if p[i].dim() else p[i] * 2,
            lambda p: p[i].amax(dim) if p[i].dim() and p[i].numel() else p[i] * 3,
            lambda p: p[i].bool().any(dim) if p[i].dim() else p[i] * 3,
        ]
    )


def exact_program(seed: int) -> tuple[Program, list[torch.Tensor]]:
    rng = random.Random(seed)
    rank = rng.randrange(1, 4)
    shape = [rng.choice((1, 2, 3, 5, 8, 17, 33, 0 if rng.random() < 0.3 else 4)) for _ in range(rank)]
    inputs = [draw_tensor(rng, shape, rng.choice(DTYPES), True) for _ in range(rng.randrange(1, 4))]
    steps: list[Any] = []
    pool = list(inputs)
    while len(steps) < 6:
        step = exact_step(rng, pool)
        try:
            made = step(pool)
        except (RuntimeError, IndexError):
            continue
        if made.dtype in DTYPES:
            steps.append(step)
            pool.append(made)

    def run(*args: torch.Tensor) -> torch.Tensor:
        values = list(args)
        for step in steps:
            values.append(step(values))
        return values[-1].clone(), values[len(args)].clone()

    return run, inputs


def smooth_step(
    rng: random.Random, pool: Sequence[torch.Tensor]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """One differentiable operator, reductions included."""
    i, j = (rng.randrange(len(pool)) for _ in range(2))
    dim = rng.randrange(pool[0].dim())
    f = torch.nn.functional
    return rng.choice(
        [
            lambda p: p[i] + p[j],
            lambda p: p[i] * p[j],
            lambda p: torch.tanh(p[i]),
            lambda p: torch.sigmoid(p[i]),
            lambda p: torch.exp(-p[i].abs()),
            lambda p: torch.log1p(p[i].abs()),
            lambda p: f.gelu(p[i]),
            lambda p: f.gelu(p[i], approximate="tanh"),
            lambda p: f.silu(p[i]),
            lambda p: torch.softmax(p[i], dim),
            lambda p: torch.log_softmax(p[i], dim),
            lambda p: p[i].mean(dim, keepdim=True) * p[j],
            lambda p: p[i] - p[i].sum(dim, keepdim=True),
            lambda p: f.layer_norm(p[i], p[i].shape[-1:]),
            lambda p: torch.sqrt(p[i] * p[i] + 0.1),
            lambda p: p[i].var(dim, correction=0, keepdim=True) + p[j],
            lambda p: torch.erf(p[i]),
            lambda p: (
                p[i].permute(*reversed(range(p[i].dim()))).contiguous().permute(*reversed(range(p[i].dim())))
            ),
        ]
    )


def smooth_program(seed: int) -> tuple[Program, list[torch.Tensor]]:
    rng = random.Random(seed)
    rank = rng.randrange(1, 4)
    shape = [rng.choice((1, 2, 3, 8, 17, 65)) for _ in range(rank)]
    inputs = [draw_tensor(rng, shape, torch.float32, False).expand(shape) for _ in range(2)]
    steps = [smooth_step(rng, inputs) for _ in range(5)]

    def run(*args: torch.Tensor) -> torch.Tensor:
        values = list(args)
        for number, step in enumerate(steps):
            values.append(step(values[: len(args) + number]))
        return values[-1].clone(), values[-2].sum(0)

    return run, inputs


def kernels_of(programs: Sequence[tuple[Program, list[torch.Tensor]]]) -> list[Any]:
    """(kernel, program, inputs) for the programs that have a kernel, compiled together."""
    kept = []
    for program, inputs in programs:
        body = trace(program, inputs)
        try:
            from lowtide.fusion.codegen.library import emit_source

            emit_source([body])
        except Unfusable:
            continue
        kept.append((body, program, inputs))
    library = compile_bodies([body for body, _, _ in kept])
    assert library is not None
    return [(library.kernel(n), program, inputs) for n, (_, program, inputs) in enumerate(kept)]


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 20))
def test_exact_programs_are_bit_equal(seed: int, threads: int) -> None:
    programs = [exact_program(seed * 64 + n) for n in range(24)]
    found = kernels_of(programs)
    assert len(found) > len(programs) // 2
    for kernel, program, inputs in found:
        expected = program(*inputs)
        for ours, eager in zip(kernel.run(inputs, threads), expected, strict=True):
            assert ours.dtype == eager.dtype
            torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 20))
def test_smooth_programs_are_as_accurate_as_eager(seed: int) -> None:
    found = kernels_of([smooth_program(seed * 64 + n) for n in range(24)])
    assert found
    for kernel, program, inputs in found:
        truth = program(*(t.double() for t in inputs))
        for ours, eager, exact in zip(kernel.run(inputs, 2), program(*inputs), truth, strict=True):
            scale = exact.abs().max().clamp(min=1)  # sums may cancel
            theirs = ((eager - exact).abs().max() / scale).item()
            assert ((ours - exact).abs().max() / scale).item() <= 4 * theirs + 4e-6
