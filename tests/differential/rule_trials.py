"""Random trials of an equation between terms: in which class do its two sides agree?

exact: bit for bit in float32 and float64, with NaN, infinities, zeros and denormals among the operands.
reassociates: the same real number in float64, signed operands and zeros among them, the same NaN and
infinities.
domain: only on positive operands of moderate size.  Conditioned: in float32 the sides differ by at most
2e-6 of the largest value although each variable has a scale of its own between 1e-3 and 1e3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowtide.transforms.rewriting.meaning import evaluate
from lowtide.transforms.rewriting.rule import Numerics
from lowtide.transforms.rewriting.term import Term, variables

SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 1.0, -1.0, 3e38, -2.0)
SHAPES = ((7, 5), (3, 16), (1, 1), (20, 33))
TOLERANCE = 2e-6


def operands(
    names: tuple[str, ...], shape: tuple[int, int], seed: int, dtype: torch.dtype, kind: str
) -> dict[str, Tensor]:
    """Random values by variable; those that start with k have one column."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        own = (shape[0], 1) if name[0] == "k" else shape
        value = torch.randn(own, generator=generator, dtype=torch.float64)
        if kind == "positive":
            value = value.abs() * 0.6 + 0.3
        elif kind == "scaled":
            value = value * 10.0 ** (torch.rand((), generator=generator, dtype=torch.float64) * 6 - 3)
        elif kind == "zeros":
            value = torch.where(torch.rand(own, generator=generator) < 0.3, 0.0, value)
        elif kind == "special":
            picks = torch.randint(len(SPECIAL), own, generator=generator)
            value = torch.where(
                torch.rand(own, generator=generator) < 0.4, torch.tensor(SPECIAL)[picks], value
            )
        found[name] = value.to(dtype)
    return found


def same_bits(left: Tensor, right: Tensor) -> bool:
    left, right = torch.broadcast_tensors(left, right)
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def is_exact(left: Term, right: Term, seeds: int = 4) -> bool:
    names = variables(left)
    for shape in SHAPES:
        for seed in range(seeds):
            for dtype in (torch.float32, torch.float64):
                for kind in ("signed", "special", "scaled"):
                    given = operands(names, shape, seed, dtype, kind)
                    if not same_bits(evaluate(left, given), evaluate(right, given)):
                        return False
    return True


def agrees(
    left: Term,
    right: Term,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    seeds: int = 6,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
) -> bool:
    """Whether the sides differ by at most `tolerance` of the largest finite value, with the same holes."""
    names = variables(left)
    for shape in shapes:
        for seed in range(seeds):
            given = operands(names, shape, seed, dtype, kind)
            a, b = torch.broadcast_tensors(evaluate(left, given), evaluate(right, given))
            finite = a.isfinite()
            if not bool((b.isfinite() == finite).all()):
                return False
            if finite.any():
                error = (a[finite] - b[finite]).abs().max().item()
                if error > tolerance * max(a[finite].abs().max().item(), 1e-30):
                    return False
    return True


def classify_numerics(left: Term, right: Term) -> tuple[Numerics | None, bool]:
    """(class, conditioned) of an equation; (None, False) if it does not hold at all."""
    if not agrees(left, right, "positive", torch.float64, 1e-10):
        return None, False
    if is_exact(left, right):
        return Numerics.EXACT, True
    if not all(agrees(left, right, kind, torch.float64, 1e-10) for kind in ("signed", "zeros")):
        return Numerics.DOMAIN, True
    return Numerics.REASSOCIATES, is_conditioned(left, right)


def is_conditioned(left: Term, right: Term) -> bool:
    """Whether float32 keeps the tolerance at any scale, and overflows and holes stay where they were.

    A tensor of one element is left out: there any sum may cancel, by luck.
    """
    shapes = tuple(shape for shape in SHAPES if shape != (1, 1))
    return all(
        agrees(left, right, kind, torch.float32, TOLERANCE, 16, shapes) for kind in ("scaled", "signed")
    )
