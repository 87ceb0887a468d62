"""Optimizer updates as one kernel each: bit-equal to ATen's sequence of in-place operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.differential.fusion_bodies import trace

from lowtide.fusion.codegen.library import compile_bodies

LR, BETA1, BETA2, EPS, DECAY, STEP = 1e-3, 0.9, 0.999, 1e-8, 0.01, 3
ADAM = (1 - BETA1, BETA2, 1 - BETA2, (1 - BETA2**STEP) ** 0.5, EPS, -LR / (1 - BETA1**STEP))
ADAMW = (1 - LR * DECAY, *ADAM)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def adam(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.lerp_(g, ADAM[0])
    v.mul_(ADAM[1]).addcmul_(g, g, value=ADAM[2])
    p.addcdiv_(m, (v.sqrt() / ADAM[3]).add_(ADAM[4]), value=ADAM[5])


def adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    p.mul_(ADAMW[0])
    adam(p, g, m, v)


def adam_with_decay(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    adam(p, g.add(p, alpha=DECAY), m, v)


def momentum(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.mul_(0.9).add_(g, alpha=1.0)
    p.add_(m, alpha=-0.01)


def nesterov(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    g = g.add(p, alpha=0.01)
    m.mul_(0.9).add_(g, alpha=0.9)
    p.add_(g.add(m, alpha=0.9), alpha=-0.01)


def fresh(count: int, dtype: torch.dtype) -> Tensors:
    rng = torch.Generator().manual_seed(count)
    p, g, m, v = (torch.randn(count, generator=rng, dtype=dtype) for _ in range(4))
    return p, g, m, v.abs() * 0.01


RULES: list[tuple[Callable[..., None], tuple[float, ...]]] = [
    (adam, ADAM),
    (adamw, ADAMW),
    (adam_with_decay, ADAM),
    (momentum, ()),
    (nesterov, ()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_bit_equal(dtype: torch.dtype) -> None:
    cases = [(rule, scalars, count) for rule, scalars in RULES for count in (1, 7, 1000, 70_001)]
    library = compile_bodies([trace(rule, fresh(count, dtype), scalars) for rule, scalars, count in cases])
    assert library is not None
    for number, (rule, scalars, count) in enumerate(cases):
        for threads in (1, 2):
            ours, eager = fresh(count, dtype), fresh(count, dtype)
            library.kernel(number).run([*ours, *scalars], threads)
            rule(*eager)
            for mine, theirs in zip(ours, eager, strict=True):
                assert torch.equal(mine, theirs), (rule.__name__, count, threads)


def test_scalars_are_read_at_each_call() -> None:
    library = compile_bodies([trace(adamw, fresh(100, torch.float32), ADAMW)])
    assert library is not None
    faster = (*ADAMW[:-1], ADAMW[-1] * 10)
    slow, fast = fresh(100, torch.float32), fresh(100, torch.float32)
    library.kernel(0).run([*slow, *ADAMW])
    library.kernel(0).run([*fast, *faster])
    assert not torch.equal(slow[0], fast[0])
