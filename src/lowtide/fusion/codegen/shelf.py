"""Compiled functions on disk, one entry per function: what one plan compiled, the next one finds.

Problem.  Plans of one model share most of their kernels, and a saved plan has all of them, but a library's
file is named after its whole text.

Method.  Beside the libraries lies one small file per function: a digest of its text and of everything that
decides its bytes, with the library that has it and its name there.  Functions that are on no library yet are
compiled together, in two halves at the same time where they are many.

Invariants.  A function from the shelf was compiled from this very text, by this compiler, for this processor.
A library that is gone or does not pass its test is compiled again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lowtide.fusion.codegen.c import Source
from lowtide.fusion.codegen.compiler import (
    CompileError,
    cache_folder,
    compile_source,
    digest_of,
    load_library,
)
from lowtide.fusion.codegen.mathlib import preamble

__all__ = ["Compiled", "functions_of"]

Function = Callable[..., int]


@dataclass(frozen=True)
class Compiled:
    """A kernel's function, and the one that prepares what it keeps of constants (None: it keeps nothing)."""

    call: Function
    prepare: Function | None = None


_MANY = 8
"""Functions that are worth a second compiler at the same time."""


def functions_of(sources: Sequence[Source]) -> list[Compiled]:
    """The compiled functions of `sources`, in order; equal texts share one.  Raises CompileError."""
    distinct = {source.text: source for source in sources}
    libraries: dict[str, ctypes.CDLL | None] = {}
    found = {text: _on_shelf(source, libraries) for text, source in distinct.items()}
    missing = [distinct[text] for text, function in found.items() if function is None]
    found.update(_compile(missing))
    return [_present(found[source.text]) for source in sources]


def _present(function: Compiled | None) -> Compiled:
    assert function is not None
    return function


def _compile(sources: Sequence[Source]) -> dict[str, Compiled | None]:
    halves = [sources[0::2], sources[1::2]] if len(sources) >= _MANY else [sources]
    with ThreadPoolExecutor(len(halves)) as pool:
        made: Iterable[dict[str, Compiled | None]] = pool.map(
            _compile_unit, [half for half in halves if half]
        )
        return {text: function for unit in made for text, function in unit.items()}


def _compile_unit(sources: Sequence[Source]) -> dict[str, Compiled | None]:
    names = {source.text: f"lt_k{number}" for number, source in enumerate(sources)}
    torch, brgemm = any(s.uses_torch for s in sources), any(s.uses_brgemm for s in sources)
    head = preamble(torch, brgemm, any(s.uses_windows for s in sources))
    parts = [source.text.replace("KERNEL", names[source.text]) for source in sources]
    path, library = _load("\n".join([head, *parts, ""]), torch, brgemm)
    functions: dict[str, Compiled | None] = {}
    for source in sources:
        entry = _entry(source)
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(f"{path.name} {names[source.text]}")
        functions[source.text] = _function(library, names[source.text])
    return functions


def _load(text: str, uses_torch: bool, uses_brgemm: bool) -> tuple[Path, ctypes.CDLL]:
    """The library; with BLAS in place of the micro-kernel if that is missing or computes something else."""
    try:
        path = compile_source(text, uses_torch or uses_brgemm)
        library = load_library(path)
        if not uses_brgemm or library.lt_self_test() == 0:
            return path, library
    except OSError:
        if not uses_brgemm:
            raise
    path = compile_source("#define LT_BLAS\n" + text, True)
    return path, load_library(path)


def _entry(source: Source) -> Path:
    head = preamble(source.uses_torch, source.uses_brgemm, source.uses_windows)
    return cache_folder() / "functions" / digest_of(head, source.text)


def _on_shelf(source: Source, libraries: dict[str, ctypes.CDLL | None]) -> Compiled | None:
    try:
        name, symbol = _entry(source).read_text().split()
    except (OSError, ValueError):
        return None
    if name not in libraries:
        libraries[name] = _reload(cache_folder() / name)
    library = libraries[name]
    return None if library is None else _function(library, symbol)


def _reload(path: Path) -> ctypes.CDLL | None:
    """A library that was compiled before; None if it is not what it was."""
    try:
        library = load_library(path)
    except (OSError, CompileError):
        return None
    test = getattr(library, "lt_self_test", None)
    return library if test is None or test() == 0 else None


def _function(library: ctypes.CDLL, name: str) -> Compiled | None:
    function = getattr(library, name, None)
    if function is None:
        return None
    function.restype = ctypes.c_long
    return Compiled(function, getattr(library, f"{name}_prepare", None))
