"""Shapes, strides and the operators that change them: what the SSA pass needs to know about layouts.

Everything here is a function from metas to operators or metas; no graph is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from lowtide.capture.functional import Functional
from lowtide.capture.internals import outside_modes
from lowtide.errors import CaptureError
from lowtide.ir.aten import renumber
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Aten, Ref, refs_in

__all__ = [
    "compact",
    "conversions",
    "covers",
    "drawing_order",
    "filling",
    "indices",
    "is_dense",
    "permutations",
    "reshaping",
    "scattering",
]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_dense(meta: TensorMeta) -> bool:
    """Whether the elements fill their span without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(meta.shape, meta.stride, strict=True) if s != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def covers(meta: TensorMeta, offset: int, nbytes: int) -> bool:
    """Whether a window is exactly the whole of a storage of `nbytes`."""
    return offset == 0 and is_dense(meta) and meta.nbytes == nbytes


def reshaping(source: TensorMeta, target: TensorMeta, offset: int) -> Aten | None:
    """A view of a tensor that covers its storage as another window; None across element types."""
    if source.dtype != target.dtype:
        return None
    if offset == 0 and source.contiguous and target.contiguous and source.numel == target.numel:
        return Aten("aten.view.default", (Ref(0), target.shape))
    return Aten("aten.as_strided.default", (Ref(0), target.shape, target.stride, offset))


def filling(op: Aten, meta: TensorMeta, partial: bool) -> Functional | None:
    """``fill_`` and ``zero_`` as `aten.full`, which reads nothing; None if that gives another layout.

    A part is filled from a single number, which takes no memory to speak of.
    """
    if op.overload not in {"aten.fill_.Scalar", "aten.zero_.default"} or not (meta.contiguous or partial):
        return None
    number = op.args[1] if op.overload == "aten.fill_.Scalar" else 0
    kwargs = (("device", torch.device(meta.device)), ("dtype", meta.dtype))
    return Functional(Aten("aten.full.default", (() if partial else meta.shape, number), kwargs), 0)


def conversions(source: TensorMeta, target: TensorMeta, resident: bool) -> Iterator[tuple[Aten, ...]]:
    """Chains of operators that may turn `source` into `target`, cheapest first; the caller checks them.

    A resident source is copied even if nothing else changes, as its owner may write it later.
    """
    if not resident:
        yield ()
    wide = () if source.shape == target.shape else (Aten("aten.expand.default", (Ref(0), target.shape)),)
    if wide and not resident:
        yield wide
    for form in (torch.contiguous_format, torch.preserve_format, _FORMATS.get(len(target.shape))):
        if form is None:
            continue
        if source.dtype == target.dtype:
            yield (*wide, Aten("aten.clone.default", (Ref(0),), (("memory_format", form),)))
        else:
            kwargs = (("dtype", target.dtype), ("memory_format", form))
            yield (*wide, Aten("aten._to_copy.default", (Ref(0),), kwargs))


def scattering(view: Aten) -> Aten | None:
    """The operator that writes a part back where a simple view took it from; None for other views.

    Ref(0) is the whole, Ref(1) the part.
    """
    name = {
        "aten.select.int": "aten.select_scatter.default",
        "aten.slice.Tensor": "aten.slice_scatter.default",
    }.get(view.overload)
    return None if name is None else Aten(name, (Ref(0), Ref(1), *view.args[1:]), view.kwargs)


def indices(op: Aten) -> tuple[int, ...]:
    """All operand positions that `op` mentions."""
    return refs_in(op.args) + refs_in(tuple(value for _, value in op.kwargs))


def compact(op: Aten, used: Sequence[int]) -> Aten:
    """`op` for the operands at the `used` positions only."""
    where = {old: new for new, old in enumerate(used)}
    return renumber(op, [where.get(index, 0) for index in range(max(used, default=-1) + 1)])


def permutations(order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A permutation and its inverse."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return order, tuple(inverse)


def drawing_order(meta: TensorMeta) -> tuple[int, ...]:
    """The axes in the order in which ``bernoulli_`` fills a tensor of this layout on this machine.

    Some builds draw in the order of memory, others in the order of the axes; a few elements, drawn from a
    generator of their own, tell which.
    """
    memory = tuple(sorted(range(len(meta.shape)), key=lambda axis: (-meta.stride[axis], axis)))
    order = _measured_order(tuple(min(size, 3) for size in meta.shape), memory)
    if order is None:
        raise CaptureError(
            f"dropout on a tensor with strides {meta.stride} draws in an order that cannot be repeated",
            remedy="make its input contiguous",
        )
    return order


@cache
def _measured_order(shape: tuple[int, ...], memory: tuple[int, ...]) -> tuple[int, ...] | None:
    _, back = permutations(memory)
    with outside_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        empty = torch.empty([shape[axis] for axis in memory]).permute(back)
        wanted = empty.bernoulli_(0.5, generator=generator)
        for order in (memory, tuple(range(len(shape)))):
            forward, inverse = permutations(order)
            generator.manual_seed(0)
            drawn = torch.ops.aten.bernoulli.p(empty.permute(forward), 0.5, generator=generator)
            if torch.equal(drawn.permute(inverse), wanted):
                return order
    return None
