"""What the generators of operator calls draw from: sizes, shapes and float64 values.

Sizes are drawn from 1 to 5, so that broadcasting and axes of size 1 occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import Tensor

from lowtide.ir.aten import resolve
from lowtide.ir.ops import Arg, Ref


@dataclass
class Draw:
    """Sizes and values from Hypothesis, tensors collected as the inputs of one call."""

    data: st.DataObject
    tensors: list[Tensor] = field(default_factory=list)

    def size(self, low: int = 1, high: int = 5) -> int:
        return self.data.draw(st.integers(low, high))

    def shape(self, low: int = 1, high: int = 4) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.size(low, high)))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def permutation(self, count: int) -> tuple[int, ...]:
        return tuple(self.data.draw(st.permutations(range(count))))

    def one_of(self, *options):  # type: ignore[no-untyped-def]
        return self.data.draw(st.sampled_from(options))

    def random(self, *shape: int, low: float | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.data.draw(st.integers(0, 99)))
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values if low is None else values.abs() + low

    def integers(self, below: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.data.draw(st.integers(0, 99)))
        return torch.randint(below, shape, generator=generator)

    def use(self, tensor: Tensor) -> Ref:
        self.tensors.append(tensor)
        return Ref(len(self.tensors) - 1)

    def tensor(self, *shape: int, low: float | None = None) -> Ref:
        return self.use(self.random(*shape, low=low))

    def broadcast(self, shape: tuple[int, ...]) -> Ref:
        """A tensor that broadcasts to `shape`: some dimensions 1, some leading ones missing."""
        kept = shape[self.size(0, len(shape)) :] if self.flag() else shape
        return self.tensor(*(1 if self.flag() and self.flag() else size for size in kept))


Build = Callable[[Draw], tuple[Arg, ...]]


def real_call(overload: str, *args: object) -> tuple[Tensor, ...]:
    """Run an operator to make consistent inputs of another (statistics, indices)."""
    result = resolve(overload)(*args)
    return tuple(result) if isinstance(result, tuple | list) else (result,)
