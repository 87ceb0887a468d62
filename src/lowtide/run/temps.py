"""What one operator call holds from moment to moment, and which of it lies together.

Problem.  An operator takes and releases blocks while it runs, and asks for its outputs in between.  Many
kernels (convolutions in the default layout) work in buffers of their own and ask for the result last: eager
never holds both, so an arena that did would be larger than what eager takes.

Method.  The recorded requests give every temporary and every output its moments: the numbers of the
operator's requests and releases.  `inside_of` hands them to the placement (`lowtide.run.layout`), which puts
a temporary where something is not yet or no more, in the middle of a step.

    moment   0     1     2     3     4     5
    temp 0   [=================)                 reordered input
    temp 1               [=================)     result, blocked
    output 0                         [========   lies over temp 0, wherever that is

Temporaries of at most one line are packed into one group that is there throughout.

Invariants.  Sizes are multiples of `ALIGNMENT`; of blocks smaller than that, of the next power of two (no
kernel reads them in wider pieces), so that a converted number does not take two lines.  An output that may
lie over an input (`INPLACE`), or that nobody asks for, is there from the first moment.  What is copied to its
place after the call is there from the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.analysis.facts import OperatorFacts, Temp
from lowtide.analysis.inplace import INPLACE
from lowtide.ir.ops import Aten
from lowtide.run.allocator import Request

__all__ = [
    "ALIGNMENT",
    "HELD",
    "Group",
    "Inside",
    "align",
    "first_gap",
    "held_bytes",
    "inside_of",
    "plan_requests",
]

ALIGNMENT = 64

HELD = 1 << 30
"""The release of a result that is copied: after every event of the operator."""


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _room(nbytes: int) -> int:
    """Bytes that a temporary takes: its own alignment, at most `ALIGNMENT`."""
    return align(nbytes) if nbytes > ALIGNMENT else 1 << max(0, nbytes - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Group:
    """Temporaries that are placed as one, in the moments ``[start, stop)``; `offsets` are inside it."""

    temps: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Inside:
    """The moments of one call; `requested`: outputs that are not there from the first, by position."""

    groups: tuple[Group, ...] = ()
    requested: Mapping[int, int] = field(default_factory=dict)
    moments: int = 1

    def held_bytes(self, output_bytes: Sequence[int]) -> int:
        """The most bytes of groups and outputs at one moment."""
        change = [0] * (self.moments + 1)
        for group in self.groups:
            change[group.start] += group.nbytes
            change[group.stop] -= group.nbytes
        for position, nbytes in enumerate(output_bytes):
            change[self.requested.get(position, 0)] += nbytes
        held = most = 0
        for each in change[: self.moments]:
            held += each
            most = max(most, held)
        return most


_NOTHING = Inside()


def inside_of(op: Aten, facts: OperatorFacts) -> Inside:
    """The moments of one call of `op`; a single one without groups where it takes nothing for itself, or
    where its facts leave no room for that (they were measured without a hook).
    """
    if not facts.temps or facts.assumed:
        return _NOTHING
    found = _moments(op, facts)
    return found if found.held_bytes(facts.output_bytes) <= facts.transient_bytes else _NOTHING


def held_bytes(op: Aten, facts: OperatorFacts) -> int:
    """The most bytes that one call of `op` has in an arena at once, its outputs included."""
    return _moments(op, facts).held_bytes(facts.output_bytes)


def _moments(op: Aten, facts: OperatorFacts) -> Inside:
    requested = _requested(op, facts)
    ends = [temp.stop for temp in facts.temps if temp.stop != HELD]
    last = max([temp.start for temp in facts.temps] + ends + list(requested.values()), default=0)
    copied = any(temp.stop == HELD for temp in facts.temps)
    if copied:
        requested = dict.fromkeys(range(len(facts.output_bytes)), last + 1)
    count = last + 1 + copied
    temps = [Temp(temp.nbytes, temp.start, min(temp.stop, count)) for temp in facts.temps]
    large = [k for k, temp in enumerate(temps) if temp.nbytes > ALIGNMENT]
    groups = [Group((k,), (0,), align(temps[k].nbytes), temps[k].start, temps[k].stop) for k in large]
    small = _packed([k for k in range(len(temps)) if temps[k].nbytes <= ALIGNMENT], temps, count)
    return Inside((*groups, *small), requested, count)


def _packed(small: Sequence[int], temps: Sequence[Temp], count: int) -> tuple[Group, ...]:
    """The temporaries `small` in one group: largest first, each at the lowest offset that is free."""
    places: dict[int, int] = {}
    for index in sorted(small, key=lambda k: (-temps[k].nbytes, k)):
        one = temps[index]
        busy = sorted(
            (offset, offset + _room(temps[other].nbytes))
            for other, offset in places.items()
            if one.start < temps[other].stop and temps[other].start < one.stop
        )
        places[index] = first_gap(busy, _room(one.nbytes))
    if not places:
        return ()
    nbytes = max(offset + _room(temps[index].nbytes) for index, offset in places.items())
    return (Group(tuple(places), tuple(places.values()), nbytes, 0, count),)


def _requested(op: Aten, facts: OperatorFacts) -> dict[int, int]:
    """Output position -> the moment at which the operator asks for it.

    Events are requests and releases of temporaries and requests of outputs: the numbers that no temporary
    has are the outputs', in order.
    """
    namespace, name, *_ = op.overload.split(".")
    if namespace != "aten" or name in INPLACE:
        return {}
    outputs = [target for _, target in facts.sequence if target >= 0]
    taken = {event for temp in facts.temps for event in (temp.start, temp.stop)}
    free = (event for event in range(len(taken) + len(outputs)) if event not in taken)
    return dict(zip(outputs, free, strict=False))


def first_gap(busy: Sequence[tuple[int, int]], nbytes: int) -> int:
    """The lowest offset with room for `nbytes` between the (start, stop) in `busy`, which are sorted."""
    offset = 0
    for start, stop in busy:
        if offset + nbytes <= start:
            return offset
        offset = max(offset, stop)
    return offset


def plan_requests(
    facts: OperatorFacts, temps: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]]
) -> tuple[Request, ...]:
    """The requests of one call; `temps` and `outputs` are the (slot, offset) of its temporaries and outputs.

    None where temporaries have no place.
    """
    if len(temps) < len(facts.temps):
        return ()
    places = [outputs[target] if target >= 0 else temps[-1 - target] for _, target in facts.sequence]
    return tuple(
        Request(nbytes, offset, slot, temporary=target < 0)
        for (nbytes, target), (slot, offset) in zip(facts.sequence, places, strict=True)
    )
