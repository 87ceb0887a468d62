"""How much memory this process may still take, and whether an error says that there was none.

Problem.  Where the eager step does not fit, running it means an error at best and a killed process at
worst, so it has to be known before.

Method.  The least of what the kernel tells: memory available to anybody, the process's own limit on address
space (RLIMIT_AS), and the limits of its control groups (version 1 and 2), in which cached file pages count as
free.  What the kernel does not tell limits nothing.

Not done.  Other processes' plans for the same memory; swap space, which is too slow to count on.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_bytes", "out_of_memory"]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_SAYS_SO = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cannot allocate memory",
    "bad_alloc",
)


def free_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Bytes that this process may still take; None if nothing limits it as far as can be told."""
    told = (_available(proc), _address_space(proc), *_group_limits(proc, groups))
    return min((nbytes for nbytes in told if nbytes is not None), default=None)


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had; PyTorch's allocator raises plain RuntimeErrors."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(said in str(error).lower() for said in _SAYS_SO)


def _available(proc: Path) -> int | None:
    return _table(proc / "meminfo", 1024).get("MemAvailable")


def _address_space(proc: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _table(proc / "self" / "status", 1024).get("VmSize")
    return None if limit == resource.RLIM_INFINITY or used is None else max(0, limit - used)


def _group_limits(proc: Path, groups: Path) -> Iterator[int | None]:
    """What is left in each control group that this process is in, and in those around it."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = groups, ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            top = groups / "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
        else:
            continue
        folder = top / path.lstrip("/")
        while folder != top.parent:
            yield _left(folder, *names)
            folder = folder.parent


def _left(folder: Path, limit: str, used: str, *cached: str) -> int | None:
    most, now = _number(folder / limit), _number(folder / used)
    if most is None or now is None:
        return None
    pages = _table(folder / "memory.stat", 1)
    return max(0, most - now + sum(pages.get(name, 0) for name in cached))


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _table(file: Path, unit: int) -> dict[str, int]:
    """Lines such as ``MemAvailable:  123 kB`` or ``inactive_file 123``, in bytes."""
    words = (line.replace(":", " ").split() for line in _lines(file))
    return {each[0]: int(each[1]) * unit for each in words if len(each) > 1 and each[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
