"""Random numbers by counter: one operator whose elements can be drawn in any order, part by part, twice.

Problem.  PyTorch's generator hands out a sequence: a mask can only be drawn whole, in program order, once.
So a mask that a later part or a recomputation needs has to be kept.

Method.  ``lowtide::philox`` computes an element from the key of its node and from its index in the whole
tensor alone, with Philox 4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).  What
the operator is told about its place are *index tensors*: one per dimension that may be cut, holding each
position times the stride of the whole.  A part of the region reads a slice of them, and so has the numbers
that the whole would have there:

    whole   philox(key, [0 8 16 24], [0 1 .. 7])       4 rows of 8
    part    philox(key,     [16 24], [0 1 .. 7])       its rows 2 and 3, bit for bit

    block of element e   e // 4 (e // 2 where an element takes two words)   ->  four words of 32 bits
    bernoulli(p)         word < p * 2**32
    uniform(a, b)        a + (b - a) * (word >> 8) / 2**24; 53 bits of two words for float64
    normal(mean, std)    Box and Muller on two words (four for float64), cosine for even e, sine for odd

`node_key` makes a node's key from the step's and the node's offset.

Invariants.  Bernoulli masks do not depend on the element type.  Uniform numbers lie in [a, b).  No state.

Not done.  Threads: a mask of a million elements takes about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowtide.kernel import kernel

__all__ = ["KEY_BITS", "PHILOX", "node_key", "words"]

PHILOX = "lowtide.philox.default"
KEY_BITS = 52
"""Keys are whole numbers that a float64 holds exactly: they travel as host numbers do."""

_ARGUMENTS = (
    "float key, Tensor[] indices, int[] dims, int[] sizes, int[] strides, int[] order, "
    "str kind, float first, float second, ScalarType dtype"
)
_KINDS = {"bernoulli": 0, "uniform": 1, "normal": 2}
_MASK = 0xFFFFFFFF

Ints = npt.NDArray[np.int64]


# -- the function ------------------------------------------------------------------------------------------


@kernel
def words(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Philox 4x32-10 of one counter under one key, all of 32 bits."""
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((right >> 32) & 0xFFFFFFFF) ^ c1 ^ k0
        c2 = ((left >> 32) & 0xFFFFFFFF) ^ c3 ^ k1
        c1, c3 = right & 0xFFFFFFFF, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@kernel
def _narrow(kind: int, e: int, k0: int, k1: int, first: float, second: float) -> float:
    """Element `e` from words of 32 bits."""
    block = e >> 2
    w = words(block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF, 0, 0, k0, k1)
    lane = e & 3
    word = w[0] if lane == 0 else w[1] if lane == 1 else w[2] if lane == 2 else w[3]
    if kind == 0:
        return 1.0 if word < first else 0.0
    if kind == 1:
        return first + (second - first) * ((word >> 8) * 2.0**-24)
    one, two = (w[0], w[1]) if lane < 2 else (w[2], w[3])
    radius, angle = math.sqrt(-2.0 * math.log((one + 1.0) * 2.0**-32)), two * (2.0**-32 * 2.0 * math.pi)
    return first + second * radius * (math.cos(angle) if lane & 1 == 0 else math.sin(angle))


@kernel
def _wide(kind: int, e: int, k0: int, k1: int, first: float, second: float) -> float:
    """Element `e` of a float64 tensor: 53 bits."""
    if kind == 0:
        return _narrow(0, e, k0, k1, first, second)
    block = e >> 1
    w = words(block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF, 1, 0, k0, k1)
    one, two = (w[0] << 21) | (w[1] >> 11), (w[2] << 21) | (w[3] >> 11)
    if kind == 1:
        return first + (second - first) * ((one if e & 1 == 0 else two) * 2.0**-53)
    radius, angle = math.sqrt(-2.0 * math.log((one + 1.0) * 2.0**-53)), two * (2.0**-53 * 2.0 * math.pi)
    return first + second * radius * (math.cos(angle) if e & 1 == 0 else math.sin(angle))


@kernel
def _mask_blocks(out: Any, at: int, block: int, count: int, k0: int, k1: int, bound: float) -> None:
    """Four mask elements for each of `count` blocks, one after the other from `at`."""
    for b in range(count):
        w = words((block + b) & 0xFFFFFFFF, ((block + b) >> 32) & 0xFFFFFFFF, 0, 0, k0, k1)
        out[at + 4 * b] = w[0] < bound
        out[at + 4 * b + 1] = w[1] < bound
        out[at + 4 * b + 2] = w[2] < bound
        out[at + 4 * b + 3] = w[3] < bound


@kernel
def _fill_row(
    out: Any, at: int, step: int, places: Ints, base: int, kind: int, wide: bool, k0: int, k1: int, ends: Any
) -> None:
    """One row: the elements ``base + places[j]`` at ``at + j * step``; `ends` are the two parameters and the
    number below the second.
    """
    count, j = places.size, 0
    dense = kind == 0 and step == 1 and places[count - 1] - places[0] == count - 1
    if dense:
        e = base + places[0]
        while j < count and (e + j) & 3:
            out[at + j] = _narrow(0, e + j, k0, k1, ends[0], 0.0)
            j += 1
        blocks = (count - j) >> 2
        _mask_blocks(out, at + j, (e + j) >> 2, blocks, k0, k1, ends[0])
        j += 4 * blocks
    while j < count:
        e = base + places[j]
        if wide:
            value = _wide(kind, e, k0, k1, ends[0], ends[1])
        else:
            value = _narrow(kind, e, k0, k1, ends[0], ends[1])
        out[at + j * step] = min(value, ends[2]) if kind == 1 else value
        j += 1


@kernel
def _fill(
    out: Any, strides: Ints, places: Ints, counts: Ints, kind: int, wide: bool, k0: int, k1: int, ends: Any
) -> None:
    """All rows of a tensor whose dimensions are in the order of memory; `places` has them end to end."""
    rank = counts.size
    starts, position = np.zeros(rank, np.int64), np.zeros(rank, np.int64)
    for d in range(1, rank):
        starts[d] = starts[d - 1] + counts[d - 1]
    rows = 1
    for d in range(rank - 1):
        rows *= counts[d]
    inner = places[starts[rank - 1] : starts[rank - 1] + counts[rank - 1]]
    for _ in range(rows):
        at, base = 0, 0
        for d in range(rank - 1):
            at += position[d] * strides[d]
            base += places[starts[d] + position[d]]
        _fill_row(out, at, strides[rank - 1], inner, base, kind, wide, k0, k1, ends)
        for d in range(rank - 2, -1, -1):
            position[d] += 1
            if position[d] < counts[d]:
                break
            position[d] = 0


def node_key(step_key: int, offset: int) -> int:
    """The key of the node with this offset in a step with this key; `KEY_BITS` bits."""
    w = words(offset, 0, 0, 0, step_key & _MASK, step_key >> 32)
    return w[0] | (w[1] & ((1 << (KEY_BITS - 32)) - 1)) << 32


# -- the operator ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draw:
    """One call: the arguments of the operator, in its order."""

    key: float
    indices: Sequence[Tensor]
    dims: Sequence[int]
    sizes: Sequence[int]
    strides: Sequence[int]
    order: Sequence[int]
    kind: str
    first: float
    second: float
    dtype: torch.dtype

    @property
    def shape(self) -> list[int]:
        """As the index tensors say, which may be slices; other dimensions are whole."""
        shape = list(self.sizes)
        for dim, index in zip(self.dims, self.indices, strict=True):
            shape[dim] = index.numel()
        return shape

    def empty(self, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        """A dense tensor whose dimensions lie in memory in `order`, outermost first."""
        shape, back = self.shape, [self.order.index(dim) for dim in range(len(self.order))]
        return torch.empty([shape[dim] for dim in self.order], dtype=dtype, device=device).permute(back)

    def places(self) -> Ints:
        """Position times stride of the whole, for every dimension in the order of memory, end to end."""
        given, shape = dict(zip(self.dims, self.indices, strict=True)), self.shape
        rows = [
            given[d].numpy() if d in given else np.arange(shape[d], dtype=np.int64) * self.strides[d]
            for d in self.order
        ]
        return np.concatenate(rows) if rows else np.zeros(1, np.int64)

    def ends(self) -> npt.NDArray[np.float64]:
        """The two parameters as the kernel takes them, and the largest number below the second."""
        if self.kind == "bernoulli":
            return np.array([math.floor(self.first * 2.0**32 + 0.5), 0.0, 0.0])
        below = self.second
        if self.kind == "uniform" and self.first < self.second:
            pair = torch.tensor([self.second, self.first], dtype=self.dtype)
            below = torch.nextafter(pair[0], pair[1]).item()
        return np.array([self.first, self.second, below])

    def fill(self, out: Tensor) -> Tensor:
        """`out`, which has the shape, with its numbers."""
        if not out.numel():
            return out
        if self.dtype not in (torch.float32, torch.float64):
            return out.copy_(replace(self, dtype=torch.float32).fill(self.empty(torch.float32)))
        shape, steps = list(out.shape), out.stride()
        span = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        counts = np.array([shape[d] for d in self.order] or [1], np.int64)
        moves = np.array([steps[d] for d in self.order] or [1], np.int64)
        key, wide = int(self.key), self.dtype == torch.float64
        flat = out.as_strided((span,), (1,)).numpy()
        _fill(
            flat, moves, self.places(), counts, _KINDS[self.kind], wide, key & _MASK, key >> 32, self.ends()
        )
        return out


def _philox(*given: Any) -> Tensor:
    draw = _Draw(*given)
    return draw.fill(draw.empty(draw.dtype))


def _philox_out(*given: Any, out: Tensor) -> Tensor:
    return _Draw(*given).fill(out)


def _philox_fake(*given: Any) -> Tensor:
    draw = _Draw(*given)
    return draw.empty(draw.dtype, draw.indices[0].device if draw.indices else "cpu")


def _define() -> Any:
    """The operator as PyTorch knows it: kernels for the CPU, a shape for fakes."""
    make: Any = torch.library.Library
    library = make("lowtide", "DEF")
    library.define(f"philox({_ARGUMENTS}) -> Tensor")
    library.define(f"philox.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")
    for key in ("CPU", "BackendSelect"):  # the latter for calls without a tensor
        library.impl("philox", _philox, key)
    library.impl("philox.out", _philox_out, "CPU")
    torch.library.register_fake("lowtide::philox", _philox_fake, lib=library)
    return library


_LIBRARY = _define()  # PyTorch forgets an operator whose library is gone
