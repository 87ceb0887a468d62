"""The allocation hook from Python: compiled on first use, loaded with ctypes, tested before it is trusted.

Problem.  Results and temporaries of most ATen operators come from the CPU allocator.  A plan wants
them at planned addresses, and a probe wants to know what an operator asks for.

Method.  `hook.cpp` is a `c10::Allocator` in front of PyTorch's own.  It is compiled with the system's
C++ compiler (about a second) into the user's cache, keyed by source, compiler and PyTorch build.
`Hook.record` logs the requests of one call; a `Table` holds the planned addresses of all steps of a
plan, and one machine word, `Table.step`, says which step is running: writing it is all that a step costs.

Invariants.  See `hook.cpp`: a request that is not exactly the recorded one goes to the base
allocator, and arena memory lives as long as any data pointer into it, whoever holds that.

Not done.  Windows and macOS flags; other devices.  Without a compiler `load_hook` warns once and
returns None, and the executors copy results into place instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
import torch

__all__ = ["Event", "Hook", "HookUnavailable", "Request", "Table", "load_hook"]

T = TypeVar("T")

_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_LIMIT_S = 120.0


class HookUnavailable(RuntimeError):
    """The allocation hook cannot be compiled, loaded or trusted here; the message says why."""


@dataclass(frozen=True, slots=True)
class Event:
    """One request (`nbytes` > 0) or release (`nbytes` is None) of the allocator, in time order."""

    address: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Request:
    """Where one request of a step is to be answered: `offset` bytes into `slot` (0: the arena).

    `temporary` says that it is released before the step ends.
    """

    nbytes: int
    offset: int
    slot: int = 0
    temporary: bool = False


class Table:
    """The planned requests of every step of one plan, as the hook reads them.

    Steps are numbered from 1; step 0 serves nothing.  `step` is the word that selects one: write
    `table.step.value = k` before the operator of step k runs.
    """

    def __init__(self, library: ctypes.CDLL, steps: Sequence[Sequence[Request]], slots: int) -> None:
        first, entries = [0, 0], list[int]()
        for requests in steps:
            for request in requests:
                entries += (request.offset, request.nbytes, request.slot, request.temporary)
            first.append(len(entries) // 4)
        self._library = library
        self._handle = library.lt_table_new(
            len(first) - 1,
            (ctypes.c_int64 * len(first))(*first),
            (ctypes.c_int64 * len(entries))(*entries),
            slots,
        )
        weakref.finalize(self, library.lt_table_free, self._handle)
        start = library.lt_table_words(self._handle)
        self.step, self._served, self._missed, self._missed_bytes, self._kept = (
            ctypes.c_int64.from_address(start + 8 * k) for k in range(5)
        )
        self._misses = (ctypes.c_int64 * (len(first) - 1)).from_address(library.lt_table_misses(self._handle))
        self._bases = (ctypes.c_int64 * (2 * slots))()

    def enter(self, slots: Sequence[tuple[int, int]]) -> int | None:
        """Serve the calling thread; `slots` are (address, bytes), the arena first.

        Returns a token for `leave`.  Every address must stay valid until then.
        """
        bases = self._bases
        for position, (address, nbytes) in enumerate(slots):
            bases[2 * position] = address
            bases[2 * position + 1] = nbytes
        token: int | None = self._library.lt_enter(self._handle, bases)
        return token

    def leave(self, token: int | None) -> None:
        """Stop serving the calling thread."""
        self._library.lt_leave(token)

    @property
    def served(self) -> int:
        """Requests answered from planned addresses, since the table was made."""
        return self._served.value

    @property
    def missed(self) -> int:
        """Requests that went to the base allocator while the table was entered."""
        return self._missed.value

    @property
    def missed_bytes(self) -> int:
        """Bytes of the missed requests."""
        return self._missed_bytes.value

    @property
    def kept_step(self) -> int:
        """A step whose operator kept a temporary beyond its end (0: none): it must not be served."""
        return self._kept.value

    def misses(self) -> tuple[int, ...]:
        """Missed requests per step number."""
        return tuple(self._misses)


class Hook:
    """The installed hook."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def new_arena(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of `nbytes` bytes (at least one), 64-byte aligned, whose memory is an arena."""
        self._library.lt_next_is_arena(1)
        try:
            return torch.empty(max(1, nbytes), dtype=torch.uint8)
        finally:
            self._library.lt_next_is_arena(0)

    def arena_count(self) -> int:
        """Arenas that are alive in this process."""
        count: int = self._library.lt_arena_count()
        return count

    def new_table(self, steps: Sequence[Sequence[Request]], slots: int = 1) -> Table:
        """A table whose step k + 1 owns `steps[k]`; `slots` counts the arena and the output slots."""
        return Table(self._library, steps, slots)

    def glance(self, addresses: Sequence[int], spans: Sequence[int]) -> int:
        """A hash of some words of each of the blocks of `spans` bytes: another one if contents changed as a
        whole.
        """
        blocks = (ctypes.c_int64 * (2 * len(addresses)))()
        blocks[0::2], blocks[1::2] = list(addresses), list(spans)
        found: int = self._library.lt_glance(len(addresses), blocks)
        return found

    def record(self, call: Callable[[], T]) -> tuple[T, tuple[Event, ...], int]:
        """Run `call`; its result, the allocator events of this thread, bytes that other threads took."""
        self._library.lt_record_start()
        foreign = ctypes.c_int64()
        events = (ctypes.c_int64 * 0)()
        try:
            result = call()
        finally:
            count = self._library.lt_record_stop(ctypes.byref(foreign))
            events = (ctypes.c_int64 * (2 * count))()
            self._library.lt_record_take(events)
        log = tuple(
            Event(events[k], events[k + 1] if events[k + 1] >= 0 else None) for k in range(0, 2 * count, 2)
        )
        return result, log, foreign.value


def load_hook() -> Hook | None:
    """The process's hook; without one, a warning (the first time) and None."""
    hook, why = _load_once()
    if hook is None and why:
        _warn_once(why)
    return hook


@functools.cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"Lowtide runs without its allocation hook ({why}): results of operators without an out= variant are "
        "copied into the arena, which costs time and memory. Install a C++ compiler (g++) to avoid this.",
        RuntimeWarning,
        stacklevel=3,
    )


@functools.cache
def _load_once() -> tuple[Hook | None, str]:
    try:
        return open_hook(compile_hook(_cache_directory())), ""
    except HookUnavailable as error:
        return None, str(error)


def _cache_directory() -> Path:
    return Path(platformdirs.user_cache_dir("lowtide")) / "hook"


def find_compiler() -> str:
    """Path of a C++ compiler: $CXX, then the usual names.  Raises HookUnavailable."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise HookUnavailable(f"no C++ compiler: none of $CXX, {', '.join(_COMPILERS)} is on the path")


def compile_hook(directory: Path) -> Path:
    """The compiled hook, from `directory` or made there.

    Raises HookUnavailable with the compiler's first error.
    """
    compiler = find_compiler()
    source = resources.files("lowtide.run").joinpath("hook.cpp").read_text()
    target = directory / f"hook-{_key(compiler, source)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HookUnavailable(f"the cache {directory} cannot be written: {error}") from error
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / "hook.so"
        code = Path(scratch) / "hook.cpp"
        code.write_text(source)
        _run_compiler([compiler, *_flags(), str(code), "-o", str(built), *_link_flags()])
        os.replace(built, target)  # whole or not at all: another process may look
    return target


def _key(compiler: str, source: str) -> str:
    version = _run_compiler([compiler, "--version"])
    parts = (source, compiler, version, torch.__version__, str(torch.version.git_version), platform.machine())
    return hashlib.sha256("\0".join((*parts, *_flags())).encode()).hexdigest()[:16]


def _flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return ["-O2", "-std=c++17", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{include}"]


def _link_flags() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10"]


def _run_compiler(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HookUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise HookUnavailable(f"{command[0]} failed: {first}")
    return done.stdout


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "lt_install": (ctypes.c_int, []),
    "lt_uninstall": (None, []),
    "lt_next_is_arena": (None, [ctypes.c_int]),
    "lt_arena_count": (ctypes.c_int64, []),
    "lt_record_start": (None, []),
    "lt_record_stop": (ctypes.c_int64, [ctypes.c_void_p]),
    "lt_record_take": (None, [ctypes.c_void_p]),
    "lt_table_new": (ctypes.c_void_p, [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]),
    "lt_table_free": (None, [ctypes.c_void_p]),
    "lt_table_words": (ctypes.c_void_p, [ctypes.c_void_p]),
    "lt_table_misses": (ctypes.c_void_p, [ctypes.c_void_p]),
    "lt_enter": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
    "lt_leave": (None, [ctypes.c_void_p]),
    "lt_glance": (ctypes.c_uint64, [ctypes.c_int64, ctypes.c_void_p]),
}


def open_hook(path: Path) -> Hook:
    """Load, install and test the compiled hook at `path`.

    Raises HookUnavailable; then nothing stays installed.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise HookUnavailable(f"{path} cannot be loaded: {error}") from error
    if not library.lt_install():
        raise HookUnavailable("another allocator is installed and does not yield")
    hook = Hook(library)
    if not _test(hook):
        library.lt_uninstall()
        raise HookUnavailable(f"{path} failed its self-test")
    return hook


def _test(hook: Hook) -> bool:
    """Whether recording sees a result, and serving puts it where it was planned and nowhere else."""
    given = torch.arange(64, dtype=torch.float32)  # without a Python number: those are allocated too
    result, events, _ = hook.record(lambda: torch.neg(given))
    requests = [event for event in events if event.nbytes == 256]
    if not requests or requests[-1].address != result.data_ptr():
        return False
    arena = hook.new_arena(1024)
    table = hook.new_table([[Request(256, 512)]])
    token = table.enter([(arena.data_ptr(), 1024)])
    try:
        table.step.value = 1
        served = torch.neg(given)
        table.step.value = 0
        missed = torch.neg(given)
    finally:
        table.leave(token)
    placed = served.data_ptr() == arena.data_ptr() + 512 and missed.data_ptr() != served.data_ptr()
    return placed and torch.equal(served, result) and torch.equal(missed, result)
