"""What the allocator did during a call: from the hook's log, or from PyTorch's profiler.

Problem.  A peak is a property of requests and releases in time order.  Both sources tell it; they
have to agree, and the second is there where the hook is not.

Method.  A `Log` is signed bytes in time order.  The hook logs one thread and pairs a release with its
request by address; releases of blocks that are older than the log are in the profiler's events only, so
they are left out there as well, unless the log was told of what went before.

Private PyTorch interface: the profiler's `experimental_event_tree` (allocation events with addresses).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from lowtide.run.allocator import Event, Hook

__all__ = ["Block", "Log", "blocks_of", "peak_bytes", "record_with_hook", "record_with_profiler"]

T = TypeVar("T")

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_START = "lowtide: the measured call starts"


@dataclass(frozen=True, slots=True)
class Block:
    """One allocator block: taken at event `start`, released at event `stop` (None: still held)."""

    address: int
    nbytes: int
    start: int
    stop: int | None


@dataclass(frozen=True, slots=True)
class Log:
    """Requests and releases of one call, in time order.

    `older` are requests from before whose blocks are still held when it begins, as far as they are known;
    `foreign_bytes` were taken by other threads.
    """

    events: tuple[Event, ...]
    older: tuple[Event, ...] = ()
    foreign_bytes: int = 0


def blocks_of(log: Log) -> tuple[Block, ...]:
    """The blocks that were taken, in order; events are numbered without the releases of older blocks."""
    open_at: dict[int, int] = {}
    drafts: list[list[Any]] = []
    number = 0
    for event in log.events:
        if event.nbytes is not None:
            open_at[event.address] = len(drafts)
            drafts.append([event.address, event.nbytes, number, None])
        elif event.address in open_at:
            drafts[open_at.pop(event.address)][3] = number
        else:
            continue
        number += 1
    return tuple(Block(*draft) for draft in drafts)


def peak_bytes(log: Log) -> int:
    """The most bytes held at once above the level at which the log began."""
    held = {event.address: event.nbytes or 0 for event in log.older}
    return max(0, max(accumulate(_changes(log.events, held)), default=0))


def _changes(events: Iterable[Event], held: dict[int, int]) -> Iterable[int]:
    for event in events:
        if event.nbytes is not None:
            held[event.address] = event.nbytes
            yield event.nbytes
        else:
            yield -held.pop(event.address, 0)


def record_with_hook(hook: Hook, call: Callable[[], T]) -> tuple[T, Log]:
    """Run `call` on this thread and log what it asked of the allocator."""
    result, events, foreign_bytes = hook.record(call)
    return result, Log(events, foreign_bytes=foreign_bytes)


def record_with_profiler(call: Callable[[], T], before: Callable[[], object] | None = None) -> tuple[T, Log]:
    """The same from the profiler's memory events, all threads together; milliseconds of overhead.

    `before` runs first, so that the log knows the blocks which it leaves and `call` replaces.
    """
    with (
        _quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as profiler,
    ):
        if before is not None:
            before()
        with record_function(_START):
            pass
        result = call()
    found: list[tuple[int, Event]] = []
    start = _collect(profiler.profiler.kineto_results.experimental_event_tree(), found)
    found.sort(key=lambda timed: timed[0])
    older: dict[int, Event] = {}
    for time, event in found:
        if time < start and event.nbytes is not None:
            older[event.address] = event
        elif time < start:
            older.pop(event.address, None)
    return result, Log(tuple(event for time, event in found if time >= start), tuple(older.values()))


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """The profiler's library prints a line per start and stop, unless told otherwise before its first use."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _collect(nodes: Iterable[Any], found: list[tuple[int, Event]]) -> int:
    """Append the allocation events with their times; the time of the start mark."""
    start = 0
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.tag == _EventType.Allocation:
            size = node.extra_fields.alloc_size
            address = node.extra_fields.ptr
            found.append((node.start_time_ns, Event(address, size if size > 0 else None)))
        elif node.name == _START:
            start = node.start_time_ns
        pending.extend(node.children)
    return start
