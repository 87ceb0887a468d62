"""Operators that only move elements: as changes of index (DNNFusion 4.4.2, SmartMem's elimination).

Problem.  Permutes, reshapes, slices and concatenations inside a fused group must not become copies.

Method.  Data: overload -> function from the operand tensors and the operator's arguments to virtual
tensors whose `at` rewrites the indices.  A row gather (embedding, index_select) loads at a computed
position; the kernel checks it against the table's size.

Not done here: scatters, `as_strided` of an intermediate, boolean masks as indices (their shape is data).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.fusion.codegen.expr import Expr
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.tensor import Kernel, Piece, Tensor, Unfusable, broadcast, reshape

__all__ = ["MOVERS"]

Lower = Callable[..., tuple[Tensor, ...]]


def _axis(tensor: Tensor, axis: int) -> int:
    return axis % max(len(tensor.shape), 1)


def _sizes(tensor: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    return tuple(tensor.numel // max(known, 1) if size == -1 else size for size in sizes)


def _view(kernel: Kernel, x: Tensor, size: Sequence[int]) -> tuple[Tensor, ...]:
    return (reshape(x, _sizes(x, size)),)


def _flatten(kernel: Kernel, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> tuple[Tensor, ...]:
    first, last = _axis(x, start_dim), _axis(x, end_dim)
    return (reshape(x, (*x.shape[:first], _product(x.shape[first : last + 1]), *x.shape[last + 1 :])),)


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _permute(kernel: Kernel, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    order = tuple(_axis(x, d) for d in dims)

    def rule(indices: tuple[Index, ...]) -> Expr:
        place = dict(zip(order, indices, strict=True))
        return x.at(tuple(place[k] for k in range(len(order))))

    return (Tensor(tuple(x.shape[d] for d in order), x.dtype, rule),)


def _transpose(kernel: Kernel, x: Tensor, dim0: int, dim1: int) -> tuple[Tensor, ...]:
    order = list(range(len(x.shape)))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(kernel, x, order)


def _t(kernel: Kernel, x: Tensor) -> tuple[Tensor, ...]:
    return _permute(kernel, x, tuple(reversed(range(len(x.shape)))))


def _expand(kernel: Kernel, x: Tensor, size: Sequence[int], implicit: bool = False) -> tuple[Tensor, ...]:
    return (broadcast(x, size),)


def _unsqueeze(kernel: Kernel, x: Tensor, dim: int) -> tuple[Tensor, ...]:
    axis = dim % (len(x.shape) + 1)
    return (reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])),)


def _squeeze(kernel: Kernel, x: Tensor, dim: int | Sequence[int] | None = None) -> tuple[Tensor, ...]:
    dims = range(len(x.shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {_axis(x, d) for d in dims}
    return (reshape(x, tuple(s for k, s in enumerate(x.shape) if not (s == 1 and k in gone))),)


def _window(x: Tensor, axis: int, start: int, length: int, step: int = 1) -> Tensor:
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])

    def rule(indices: tuple[Index, ...]) -> Expr:
        return x.at((*indices[:axis], indices[axis] * step + start, *indices[axis + 1 :]))

    return Tensor(shape, x.dtype, rule)


def _slice(
    kernel: Kernel, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Tensor, ...]:
    axis = _axis(x, dim)
    first, stop, _ = slice(start, end).indices(x.shape[axis])
    return (_window(x, axis, first, max(0, (stop - first + step - 1) // step), step),)


def _select(kernel: Kernel, x: Tensor, dim: int, index: int) -> tuple[Tensor, ...]:
    axis = _axis(x, dim)
    one = _window(x, axis, index % x.shape[axis], 1)
    return (reshape(one, (*x.shape[:axis], *x.shape[axis + 1 :])),)


def _split_sizes(kernel: Kernel, x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    axis, start, parts = _axis(x, dim), 0, []
    for size in sizes:
        parts.append(_window(x, axis, start, size))
        start += size
    return tuple(parts)


def _split(kernel: Kernel, x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    total = x.shape[_axis(x, dim)]
    return _split_sizes(kernel, x, [min(size, total - at) for at in range(0, total, max(size, 1))], dim)


def _unbind(kernel: Kernel, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_select(kernel, x, dim, k)[0] for k in range(x.shape[_axis(x, dim)]))


def _cat(
    kernel: Kernel, tensors: Sequence[Tensor], dim: int = 0, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    parts = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])
    stored = dtype or parts[0].dtype
    axis, start, pieces = _axis(parts[0], dim), 0, []
    for part in parts:
        if part.dtype != stored:
            part = kernel.map(lambda b, x: x, part, dtype=stored)
        pieces.append(Piece(start, start + part.shape[axis], part))
        start += part.shape[axis]
    if len(pieces) == 1:
        return (pieces[0].tensor,)
    shape = (*parts[0].shape[:axis], start, *parts[0].shape[axis + 1 :])
    return (Tensor(shape, stored, _no_rule, axis, tuple(pieces)),)


def _no_rule(indices: tuple[Index, ...]) -> Expr:
    raise Unfusable("a concatenation has no single rule")


def _stack(kernel: Kernel, tensors: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, ...]:
    axis = dim % (len(tensors[0].shape) + 1)
    return _cat(kernel, [_unsqueeze(kernel, t, axis)[0] for t in tensors], axis)


def _pad(kernel: Kernel, x: Tensor, pad: Sequence[int], value: float = 0) -> tuple[Tensor, ...]:
    for k in range(len(pad) // 2):
        axis, (before, after) = len(x.shape) - 1 - k, pad[2 * k : 2 * k + 2]
        if before < 0 or after < 0:
            start, length = max(-before, 0), x.shape[axis] + min(before, 0) + min(after, 0)
            x = _window(x, axis, start, length)
        parts = [x]
        if before > 0:
            parts.insert(0, _filled(kernel, x, axis, before, value))
        if after > 0:
            parts.append(_filled(kernel, x, axis, after, value))
        x = _cat(kernel, parts, axis)[0] if len(parts) > 1 else x
    return (x,)


def _filled(kernel: Kernel, like: Tensor, axis: int, size: int, value: float) -> Tensor:
    return kernel.constant(value, (*like.shape[:axis], size, *like.shape[axis + 1 :]), like.dtype)


def _slice_backward(
    kernel: Kernel, grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> tuple[Tensor, ...]:
    axis = dim % len(sizes)
    if step != 1:
        raise Unfusable("slice_backward with a step")
    first = slice(start, end).indices(sizes[axis])[0]
    pad = [0] * (2 * (len(sizes) - axis))
    pad[-2:] = [first, sizes[axis] - first - grad.shape[axis]]
    return _pad(kernel, grad, pad)


def _select_backward(
    kernel: Kernel, grad: Tensor, sizes: Sequence[int], dim: int, index: int
) -> tuple[Tensor, ...]:
    axis = dim % len(sizes)
    start = index % sizes[axis]
    return _slice_backward(kernel, _unsqueeze(kernel, grad, axis)[0], sizes, axis, start, start + 1, 1)


def _flip(kernel: Kernel, x: Tensor, dims: Sequence[int]) -> tuple[Tensor, ...]:
    axes = {_axis(x, d) for d in dims}

    def rule(indices: tuple[Index, ...]) -> Expr:
        return x.at(tuple(i * -1 + (x.shape[k] - 1) if k in axes else i for k, i in enumerate(indices)))

    return (Tensor(x.shape, x.dtype, rule),)


def _repeat(kernel: Kernel, x: Tensor, repeats: Sequence[int]) -> tuple[Tensor, ...]:
    x = reshape(x, (1,) * (len(repeats) - len(x.shape)) + x.shape)
    shape = tuple(s * r for s, r in zip(x.shape, repeats, strict=True))
    return (Tensor(shape, x.dtype, lambda ix: x.at(tuple(i % s for i, s in zip(ix, x.shape, strict=True)))),)


def _triangle(keep: str) -> Lower:
    def lower(kernel: Kernel, x: Tensor, diagonal: int = 0) -> tuple[Tensor, ...]:
        b = kernel.builder

        def rule(indices: tuple[Index, ...]) -> Expr:
            gap = b.apply("sub", b.index(indices[-1]), b.index(indices[-2]))
            inside = b.compare(keep, gap, b.const(diagonal, torch.int64))
            return b.where(inside, x.at(indices), b.const(0, x.dtype))

        return (Tensor(x.shape, x.dtype, rule),)

    return lower


def _rows(kernel: Kernel, table: Tensor, axis: int, positions: Tensor) -> Tensor:
    """``table`` indexed along `axis` by a tensor of positions, which must be loadable."""
    shape = (*table.shape[:axis], *positions.shape, *table.shape[axis + 1 :])
    width = len(positions.shape)

    def rule(indices: tuple[Index, ...]) -> Expr:
        place = positions.at(indices[axis : axis + width])
        rest = (*indices[:axis], Index(), *indices[axis + width :])
        return _gather(kernel, table, axis, rest, place)

    return Tensor(shape, table.dtype, rule)


def _gather(kernel: Kernel, table: Tensor, axis: int, rest: tuple[Index, ...], place: Expr) -> Expr:
    b = kernel.builder
    here = table.at(rest)
    if here.leaf is None or here.leaf.kind != "load" or here.args:
        raise Unfusable("an index into a tensor that is computed inside the group: keep the two apart")
    step = table.at((*rest[:axis], Index.of(1), *rest[axis + 1 :])) if table.shape[axis] > 1 else here
    assert step.leaf is not None and here.leaf.stored is not None
    stride = (step.leaf.index - here.leaf.index).constant
    return b.gather(here.leaf.source, here.leaf.index, place, stride, table.shape[axis], here.leaf.stored)


def _embedding(kernel: Kernel, weight: Tensor, indices: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (_rows(kernel, weight, 0, indices),)


def _index_select(kernel: Kernel, x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, ...]:
    return (_rows(kernel, x, _axis(x, dim), index),)


def _gather_op(
    kernel: Kernel, x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False
) -> tuple[Tensor, ...]:
    axis = _axis(x, dim)

    def rule(indices: tuple[Index, ...]) -> Expr:
        rest = (*indices[:axis], Index(), *indices[axis + 1 :])
        return _gather(kernel, x, axis, rest, index.at(indices))

    return (Tensor(index.shape, x.dtype, rule),)


def _nearest(kernel: Kernel, x: Tensor, output_size: Sequence[int], *_: Any) -> tuple[Tensor, ...]:
    lead = len(x.shape) - len(output_size)
    factors = []
    for have, want in zip(x.shape[lead:], output_size, strict=True):
        if want % have:
            raise Unfusable(f"nearest resize from {have} to {want}: not a whole factor")
        factors.append(want // have)

    def rule(indices: tuple[Index, ...]) -> Expr:
        return x.at((*indices[:lead], *(i // f for i, f in zip(indices[lead:], factors, strict=True))))

    return (Tensor((*x.shape[:lead], *output_size), x.dtype, rule),)


MOVERS: dict[str, Lower] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.reshape.default": _view,
    "aten._reshape_alias.default": lambda kernel, x, size, stride: _view(kernel, x, size),
    "aten.flatten.using_ints": _flatten,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _t,
    "aten.expand.default": _expand,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.default": _squeeze,
    "aten.squeeze.dim": _squeeze,
    "aten.squeeze.dims": _squeeze,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": lambda kernel, x, dim, start, length: (_window(x, _axis(x, dim), start, length),),
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_sizes,
    "aten.unbind.int": _unbind,
    "aten.alias.default": lambda kernel, x: (x,),
    "aten.detach.default": lambda kernel, x: (x,),
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.slice_backward.default": _slice_backward,
    "aten.select_backward.default": _select_backward,
    "aten.flip.default": _flip,
    "aten.repeat.default": _repeat,
    "aten.tril.default": _triangle("le"),
    "aten.triu.default": _triangle("ge"),
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather_op,
    "aten.upsample_nearest2d.default": _nearest,
}
