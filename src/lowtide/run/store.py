"""What was measured before: text by key, in one sqlite file in the user's cache.

Problem.  Measuring an operator takes as long as running it several times; most graphs repeat operators,
and most runs repeat graphs.

Method.  A key names everything the number depends on: the operator with its shapes and strides, the
number of threads, PyTorch's version, the processor, and the code that measures.  The file is only a
cache: one that cannot be read or written is replaced by memory, and entries are never changed.

Not done.  Expiry: an entry is a few hundred bytes.
"""

from __future__ import annotations

import hashlib
import platform
import sqlite3
from contextlib import closing
from functools import cache
from importlib import resources
from pathlib import Path

import platformdirs
import torch

__all__ = ["ProfileStore", "machine_key"]

_SOURCES = ("allocator.py", "calls.py", "hook.cpp", "operands.py", "probe.py", "temps.py", "timing.py")
_BUSY_LIMIT_S = 5.0


class ProfileStore:
    """Text by key; `path` None keeps it in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._memory: dict[str, str] = {}
        self._path = path

    @staticmethod
    @cache
    def default() -> ProfileStore:
        """The store in the user's cache directory; the same one for the whole process."""
        return ProfileStore(Path(platformdirs.user_cache_dir("lowtide")) / "profile.sqlite")

    def read(self, key: str) -> str | None:
        """The text under `key`, or None."""
        if key not in self._memory and self._path is not None and self._path.exists():
            try:
                with closing(self._open(self._path)) as connection:
                    row = connection.execute("SELECT text FROM profile WHERE key = ?", (key,)).fetchone()
            except sqlite3.Error:
                row = None
            if row is not None:
                self._memory[key] = str(row[0])
        return self._memory.get(key)

    def remember(self, key: str, text: str) -> None:
        """Keep `text` under `key` in memory only."""
        self._memory[key] = text

    def write(self, key: str, text: str) -> None:
        """Remember `text` under `key`; in memory only where the file cannot be written."""
        self._memory[key] = text
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open(self._path)) as connection, connection:
                connection.execute("INSERT OR REPLACE INTO profile VALUES (?, ?)", (key, text))
        except (OSError, sqlite3.Error):
            self._path = None

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=_BUSY_LIMIT_S)
        connection.execute("CREATE TABLE IF NOT EXISTS profile (key TEXT PRIMARY KEY, text TEXT NOT NULL)")
        return connection


def machine_key(*parts: str) -> str:
    """A key for something measured here and now, with this number of threads."""
    where = (_measurer(), torch.__version__, _processor(), str(torch.get_num_threads()))
    return hashlib.sha256("\0".join((*where, *parts)).encode()).hexdigest()


@cache
def _measurer() -> str:
    """A digest of the code that measures: what another version measured is not known."""
    package = resources.files("lowtide.run")
    return hashlib.sha256(b"\0".join(package.joinpath(name).read_bytes() for name in _SOURCES)).hexdigest()


@cache
def _processor() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {model or platform.processor()} {capability}"
