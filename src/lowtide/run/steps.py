"""Prepared steps: what a plan runs, one after the other, with nothing left to decide.

Problem.  Per operator, an executor may spend about as much as a function call.

Method.  A `Draft` is one operator call with its argument slots, the requests that the hook is to answer
during it, and the targets where its results belong.  `finish` numbers the drafts, makes the hook's table
and turns each draft into a closure of one of three kinds:

    plain   cell = number; call                               out= variants, in-place operators
    one     ...; the result's address is compared with its target's, copied if it is elsewhere
    many    the same for several results

`cell` is the word that tells the hook which step runs; after an error it tells us.  A step that copied says
how many results, for those who watch (`lowtide.run.watching`).

Invariant.  A result that is not where it was planned is copied there before the next step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lowtide.ir.aten import tensors_of
from lowtide.run.allocator import Hook, Request, Table
from lowtide.run.calls import Call

__all__ = ["Draft", "Prepared", "Trail", "Watch", "finish"]

Cell = ctypes.c_int64
Run = Callable[[], int | None]

Trail = tuple[int, ...]
"""Where a step comes from: positions in an order and numbers of parts in turn.  (3,) is the fourth node of
the program, (3, 1, 0) the first node of part 1 of that Fission."""

Watch = list[tuple[int, int, int]]
"""Per prepared step: start and end in nanoseconds, results that were copied to their places."""


@dataclass(frozen=True)
class Draft:
    """One call.  `targets` has a one-entry list per result, holding the tensor at its planned place;
    results without a target (None) are dropped.  `node` is the graph's node that it belongs to; `merge` names
    the operator by which it brings a part's result to the whole.
    """

    node: int
    call: Call
    targets: Sequence[list[Tensor | None]] = ()
    requests: tuple[Request, ...] = ()
    merge: str = ""


@dataclass(frozen=True)
class Prepared:
    """Steps ready to run; step k of the table is `runs[k - 1]`.  Without a hook there is no table."""

    runs: tuple[Run, ...]
    nodes: tuple[int, ...]
    cell: Cell
    table: Table | None
    first_of: dict[int, int] = field(default_factory=dict)  # node -> position of its first step
    trails: tuple[Trail, ...] = ()
    merges: tuple[str, ...] = ()


def finish(drafts: Sequence[Draft], hook: Hook | None, slots: int, trails: Sequence[Trail]) -> Prepared:
    """Closures for `drafts`, which come from `trails`; `slots` counts the arena and the output slots."""
    table = hook.new_table([draft.requests for draft in drafts], slots) if hook else None
    cell = table.step if table else Cell(0)
    runs = tuple(_close(draft, cell, number) for number, draft in enumerate(drafts, start=1))
    first_of: dict[int, int] = {}
    for position, draft in enumerate(drafts):
        first_of.setdefault(draft.node, position)
    nodes, merges = tuple(draft.node for draft in drafts), tuple(draft.merge for draft in drafts)
    return Prepared(runs, nodes, cell, table, first_of, tuple(trails), merges)


def _close(draft: Draft, cell: Cell, number: int) -> Run:
    if not draft.targets:
        return _plain(draft.call, cell, number)
    if len(draft.targets) == 1 and draft.call.bare:
        return _one(draft.call, draft.targets[0], cell, number)
    return _many(draft.call, draft.targets, cell, number)


def _plain(call: Call, cell: Cell, number: int) -> Run:
    function, args, kwargs = call.function, call.args, call.kwargs

    def run() -> None:
        cell.value = number
        function(*args, **kwargs)

    return run


def _one(call: Call, target: list[Tensor | None], cell: Cell, number: int) -> Run:
    function, args, kwargs = call.function, call.args, call.kwargs

    def run() -> int:
        cell.value = number
        result = function(*args, **kwargs)
        planned = target[0]
        if result.data_ptr() != planned.data_ptr():  # type: ignore[union-attr]
            planned.copy_(result)  # type: ignore[union-attr]
            return 1
        return 0

    return run


def _many(call: Call, targets: Sequence[list[Tensor | None]], cell: Cell, number: int) -> Run:
    function, args, kwargs = call.function, call.args, call.kwargs

    def run() -> int:
        cell.value = number
        copied = 0
        results = tensors_of(function(*args, **kwargs))
        for result, target in zip(results, targets, strict=True):
            planned = target[0]
            if result.data_ptr() != planned.data_ptr():  # type: ignore[union-attr]
                planned.copy_(result)  # type: ignore[union-attr]
                copied += 1
        return copied

    return run
