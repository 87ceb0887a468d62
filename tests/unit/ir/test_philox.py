"""Philox 4x32-10: known answers, the same bits part by part, and the distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowtide.ir.philox import KEY_BITS, node_key, words

# Random123's kat_vectors: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
KEY = 0x0005_1234_89AB_CDEF


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer) -> None:
    assert words(*counter, *key) == answer


def draw(
    shape: tuple[int, ...],
    kind: str = "bernoulli",
    first: float = 0.9,
    second: float = 0.0,
    dtype: torch.dtype = torch.float32,
    *,
    part: tuple[slice, ...] = (),
    order: tuple[int, ...] | None = None,
    key: int = KEY,
    cut: bool = True,
) -> Tensor:
    """The whole tensor, or the part of it that the slices say, drawn on its own."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    indices = [torch.arange(size) * step for size, step in zip(shape, strides, strict=True)]
    for dim, piece in enumerate(part):
        indices[dim] = indices[dim][piece]
    dims = list(range(len(shape))) if cut else []
    place = (indices if cut else [], dims, shape, strides, order or tuple(range(len(shape))))
    return torch.ops.lowtide.philox(float(key), *place, kind, first, second, dtype)


def element_by_hand(e: int) -> float:
    """A mask element as the module's docstring says."""
    word = words(16 * (e // 64) + e % 16, 0, 0, 0, KEY & 0xFFFFFFFF, KEY >> 32)[e // 16 % 4]
    return float(word < 0.9 * 2**32)


def test_a_mask_is_what_the_counter_says() -> None:
    mask = draw((3, 67))
    assert mask.flatten().tolist() == [element_by_hand(e) for e in range(201)]


def test_a_normal_number_is_box_and_mullers() -> None:
    """The series against the library's functions."""
    found = draw((1 << 12,), "normal", 1.0, 2.0).tolist()
    for e, number in enumerate(found):
        w = words(16 * (e // 64) + e % 16, 0, 0, 0, KEY & 0xFFFFFFFF, KEY >> 32)
        one, two = w[:2] if e // 16 % 4 < 2 else w[2:]
        radius, angle = math.sqrt(-2 * math.log((one + 1) / 2**32)), two / 2**32 * 2 * math.pi
        wanted = radius * (math.sin(angle) if e // 16 % 2 else math.cos(angle))
        assert abs(number - (1.0 + 2.0 * wanted)) < 2e-6


SPLITS = [
    (slice(0, 2),),
    (slice(2, 5),),
    (slice(None), slice(1, 2)),
    (slice(1, 4), slice(None), slice(3, 10)),
    (slice(None), slice(None), slice(5, 6)),
    (slice(1, 5), slice(None), slice(7, 80)),
]


@pytest.mark.parametrize("part", SPLITS)
@pytest.mark.parametrize(
    ("kind", "first", "second"), [("bernoulli", 0.9, 0.0), ("uniform", -1.0, 2.0), ("normal", 1.0, 3.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_part_has_the_bits_of_the_whole(part, kind: str, first: float, second: float, dtype) -> None:
    whole = draw((5, 3, 81), kind, first, second, dtype)
    mine = draw((5, 3, 81), kind, first, second, dtype, part=part)
    assert torch.equal(mine, whole[part])
    assert not torch.equal(whole[0], whole[1])


def test_layout_and_destination_do_not_matter() -> None:
    whole = draw((4, 3, 6))
    other = draw((4, 3, 6), order=(2, 0, 1))
    assert other.stride() == (3, 1, 12) and torch.equal(whole, other)
    room = torch.zeros(4, 6, 12)
    place = [torch.arange(4) * 18, torch.arange(3) * 6, torch.arange(6)]
    given = (float(KEY), place, [0, 1, 2], [4, 3, 6], [18, 6, 1], [0, 1, 2], "bernoulli", 0.9, 0.0)
    out = room[:, ::2, ::2]
    torch.ops.lowtide.philox.out(*given, torch.float32, out=out)
    assert torch.equal(out, whole)
    assert room.sum() == whole.sum(), "something was written outside"
    assert torch.equal(draw((4, 3, 6), cut=False), whole)


def test_masks_do_not_depend_on_the_element_type() -> None:
    masks = [draw((9, 5), dtype=dtype).double() for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])


def test_no_elements_and_one() -> None:
    assert draw((0, 4)).shape == (0, 4)
    assert draw(()).item() == element_by_hand(0)


COUNT = 1 << 18


def deviations(values: Tensor, mean: float, variance: float) -> float:
    """How many standard errors the mean is off."""
    return abs(values.double().mean().item() - mean) / math.sqrt(variance / values.numel())


def serial(values: Tensor, lag: int) -> float:
    """The correlation of neighbours at a distance, in standard errors."""
    centred = values.double() - values.double().mean()
    product = (centred[:-lag] * centred[lag:]).mean() / centred.var()
    return abs(product.item()) * math.sqrt(values.numel() - lag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "first", "second", "mean", "variance", "fourth"),
    [
        ("bernoulli", 0.9, 0.0, 0.9, 0.09, 0.09 * (0.1**3 + 0.9**3)),
        ("uniform", 0.0, 1.0, 0.5, 1 / 12, 1 / 80),
        ("normal", 0.0, 1.0, 0.0, 1.0, 3.0),
    ],
)
def test_distributions(kind, first, second, mean, variance, fourth, dtype) -> None:
    values = draw((COUNT,), kind, first, second, dtype)
    assert deviations(values, mean, variance) < 4.5
    squares = (values.double() - mean) ** 2
    assert deviations(squares, variance, fourth - variance**2) < 4.5
    assert all(serial(values, lag) < 4.5 for lag in (1, 2, 3, 4, 8, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_fills_its_interval_evenly(dtype) -> None:
    values = draw((COUNT,), "uniform", 0.0, 1.0, dtype)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = torch.histc(values.float(), 64, 0.0, 1.0)
    chi2 = ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum().item()
    assert 63 - 5 * math.sqrt(126) < chi2 < 63 + 5 * math.sqrt(126)


def test_uniform_never_reaches_its_end() -> None:
    narrow = draw((4096,), "uniform", 1.0, 1.0 + 2.0**-22)
    assert narrow.max() < 1.0 + 2.0**-22 and narrow.min() >= 1.0


def test_keys_of_nodes_and_steps_differ() -> None:
    keys = [node_key(step, offset) for step in range(64) for offset in range(64)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << KEY_BITS for key in keys) and max(keys) > 1 << (KEY_BITS - 1)
    one, other = (draw((COUNT,), key=node_key(7, offset)) for offset in (0, 1))
    agreement = (one == other).double().mean().item()  # 0.9 * 0.9 + 0.1 * 0.1
    assert abs(agreement - 0.82) < 4.5 * math.sqrt(0.82 * 0.18 / COUNT)
