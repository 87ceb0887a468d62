"""Where an operator's temporaries lie: in its workspace, or where its output is not yet.

Problem.  An operator takes and releases blocks while it runs; in the arena they need addresses that do
not overlap while both are held.  Many kernels (convolutions in the default layout) work in buffers of
their own and ask for the result last.

Method.  Largest first, each at the lowest offset that is free for its whole life.  An output's place is
empty until the operator asks for it, so temporaries that are released by then may lie there.

    event    0     1     2     3     4     5
    temp 0   [=================)                 reordered input     in the place of output 0
    temp 1               [=================)     result, blocked     workspace
    output 0                         [========

A step has a handful of temporaries, so this is enough; being deterministic, it is not stored.

Invariants.  Offsets are multiples of `ALIGNMENT`; of blocks smaller than that, of the next power of two (no
kernel reads them in wider pieces), so that a converted number does not take two lines.  Nothing is hosted by
an output that may lie over an input (`INPLACE`): that place is not empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.analysis.facts import OperatorFacts, Temp
from lowtide.analysis.inplace import INPLACE
from lowtide.ir.ops import Aten
from lowtide.run.allocator import Request

__all__ = ["ALIGNMENT", "Packing", "align", "first_gap", "pack_temps", "plan_requests"]

ALIGNMENT = 64

_WORKSPACE = -1


def align(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _room(nbytes: int) -> int:
    """Bytes that a temporary takes in its region: its own alignment, at most `ALIGNMENT`."""
    return align(nbytes) if nbytes > ALIGNMENT else 1 << max(0, nbytes - 1).bit_length()


@dataclass(frozen=True)
class Packing:
    """Per temporary (region, offset): region -1 is the workspace of `nbytes`, j the place of output j."""

    places: tuple[tuple[int, int], ...]
    nbytes: int


def pack_temps(op: Aten, facts: OperatorFacts) -> Packing:
    """Places for the temporaries of one call of `op`."""
    hosts = _hosts(op, facts)
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(facts.temps)), key=lambda i: (-facts.temps[i].nbytes, i)):
        places[index] = _find_place(facts, index, places, hosts)
    ends = [
        offset + _room(facts.temps[index].nbytes)
        for index, (region, offset) in places.items()
        if region == _WORKSPACE
    ]
    return Packing(tuple(places[index] for index in range(len(facts.temps))), max(ends, default=0))


def _find_place(
    facts: OperatorFacts, index: int, places: dict[int, tuple[int, int]], hosts: dict[int, int]
) -> tuple[int, int]:
    temp = facts.temps[index]

    def gap(region: int) -> int:
        busy = sorted(
            (offset, offset + _room(facts.temps[other].nbytes))
            for other, (where, offset) in places.items()
            if where == region and _together(temp, facts.temps[other])
        )
        return first_gap(busy, _room(temp.nbytes))

    for output, requested in hosts.items():
        if temp.stop <= requested and (offset := gap(output)) + temp.nbytes <= facts.output_bytes[output]:
            return output, offset
    return _WORKSPACE, gap(_WORKSPACE)


def _hosts(op: Aten, facts: OperatorFacts) -> dict[int, int]:
    """Output -> the event at which it is requested, for outputs that may host temporaries until then.

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


def _together(one: Temp, other: Temp) -> bool:
    return one.start < other.stop and other.start < one.stop


def first_gap(busy: Sequence[tuple[int, int]], nbytes: int) -> int:
    """The lowest offset with room for `nbytes` between the (start, stop) in `busy`, which are sorted."""
    offset = 0
    for start, stop in busy:
        if offset + nbytes <= start:
            return offset
        offset = max(offset, stop)
    return offset


def plan_requests(
    op: Aten, facts: OperatorFacts, workspace: int, outputs: Sequence[tuple[int, int]]
) -> tuple[Request, ...]:
    """The requests of one call: `workspace` is an arena offset, `outputs` the outputs' (slot, offset).

    None where the facts leave no room for the temporaries: they were measured without a hook.
    """
    packing = pack_temps(op, facts)
    if packing.nbytes > facts.transient_bytes - sum(facts.output_bytes):
        return ()
    planned: list[Request] = []
    for nbytes, target in facts.sequence:
        region, inside = (target, 0) if target >= 0 else packing.places[-1 - target]
        slot, start = (0, workspace) if region == _WORKSPACE else outputs[region]
        planned.append(Request(nbytes, start + inside, slot, temporary=target < 0))
    return tuple(planned)
