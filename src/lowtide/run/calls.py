"""One operator call, prepared once and made many times.

Problem.  Building argument lists for every call costs as much as a small operator; and an operator that
has a real out= kernel can write where it is told to.

Method.  `Call` holds the callable and its argument containers; `bind` puts an operand at every place that
refers to it, before the first call or between two.  `out_variant` finds the out= overload whose other
arguments are the same, and that has a kernel of its own for the CPU: PyTorch generates out= overloads that
run the ordinary operator and copy, which would gain nothing.  Operators that clone the whole storage of an
operand (`select_scatter` and its kin) have an out= form here: in an arena they would clone the arena.

Private PyTorch interfaces, wrapped here: `OpOverload._op` (the call without a Python frame; fallback: the
overload) and `_dispatch_has_kernel_for_dispatch_key` (fallback: no out= variants).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.ir.aten import resolve
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = [
    "Call",
    "OutVariant",
    "from_first_element",
    "out_variant",
    "prepare_call",
    "prepare_out_call",
    "written_out",
]

_has_kernel: Callable[[str, str], bool] | None = getattr(
    torch._C, "_dispatch_has_kernel_for_dispatch_key", None
)

_RESIZING = frozenset(
    f"aten.{name}.default"
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
)
"""Losses whose out= form, when it reduces, first resizes the given output to the operands' shape."""


# -- operators that clone the whole storage of an operand ----------------------------------------------------


def _copy(whole: Tensor, part: Tensor, non_blocking: bool = False, *, out: Tensor) -> Tensor:
    return out.copy_(part)


def _holding(whole: Tensor, out: Tensor) -> Tensor:
    """`out` with the contents of `whole`, which it may lie over."""
    return out if out.data_ptr() == whole.data_ptr() else out.copy_(whole)


def _select_scatter(whole: Tensor, part: Tensor, dim: int, index: int, *, out: Tensor) -> Tensor:
    _holding(whole, out).select(dim, index).copy_(part)
    return out


def _slice_scatter(whole: Tensor, part: Tensor, *where: Any, out: Tensor, **named: Any) -> Tensor:
    torch.ops.aten.slice.Tensor(_holding(whole, out), *where, **named).copy_(part)
    return out


def _diagonal_scatter(whole: Tensor, part: Tensor, *where: Any, out: Tensor, **named: Any) -> Tensor:
    torch.diagonal(_holding(whole, out), *where, **named).copy_(part)
    return out


def _as_strided_scatter(
    whole: Tensor, part: Tensor, size: list[int], stride: list[int], offset: int | None = None, *, out: Tensor
) -> Tensor:
    """`offset` counts from the first element of `whole` (see `from_first_element`)."""
    _holding(whole, out).as_strided(size, stride, out.storage_offset() + (offset or 0)).copy_(part)
    return out


_AS_STRIDED_SCATTER = "aten.as_strided_scatter.default"

_WRITTEN_OUT: Mapping[str, Callable[..., Tensor]] = {
    "aten.copy.default": _copy,
    "aten.select_scatter.default": _select_scatter,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.diagonal_scatter.default": _diagonal_scatter,
    _AS_STRIDED_SCATTER: _as_strided_scatter,
}


def written_out(overload: str) -> bool:
    """Whether its out= form is one of those here, which take no memory and leave outputs where they are."""
    return overload in _WRITTEN_OUT


def from_first_element(op: Aten, offset: int) -> Aten:
    """`op` with an absolute offset into its first operand's storage made relative to that operand.

    `offset` is where the operand starts in its storage; operators without such an argument stay as they are.
    """
    if op.overload != _AS_STRIDED_SCATTER or len(op.args) < 5 or not isinstance(op.args[4], int):
        return op
    return replace(op, args=(*op.args[:4], op.args[4] - offset))


# -- out= variants ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutVariant:
    """An out= overload (or a function like one) and the names of its output arguments, in order."""

    overload: Callable[..., Any]
    names: tuple[str, ...]


@cache
def out_variant(overload: str) -> OutVariant | None:
    """The out= overload with a CPU kernel that computes `overload`, or None."""
    if overload in _WRITTEN_OUT:
        return OutVariant(_WRITTEN_OUT[overload], ("out",))
    if _has_kernel is None or overload in _RESIZING:
        return None
    functional = resolve(overload)
    wanted = [(a.name, str(a.type)) for a in functional._schema.arguments]
    packet = functional.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [a.name for a in arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        fits = outs and len(outs) == len(functional._schema.returns) and rest == wanted
        if fits and _has_kernel(f"{candidate._schema.name}.{name}", "CPU"):
            return OutVariant(candidate, tuple(outs))
    return None


class Call:
    """A prepared call: `function(*args, **kwargs)`, with the places of every operand.

    Places of operands that were not bound hold None.  `bare`: it returns a tensor, not a tuple of some.
    """

    __slots__ = ("args", "bare", "function", "kwargs", "places")

    def __init__(self, function: Callable[..., Any], op: Aten, bare: bool = True) -> None:
        self.function = function
        self.bare = bare
        self.places: dict[int, list[tuple[Any, Any]]] = {}
        self.args: list[Any] = [None] * len(op.args)
        self.kwargs: dict[str, Any] = {}
        for position, arg in enumerate(op.args):
            self._fill(self.args, position, arg)
        for name, arg in op.kwargs:
            self._fill(self.kwargs, name, arg)

    def _fill(self, container: Any, key: Any, arg: Arg) -> None:
        if isinstance(arg, Ref):
            container[key] = None
            self.places.setdefault(arg.index, []).append((container, key))
        elif isinstance(arg, tuple):
            container[key] = [None] * len(arg)
            for position, item in enumerate(arg):
                self._fill(container[key], position, item)
        else:
            container[key] = arg

    def bind(self, index: int, operand: Any) -> None:
        """Use `operand` (a tensor; a number if HOST) for the node's input `index`."""
        for container, key in self.places.get(index, ()):
            container[key] = operand

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)


def prepare_call(op: Aten) -> Call:
    """The operator as it is."""
    overload = resolve(op.overload)
    return Call(getattr(overload, "_op", overload), op, len(overload._schema.returns) == 1)


def prepare_out_call(op: Aten, variant: OutVariant) -> Call:
    """The out= form; the caller sets `call.kwargs[name]` for each of `variant.names`."""
    return Call(getattr(variant.overload, "_op", variant.overload), op)
