"""The process's own memory as the kernel sees it: resident size and its high-water mark (Linux).

Problem.  Libraries below PyTorch take memory that its allocator never sees; only the kernel knows.

Method.  `malloc_trim` gives free heap pages back, writing 5 to `/proc/self/clear_refs` sets the high-water
mark (VmHWM) to the present resident size (VmRSS), then the call runs.  What it touched is the difference.

Not done.  Exactness: the kernel batches these counters per processor (some 100 KiB), so differences under
`NOISE_BYTES` are reported as zero.  Elsewhere than on Linux everything is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["NOISE_BYTES", "high_water", "high_water_bytes", "reset_high_water", "resident_bytes", "trim_heap"]

T = TypeVar("T")

NOISE_BYTES = 1 << 20

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def _read_status(field: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None


def resident_bytes() -> int | None:
    """VmRSS, or None where it is not known."""
    return _read_status("VmRSS")


def high_water_bytes() -> int | None:
    """VmHWM since the last reset, or None where it is not known."""
    return _read_status("VmHWM")


def reset_high_water() -> bool:
    """Set the high-water mark to the present resident size; False if the kernel does not allow it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def trim_heap() -> None:
    """Give free heap pages back to the kernel, where the C library can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library: the heap stays as it is
        return


def high_water(call: Callable[[], T]) -> tuple[T, int | None]:
    """Run `call`; its result and how far the resident size rose above its start (None: not known)."""
    trim_heap()
    before = resident_bytes() if reset_high_water() else None
    result = call()
    after = high_water_bytes()
    if before is None or after is None:
        return result, None
    rise = after - before
    return result, rise if rise >= NOISE_BYTES else 0
