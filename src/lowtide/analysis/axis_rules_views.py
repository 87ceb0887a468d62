"""Axis rules of operators that move, cut, join or repeat elements without computing.

Reshapes need the most care.  Sizes are grouped from the left into the smallest runs of equal
product, ``(2, 12, 5) -> (2, 3, 4, 5)`` into ``2|2``, ``12|3 4``, ``5|5``; in a group only the leading
dimensions can be cut, because only then is a part one block on both sides, and only at a common
divisor of the two leading sizes.  Merging heads into batch therefore splits by batch, never by head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lowtide.analysis.axis import Call, Link, Rule

__all__ = ["VIEW_RULES"]


def _same(call: Call, name: str, dims: Mapping[int, int], outputs: int = 1) -> Iterator[Link]:
    """Links of input dimension -> output dimension, the same in all outputs."""
    shape = call.shape(name)
    for source, target in dims.items():
        if shape[source] > 1:
            yield Link(shape[source], {name: source}, (target,) * outputs)


def _groups(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Leading dimensions of the smallest groups of equal product; dimensions of size 1 belong to none."""
    left = [dim for dim, size in enumerate(before) if size != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]
    i = j = 0
    while i < len(left) and j < len(right):
        yield left[i], right[j]
        a, b = before[left[i]], after[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * before[left[i]], i + 1
            else:
                b, j = b * after[right[j]], j + 1


def _reshape(sizes: str) -> Rule:
    def rule(call: Call) -> Iterator[Link]:
        before, after = call.shape("self"), call.outputs[0].shape
        if math.prod(before) == 0:
            return
        for source, target in _groups(before, after):
            extent = math.gcd(before[source], after[target])
            if extent > 1:
                yield Link(extent, {"self": source}, (target,), ((sizes, target),))

    return rule


def _permute(call: Call) -> Iterator[Link]:
    order = call.dims("dims", call.rank("self"))
    return _same(call, "self", {source: target for target, source in enumerate(order)})


def _transpose(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    order = list(range(rank))
    if rank:
        first, second = call.dim("dim0", rank), call.dim("dim1", rank)
        order[first], order[second] = second, first
    return _same(call, "self", dict(enumerate(order)))


def _t(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    return _same(call, "self", {dim: rank - 1 - dim for dim in range(rank)})


def _unsqueeze(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    new = call.dim("dim", rank + 1)
    return _same(call, "self", {dim: dim + (dim >= new) for dim in range(rank)})


def _squeeze(call: Call) -> Iterator[Link]:
    """Dimensions that are named are never cut: a part of size 1 would vanish."""
    shape = call.shape("self")
    named = set(call.dims("dim", len(shape)))
    gone = {dim for dim in named if shape[dim] == 1}
    kept = [dim for dim in range(len(shape)) if dim not in gone]
    return _same(call, "self", {dim: target for target, dim in enumerate(kept) if dim not in named})


def _expand(call: Call) -> Iterator[Link]:
    before, after = call.shape("self"), call.outputs[0].shape
    for target, extent in enumerate(after):
        source = target - (len(after) - len(before))
        cut = source if source >= 0 and before[source] == extent else None
        if extent > 1:
            yield Link(extent, {"self": cut}, (target,), (("size", target),))


def _repeat(call: Call) -> Iterator[Link]:
    before, after = call.shape("self"), call.outputs[0].shape
    repeats = call.integers("repeats")
    for target, extent in enumerate(after):
        source = target - (len(after) - len(before))
        if extent > 1 and source >= 0 and repeats[target] == 1:
            yield Link(extent, {"self": source}, (target,))
        elif extent > 1 and (source < 0 or before[source] == 1):
            yield Link(extent, {}, (target,), (("repeats", target),))


def _without_dim(call: Call) -> Iterator[Link]:
    """select, unbind, select with one dimension gone from every output."""
    rank = call.rank("self")
    gone = call.dim("dim", rank)
    kept = {dim: dim - (dim > gone) for dim in range(rank) if dim != gone}
    return _same(call, "self", kept, len(call.outputs))


def _other_dims(call: Call) -> Iterator[Link]:
    """split, slice, cumsum: every dimension but `dim`, at the same place in every output."""
    rank = call.rank("self")
    taken = call.dim("dim", rank)
    return _same(call, "self", {dim: dim for dim in range(rank) if dim != taken}, len(call.outputs))


def _slice(call: Call) -> Iterator[Link]:
    yield from _other_dims(call)
    dim = call.dim("dim", call.rank("self"))
    size = call.shape("self")[dim]
    if call.outputs[0].shape[dim] != size or size < 2:
        return
    end = call.arguments["end"]
    if call.arguments["start"] in (None, 0) and (end is None or (isinstance(end, int) and end >= size)):
        yield Link(size, {"self": dim}, (dim,))  # the whole range: an end beyond the part is clamped


def _slice_scatter(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    taken = call.dim("dim", rank)
    for dim, size in enumerate(call.shape("self")):
        if dim != taken and size > 1:
            yield Link(size, {"self": dim, "src": dim}, (dim,))


def _select_scatter(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    taken = call.dim("dim", rank)
    for dim, size in enumerate(call.shape("self")):
        if dim != taken and size > 1:
            yield Link(size, {"self": dim, "src": dim - (dim > taken)}, (dim,))


def _select_backward(call: Call) -> Iterator[Link]:
    rank = len(call.outputs[0].shape)
    gone = call.dim("dim", rank)
    for dim, size in enumerate(call.outputs[0].shape):
        if dim != gone and size > 1:
            yield Link(size, {"grad_output": dim - (dim > gone)}, (dim,), (("input_sizes", dim),))


def _slice_backward(call: Call) -> Iterator[Link]:
    taken = call.dim("dim", call.rank("grad_output"))
    for dim, size in enumerate(call.outputs[0].shape):
        if dim != taken and size > 1:
            yield Link(size, {"grad_output": dim}, (dim,), (("input_sizes", dim),))


def _cat(call: Call) -> Iterator[Link]:
    """Empty one-dimensional tensors, which `cat` ignores, make the call opaque."""
    parts = call.tensors("tensors")
    out = call.outputs[0].shape
    if any(part is None or len(part.shape) != len(out) for part in parts):
        return
    joined = call.dim("dim", len(out))
    for dim, size in enumerate(out):
        if dim != joined and size > 1:
            yield Link(size, {"tensors": (dim,) * len(parts)}, (dim,))


def _stack(call: Call) -> Iterator[Link]:
    parts = call.tensors("tensors")
    out = call.outputs[0].shape
    new = call.dim("dim", len(out))
    for dim, size in enumerate(out):
        if dim != new and size > 1:
            yield Link(size, {"tensors": (dim - (dim > new),) * len(parts)}, (dim,))


def _pad(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    pad = call.integers("pad")
    padded = {rank - 1 - k // 2 for k, amount in enumerate(pad) if amount}
    return _same(call, "self", {dim: dim for dim in range(rank) if dim not in padded})


def _flip(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    flipped = {dim % rank for dim in call.integers("dims")}
    return _same(call, "self", {dim: dim for dim in range(rank) if dim not in flipped})


def _roll(call: Call) -> Iterator[Link]:
    if not call.integers("dims"):
        return iter(())  # rolls the flattened tensor
    return _flip(call)


def _triangle(call: Call) -> Iterator[Link]:
    return _same(call, "self", {dim: dim for dim in range(call.rank("self") - 2)})


def _filled(size: str) -> Rule:
    """full, zeros: nothing is read, the size argument shrinks."""

    def rule(call: Call) -> Iterator[Link]:
        for dim, extent in enumerate(call.outputs[0].shape):
            if extent > 1:
                yield Link(extent, {}, (dim,), ((size, dim),))

    return rule


VIEW_RULES: dict[str, Rule] = {
    "aten.view.default": _reshape("size"),
    "aten._unsafe_view.default": _reshape("size"),
    "aten.view_copy.default": _reshape("size"),
    "aten.reshape.default": _reshape("shape"),
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _t,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.select.int": _without_dim,
    "aten.unbind.int": _without_dim,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _other_dims,
    "aten.split_with_sizes.default": _other_dims,
    "aten.chunk.default": _other_dims,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.select_backward.default": _select_backward,
    "aten.slice_backward.default": _slice_backward,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.flip.default": _flip,
    "aten.roll.default": _roll,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.full.default": _filled("size"),
    "aten.zeros.default": _filled("size"),
    "aten.ones.default": _filled("size"),
    "aten.empty.memory_format": _filled("size"),
    "aten.new_full.default": _filled("size"),
    "aten.new_zeros.default": _filled("size"),
    "aten.new_ones.default": _filled("size"),
    "aten.new_empty.default": _filled("size"),
}
"""An operator that is absent here (`as_strided`, `arange`, `squeeze` without a dim) is never cut."""
