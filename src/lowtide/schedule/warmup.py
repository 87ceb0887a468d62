"""Compile every kernel of this package before a clock runs.

Problem.  The first call of a kernel on a machine compiles it (about 20 s for all of them together, once,
then kept on disk); a search with a time limit should not pay for that.

Method.  A problem of three tasks goes through every scheduler.

Invariants.  Nothing is returned and nothing changes but numba's cache.

Not done.  Compiling on both cores: numba compiles one function at a time.
"""

from __future__ import annotations

import numpy as np

from lowtide.schedule.downsets import search
from lowtide.schedule.heuristics import best_order
from lowtide.schedule.incremental import Incremental, reorder
from lowtide.schedule.tables import tables_of
from lowtide.schedule.windows import solve_window

__all__ = ["warm_up"]


def warm_up() -> None:
    """Compile, or load from disk, what schedulers need."""
    rows: list[list[int]] = [[], [0], [0, 1]]
    tables = tables_of(before=rows, reads=rows, makes=[[0], [1], [2]], nbytes=[2, 1, 1])
    order, _ = best_order(tables)
    solve_window(tables, order, 0, 3, 0, 0, 10)
    search(tables, 0, 9, 10, True, True)
    for how in (Incremental("peak"), Incremental("narrow-waist")):
        reorder(tables, np.arange(3), [1], how)
