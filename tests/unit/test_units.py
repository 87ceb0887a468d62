"""Limits as typed, numbers as printed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import UsageError
from lowtide.units import (
    MemoryLimit,
    format_bytes,
    format_percent,
    format_ratio,
    format_seconds,
    parse_bytes,
    parse_latency,
    parse_memory,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("512kib", 512 << 10),
        ("2GB", 2 * 10**9),
        ("7B", 7),
        (" .5KiB ", 512),
        ("1TiB", 1 << 40),
    ],
)
def test_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_memory(text) == MemoryLimit(limit_bytes=nbytes)


@pytest.mark.parametrize(("text", "share"), [("50%", 0.5), ("12.5 %", 0.125), ("150%", 1.5)])
def test_share(text: str, share: float) -> None:
    assert parse_memory(text) == MemoryLimit(share=share)
    assert parse_memory(text).resolve(1001) == math.floor(1001 * share)


def test_whole_number_is_bytes() -> None:
    assert parse_memory(4096).resolve(1) == 4096


@pytest.mark.parametrize(
    ("limit", "fragment"),
    [
        ("512", "has no unit"),
        ("2G", "write GiB (powers of 1024) or GB"),
        ("5z", "unknown unit 'z'"),
        ("", "not a number"),
        ("half", "not a number"),
        ("1e3MiB", "unit"),
        ("-5%", "not more than zero"),
        ("0GiB", "not more than zero"),
        ("nan%", "not a number"),
        ("5%%", "not a percentage"),
        ("0.1B", "less than one byte"),
        (0, "not more than zero"),
        (-1, "not more than zero"),
        (True, "neither text nor a whole number"),
        (0.5, "neither text nor a whole number"),
    ],
)
def test_bad_memory_is_named(limit: str | int, fragment: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_memory(limit)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "ratio"), [("1.10x", 1.1), ("2X", 2.0), ("110%", 1.1), (1.25, 1.25), (1, 1.0)]
)
def test_latency(limit: str | float, ratio: float) -> None:
    assert parse_latency(limit) == pytest.approx(ratio)


@pytest.mark.parametrize("limit", ["1.1", "x", "1.1s", "0x", "-1x", 0.0, -1.0, math.nan, math.inf, True])
def test_bad_latency_is_refused(limit: str | float) -> None:
    with pytest.raises(UsageError, match="latency"):
        parse_latency(limit)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (188_227_584, "179.5 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=1, max_value=1 << 50))
def test_printed_bytes_read_back_within_rounding(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.051)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-6, "2.00 µs"),
        (0.0123, "12.3 ms"),
        (0.184, "184 ms"),
        (2.31, "2.31 s"),
        (59.94, "59.9 s"),
        (200, "3 min 20 s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_shares() -> None:
    assert format_percent(0.5) == "50%"
    assert format_percent(1 / 3) == "33.3%"
    assert format_ratio(1.1) == "1.10x"
