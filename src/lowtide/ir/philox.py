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

    element e            word e // 16 % 4 of block 16 * (e // 64) + e % 16, four words of 32 bits: 64 elements
                         are 16 blocks, the words of each 16 apart, so vectors are stored as they are made
    bernoulli(p)         word < p * 2**32
    uniform(a, b)        a + (b - a) * (word >> 8) / 2**24
    normal(mean, std)    Box and Muller on words 0 and 1, or 2 and 3, of the block: cosine, then sine
    in float64           uniform and normal have a block each element, and 53 bits of two words

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

from lowtide.kernel import inlined, kernel

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
def _block_of(e: int) -> int:
    return 16 * (e >> 6) + (e & 15)


@kernel
def _shaped(kind: int, j: int, one: float, two: float, first: float, second: float, below: float) -> float:
    """An element from a number in [0, 1), or for the normal distribution from two, the first above 0."""
    if kind == 1:
        return min(first + (second - first) * one, below)
    radius, angle = math.sqrt(-2.0 * math.log(one)), two * (2.0 * math.pi)
    return first + second * radius * (math.cos(angle) if j & 1 == 0 else math.sin(angle))


_L = (1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11, 1 / 13)
_S = (1 / 6, 1 / 20, 1 / 42, 1 / 72, 1 / 110)
_C = (1 / 2, 1 / 12, 1 / 30, 1 / 56, 1 / 90)


@inlined
def _gauss(odd: bool, mantissa: float, exponent: float, two: int) -> float:
    """Box and Muller for ``mantissa * 2**exponent``, in (0, 1], and the angle `two` of 2**32 to the circle.

    Series, to 1e-8: the logarithm of a mantissa in [1, 2), sine and cosine of half a quarter either way.
    """
    z: float = np.true_divide(
        mantissa - 1.4142135623730951, mantissa + 1.4142135623730951
    )  # `/` checks for 0
    q = z * z
    odd_powers = 1.0 + q * (_L[0] + q * (_L[1] + q * (_L[2] + q * (_L[3] + q * (_L[4] + q * _L[5])))))
    log = exponent * 0.6931471805599453 + 0.34657359027997264 + 2.0 * z * odd_powers
    y = ((two & 0x3FFFFFFF) * 2.0**-30 - 0.5) * 1.5707963267948966
    s = y * y
    sine = y * (1 - s * _S[0] * (1 - s * _S[1] * (1 - s * _S[2] * (1 - s * _S[3] * (1 - s * _S[4])))))
    cosine = 1 - s * _C[0] * (1 - s * _C[1] * (1 - s * _C[2] * (1 - s * _C[3] * (1 - s * _C[4]))))
    quarter = ((two >> 30) + (3 if odd else 0)) & 3  # a sine is the cosine of a quarter less
    side = (cosine - sine if quarter & 1 == 0 else cosine + sine) * 0.7071067811865476
    return math.sqrt(max(-2.0 * log, 0.0)) * (-side if quarter == 1 or quarter == 2 else side)


@kernel
def _from_words(kind: int, j: int, w: tuple[int, int, int, int], ends: Any) -> float:
    """The element at word `j` of a block of 32-bit words."""
    word = w[0] if j == 0 else w[1] if j == 1 else w[2] if j == 2 else w[3]
    if kind == 0:
        return 1.0 if word < ends[0] else 0.0
    if kind == 1:
        return _shaped(1, j, (word >> 8) * 2.0**-24, 0.0, ends[0], ends[1], ends[2])
    one, two = (w[0], w[1]) if j < 2 else (w[2], w[3])
    mantissa, exponent = math.frexp(one + 1.0)
    made: float = ends[0] + ends[1] * _gauss(j & 1 == 1, 2.0 * mantissa, exponent - 33.0, two)
    return made


@kernel
def _element(kind: int, wide: bool, e: int, k0: int, k1: int, ends: Any) -> float:
    """Element `e`, on its own."""
    if not wide or kind == 0:
        block = _block_of(e)
        w = words(block & 0xFFFFFFFF, (block >> 32) & 0xFFFFFFFF, 0, 0, k0, k1)
        return _from_words(kind, (e >> 4) & 3, w, ends)
    w = words(e & 0xFFFFFFFF, (e >> 32) & 0xFFFFFFFF, 1, 0, k0, k1)
    one, two = ((w[0] << 21) | (w[1] >> 11)) * 2.0**-53, ((w[2] << 21) | (w[3] >> 11)) * 2.0**-53
    return _shaped(kind, 0, one if kind == 1 else one + 2.0**-53, two, ends[0], ends[1], ends[2])


@kernel
def _many_words(first: int, count: int, k0: int, k1: int, c0: Ints, c1: Ints, c2: Ints, c3: Ints) -> None:
    """`words` of `count` blocks from `first`, round by round: the loop over blocks is one of vectors."""
    for i in range(count):
        c0[i], c1[i] = (first + i) & 0xFFFFFFFF, ((first + i) >> 32) & 0xFFFFFFFF
        c2[i], c3[i] = 0, 0
    for _ in range(10):
        for i in range(count):
            left, right = c0[i] * 0xD2511F53, c2[i] * 0xCD9E8D57
            c0[i] = ((right >> 32) & 0xFFFFFFFF) ^ c1[i] ^ k0
            c2[i] = ((left >> 32) & 0xFFFFFFFF) ^ c3[i] ^ k1
            c1[i], c3[i] = right & 0xFFFFFFFF, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF


@kernel
def _chunks(out: Any, at: int, e: int, count: int, kind: int, k0: int, k1: int, ends: Any) -> None:
    """`count` times 64 elements from `e`, a multiple of 64; 128 blocks at a time."""
    bound, low, width, below = int(ends[0]), ends[0], ends[1] - ends[0], ends[2]
    state, real = np.empty((4, 128), np.int64), np.empty(16)
    lanes, done, bits = state.reshape((4, 8, 16)), 0, real.view(np.int64)
    while done < count:
        now, start = min(8, count - done), at + 64 * done
        _many_words(16 * ((e >> 6) + done), 16 * now, k0, k1, state[0], state[1], state[2], state[3])
        table = out[start : start + 64 * now].reshape((now, 4, 16))
        for c in range(now):
            for j in range(4):
                if kind == 0:
                    for i in range(16):
                        table[c, j, i] = 1.0 if lanes[j, c, i] < bound else 0.0
                elif kind == 1:
                    for i in range(16):
                        table[c, j, i] = min(low + width * ((lanes[j, c, i] >> 8) * 2.0**-24), below)
                else:
                    for i in range(16):
                        real[i] = lanes[j & 2, c, i] + 1.0
                    for i in range(16):
                        exponent = (bits[i] >> 52) - 1055.0
                        bits[i] = (bits[i] & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000
                        made = _gauss(j & 1 == 1, real[i], exponent, lanes[j | 1, c, i])
                        table[c, j, i] = ends[0] + ends[1] * made
        done += now


@kernel
def _run(out: Any, at: int, e: int, length: int, kind: int, wide: bool, k0: int, k1: int, ends: Any) -> None:
    """Elements `e` to ``e + length`` one after the other from `at`."""
    j = 0
    if length >= 64 and not (wide and kind != 0):
        while (e + j) & 63:
            out[at + j] = _element(kind, wide, e + j, k0, k1, ends)
            j += 1
        count = (length - j) >> 6
        _chunks(out, at + j, e + j, count, kind, k0, k1, ends)
        j += 64 * count
    while j < length:
        out[at + j] = _element(kind, wide, e + j, k0, k1, ends)
        j += 1


@kernel
def _fill(
    out: Any, strides: Ints, places: Ints, counts: Ints, base: int, length: int, kind: int, wide: bool,
    k0: int, k1: int, ends: Any,
) -> None:  # fmt: skip
    """All runs of `length` elements: one for each combination of the outer dimensions' `places`, which are
    end to end, `counts` of each.
    """
    rank = counts.size
    starts, position = np.zeros(rank, np.int64), np.zeros(rank, np.int64)
    for d in range(1, rank):
        starts[d] = starts[d - 1] + counts[d - 1]
    for _ in range(counts.prod()):
        at, e = 0, base
        for d in range(rank):
            at += position[d] * strides[d]
            e += places[starts[d] + position[d]]
        _run(out, at, e, length, kind, wide, k0, k1, ends)
        for d in range(rank - 1, -1, -1):
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

    def places(self) -> list[Ints]:
        """Position times stride of the whole, for every dimension in the order of memory."""
        given, shape = dict(zip(self.dims, self.indices, strict=True)), self.shape
        return [
            given[d].numpy() if d in given else np.arange(shape[d], dtype=np.int64) * self.strides[d]
            for d in self.order
        ]

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
        span = 1 + sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
        flat = out.as_strided((span,), (1,)).numpy()
        moves, places = [out.stride(d) for d in self.order], self.places()
        base, length = 0, 1
        while moves and _goes_on(places[-1], moves[-1], length):
            moves.pop()
            last = places.pop()
            base, length = base + int(last[0]), length * last.size
        counts = np.array([each.size for each in places], np.int64)
        outer = np.concatenate([*places, np.zeros(0, np.int64)])
        key, wide = int(self.key), self.dtype == torch.float64
        given = (base, length, _KINDS[self.kind], wide, key & _MASK, key >> 32, self.ends())
        _fill(flat, np.array(moves, np.int64), outer, counts, *given)
        return out


def _goes_on(places: Ints, move: int, length: int) -> bool:
    """Whether a dimension continues a run of `length` elements that follow each other, in memory as in the
    whole.
    """
    return places.size == 1 or (move == length and int(places[1] - places[0]) == length)


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
