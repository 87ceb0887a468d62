"""Compiled loops: one typed door to numba.

Problem.  Schedulers and placers visit millions of states; numba's own decorator is untyped, so that
mypy --strict would lose the signature of every function behind it.

Method.  `kernel` compiles at the first call and keeps the result on disk, beside the source or in the
user's cache.

Invariants.  A kernel is an ordinary function: same arguments, same result, no global state.  All integers
are int64; overflow wraps.

Not done.  Threads: callers decide what runs beside what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

__all__ = ["inlined", "kernel"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


def kernel(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """`function`, compiled when it is first called."""
    return cast("Callable[Args, Result]", numba.njit(cache=True)(function))


def inlined(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """A kernel that becomes part of those that call it, whose loops then stay loops of vectors."""
    return cast("Callable[Args, Result]", numba.njit(cache=True, inline="always")(function))
