"""Limits as people write them ("50%", "2GiB", "1.1x"), and numbers as people read them.

Problem.  A limit is typed by hand, so a typing error must be refused, not guessed: "2G" is two
different numbers and "512" has no unit.

Method.  One regular expression for a number with a suffix, one table of units.  Whole numbers that
come from Python are bytes; strings always carry a unit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lowtide.errors import UsageError

__all__ = [
    "MemoryLimit",
    "format_bytes",
    "format_percent",
    "format_ratio",
    "format_seconds",
    "parse_bytes",
    "parse_latency",
    "parse_memory",
]

UNIT_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NUMBER = re.compile(r"\s*(?P<sign>[+-]?)(?P<number>\d+\.?\d*|\.\d+)\s*(?P<unit>[A-Za-z%]*)\s*\Z")
_MEMORY_REMEDY = 'write a share of eager\'s peak such as "50%", or bytes such as "512MiB" or "2GiB"'
_LATENCY_REMEDY = 'write a multiple of eager\'s latency such as "1.1x"'


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the total peak: bytes, or a share of eager's peak; exactly one is set."""

    limit_bytes: int | None = None
    share: float | None = None

    def resolve(self, eager_peak_bytes: int) -> int:
        """The limit in bytes; a share is rounded down to whole bytes."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        assert self.share is not None
        return math.floor(self.share * eager_peak_bytes)

    def __str__(self) -> str:
        if self.limit_bytes is not None:
            return format_bytes(self.limit_bytes)
        assert self.share is not None
        return format_percent(self.share)


def _split(text: str, remedy: str, what: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None:
        raise UsageError(f"{what} {text!r} is not a number with a unit", remedy=remedy)
    number = float(match["number"])
    if match["sign"] == "-" or number == 0:
        raise UsageError(f"{what} {text!r} is not more than zero", remedy=remedy)
    return number, match["unit"]


def parse_bytes(text: str) -> int:
    """ "2GiB" -> 2147483648; a unit is needed, decimals are allowed, the result is rounded down."""
    number, unit = _split(text, _MEMORY_REMEDY, "memory")
    if not unit:
        raise UsageError(f"memory {text!r} has no unit", remedy=_MEMORY_REMEDY)
    if unit.lower() in {"k", "m", "g", "t"}:
        letter = unit.upper()
        raise UsageError(
            f"memory {text!r} has an ambiguous unit",
            remedy=f"write {letter}iB (powers of 1024) or {letter}B (powers of 1000)",
        )
    if unit.lower() not in UNIT_BYTES:
        raise UsageError(f"memory {text!r} has the unknown unit {unit!r}", remedy=_MEMORY_REMEDY)
    result = math.floor(number * UNIT_BYTES[unit.lower()])
    if result < 1:
        raise UsageError(f"memory {text!r} is less than one byte", remedy=_MEMORY_REMEDY)
    return result


def parse_memory(limit: str | int) -> MemoryLimit:
    """A memory limit from "50%", "2GiB" or a whole number of bytes.

    Raises UsageError for anything else, zero and negative numbers included.
    """
    if isinstance(limit, bool) or not isinstance(limit, str | int):
        raise UsageError(f"memory {limit!r} is neither text nor a whole number", remedy=_MEMORY_REMEDY)
    if isinstance(limit, int):
        if limit <= 0:
            raise UsageError(f"memory {limit} is not more than zero", remedy=_MEMORY_REMEDY)
        return MemoryLimit(limit_bytes=limit)
    if limit.rstrip().endswith("%"):
        number, unit = _split(limit, _MEMORY_REMEDY, "memory")
        if unit != "%":
            raise UsageError(f"memory {limit!r} is not a percentage", remedy=_MEMORY_REMEDY)
        return MemoryLimit(share=number / 100)
    return MemoryLimit(limit_bytes=parse_bytes(limit))


def parse_latency(limit: str | float) -> float:
    """A latency limit as a multiple of eager's: "1.1x", "110%" or the number 1.1."""
    if isinstance(limit, bool) or not isinstance(limit, str | int | float):
        raise UsageError(f"latency {limit!r} is neither text nor a number", remedy=_LATENCY_REMEDY)
    if not isinstance(limit, str):
        if not (math.isfinite(limit) and limit > 0):
            raise UsageError(f"latency {limit} is not more than zero", remedy=_LATENCY_REMEDY)
        return float(limit)
    number, unit = _split(limit, _LATENCY_REMEDY, "latency")
    if unit.lower() == "x":
        return number
    if unit == "%":
        return number / 100
    problem = f"has the unknown unit {unit!r}" if unit else "has no unit"
    raise UsageError(f"latency {limit!r} {problem}", remedy=_LATENCY_REMEDY)


def format_bytes(nbytes: int) -> str:
    """ "179.5 MiB": the largest binary unit that keeps the number at least 1, one decimal."""
    size = float(abs(nbytes))
    sign = "-" if nbytes < 0 else ""
    if size < 1024:
        return f"{sign}{int(size)} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:
            return f"{sign}{size:.1f} {unit}"
    return f"{sign}{size / 1024:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """ "184 ms", "2.31 s", "3 min 20 s": three significant digits."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def _three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def format_percent(share: float) -> str:
    """0.5 -> "50%", 0.3333 -> "33.3%"."""
    return f"{share * 100:.1f}".removesuffix(".0") + "%"


def format_ratio(ratio: float) -> str:
    """1.1 -> "1.10x"."""
    return f"{ratio:.2f}x"
