"""What a node does: one of seven frozen operations.

Problem.  Transformations, schedulers, printers and executors all have to agree on what an
operation is, without a registry and without open side channels.

Method.  An operation is plain, hashable data.  Tensor operands never appear in it: `Ref(i)` stands
for the i-th entry of the node's `inputs`, so that the same operation applied at two places compares
equal, and content keys need no renaming.

Not done here: shapes (they belong to Values), cost, legality.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lowtide.ir.graph import Graph

__all__ = [
    "Arg",
    "Aten",
    "Fission",
    "Fused",
    "Load",
    "Merge",
    "Op",
    "Part",
    "Ref",
    "Scalar",
    "Slice",
    "Store",
    "refs_in",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """The i-th entry of the node's `inputs`."""

    index: int


Arg = (
    Ref
    | int
    | float
    | bool
    | str
    | complex
    | None
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | tuple["Arg", ...]
)


@dataclass(frozen=True, slots=True)
class Aten:
    """One ATen operator call, e.g. ``Aten("aten.add.Tensor", (Ref(0), Ref(1)), (("alpha", 2),))``.

    `overload` is ``namespace.name.overload``; lists are tuples; `kwargs` is sorted by name.
    """

    overload: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()


@dataclass(frozen=True, slots=True)
class Scalar:
    """Host arithmetic: a Python number that is recomputed before each step.

    `expr` names where the number comes from (``update[0].scalar[2]``: the third scalar that the
    optimizer's own code passes to its operators for parameter group 0).  Its Value has the HOST role
    and no bytes; operators that refer to it receive a Python number.
    """

    expr: str


@dataclass(frozen=True, slots=True)
class Fused:
    """A group of operators that runs as one node.

    The node's inputs and outputs bind, by position, to `body.inputs` and `body.outputs`; a body may
    write its inputs (an optimizer update), then the node lists them in `writes`.  `kind` says why
    the group exists ("update", "kernel").
    """

    body: Graph
    kind: str = "kernel"


class Merge(Enum):
    """How the parts of one output of a Fission become the whole."""

    WRITE = "write"  # each part writes its slice
    ADD = "add"  # parts are summed in place
    LOGSUMEXP = "logsumexp"
    MOMENTS = "moments"


@dataclass(frozen=True, slots=True)
class Slice:
    """``[start, stop)`` along `axis` of a tensor; axis None means the whole, shared by all parts."""

    axis: int | None
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a Fission: its body, the slice of each input, and the place of each output."""

    body: int
    inputs: tuple[Slice, ...]
    outputs: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Fission:
    """A region split into parts that run one after the other (MAGIS, section 4).

    Body b's inputs and outputs bind by position to the node's; `merges` has one entry per output.
    """

    bodies: tuple[Graph, ...]
    parts: tuple[Part, ...]
    merges: tuple[Merge, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the input to another tier; the output Value is the copy there."""

    tier: str


@dataclass(frozen=True, slots=True)
class Load:
    """Copy a stored Value back to the device."""

    tier: str


Op = Aten | Scalar | Fused | Fission | Store | Load


def refs_in(arg: Arg | tuple[Arg, ...]) -> tuple[int, ...]:
    """The input positions that `arg` mentions, in order, duplicates included."""
    if isinstance(arg, Ref):
        return (arg.index,)
    if isinstance(arg, tuple):
        return tuple(index for item in arg for index in refs_in(item))
    return ()
