"""Convolutions, pools and resizing: what an element of their result is made of.

Problem.  In an inference they are most of the time and of the bytes; what surrounds them (bias, norm,
activation, residual; concatenation, padding) should never be stored.

Method.  A convolution is a `Window` (dense, or channel by channel), emitted by `sliding`; one of 1 x 1 is a
matrix product over pixels, a transposed one whose windows do not overlap is a matrix product whose columns
are the pixels of a window.  Pools without padding are plain expressions over their window; pools with
padding are windows.  Resizing is a change of index, bilinear a weighted sum of four loads.

Not done here: convolutions in groups other than channel by channel, transposed ones that overlap, of one or
three dimensions, weights that change from call to call (ATen's kernels are as good at packing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import torch

from lowtide.fusion.codegen.expr import Builder, Expr, walk
from lowtide.fusion.codegen.index import Index, Var, flatten, unflatten
from lowtide.fusion.codegen.reductions import Metas, Outputs
from lowtide.fusion.codegen.tensor import Kernel, Tensor, Unfusable, Window, reshape

__all__ = ["WINDOWS"]

B = Builder
INLINE = 16  # taps of a pool that is written out


def _pair(sizes: Sequence[int], default: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    return default if not sizes else (sizes[0], sizes[-1])


def _convolution(
    kernel: Kernel, metas: Metas, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int],
    groups: int,
) -> Outputs:  # fmt: skip
    if len(x.shape) != 4 or {x.dtype, weight.dtype} != {torch.float32}:
        raise Unfusable("a convolution that is not two-dimensional in float32")
    if not metas[0].numel or not weight.numel or not x.numel:
        raise Unfusable("a convolution without elements")
    if not kernel.constant_only(weight.at(_axes("d", weight.shape))):
        raise Unfusable("a convolution whose weight changes from call to call")
    taps, steps, pad, spread = weight.shape[2:], _pair(stride), _pair(padding, (0, 0)), _pair(dilation)
    if transposed:
        if (steps, pad, spread, groups) != (taps, (0, 0), (1, 1), 1) or any(output_padding):
            raise Unfusable("a transposed convolution whose windows overlap")
        return (_spread(kernel, x, weight, bias),)
    grid = metas[0].shape[2:]
    if groups == 1:
        plain = taps == steps == (1, 1) and pad == (0, 0) and not x.pieces
        result = _pixels(kernel, x, weight) if plain else None
    elif groups == x.shape[1] == weight.shape[0]:
        result = None
    else:
        raise Unfusable(f"a convolution in {groups} groups")
    way = "dense" if groups == 1 else "multiply"
    if result is None:
        result = _slide(kernel, x, weight, way, (taps, steps, pad, spread, grid))
    return (_with_bias(kernel, result, bias),)


def _axes(name: str, shape: Sequence[int]) -> tuple[Index, ...]:
    return tuple(Index.of(Var(f"{name}{k}", size)) for k, size in enumerate(shape))


def _with_bias(kernel: Kernel, result: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return result
    return kernel.map(
        lambda b, x, y: b.apply("add", x, y), result, reshape(bias, (result.shape[1],) + (1,) * 2)
    )


def _pixels(kernel: Kernel, x: Tensor, weight: Tensor) -> Tensor:
    """A 1 x 1 convolution: ``[pixels, c] @ [c, channels]``."""
    n, c, h, w = x.shape
    wide = weight.shape[0]

    rows = _rows(x)
    columns = Tensor((1, c, wide), x.dtype, lambda ix: weight.at((ix[2], ix[1], Index(), Index())))
    result = kernel.contract(rows, columns)
    return Tensor(
        (n, wide, h, w),
        x.dtype,
        lambda ix: result.at((Index(), flatten((ix[0], ix[2], ix[3]), (n, h, w)), ix[1])),
    )


def _rows(x: Tensor) -> Tensor:
    """``[n, c, h, w]`` as ``[1, pixels, c]``."""
    n, c, h, w = x.shape

    def rule(ix: tuple[Index, ...]) -> Expr:
        image, row, column = unflatten(ix[1], (n, h, w))
        return x.at((image, ix[2], row, column))

    return Tensor((1, n * h * w, c), x.dtype, rule)


def _spread(kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A transposed convolution with stride = size of its window: ``[pixels, c] @ [c, window, channels]``.

    `finer` lets a store see the pixels of a window as axes of their own.
    """
    if x.pieces:
        raise Unfusable("a transposed convolution of a concatenation")
    n, c, h, w = x.shape
    _, wide, kh, kw = weight.shape

    def right(ix: tuple[Index, ...]) -> Expr:
        return weight.at((ix[1], ix[2] % wide, ix[2] // (kw * wide), ix[2] // wide % kw))

    result = kernel.contract(_rows(x), Tensor((1, c, kh * kw * wide), x.dtype, right))

    def fine(ix: tuple[Index, ...]) -> Expr:
        row, column = (
            flatten((ix[0], ix[2], ix[4]), (n, h, w)),
            flatten((ix[3], ix[5], ix[1]), (kh, kw, wide)),
        )
        value = result.at((Index(), row, column))
        return value if bias is None else kernel.builder.apply("add", value, bias.at((ix[1],)))

    def coarse(ix: tuple[Index, ...]) -> Expr:
        return fine((ix[0], ix[1], ix[2] // kh, ix[2] % kh, ix[3] // kw, ix[3] % kw))

    finer = Tensor((n, wide, h, kh, w, kw), x.dtype, fine)
    return Tensor((n, wide, h * kh, w * kw), x.dtype, coarse, finer=finer)


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]


def _slide(kernel: Kernel, x: Tensor, weight: Tensor | None, way: str, geometry: Geometry) -> Tensor:
    """Register a window and return its result as ``[n, channels, h, w]``."""
    taps, stride, pad, dilation, grid = ((a, b) for a, b in geometry)
    n, c = x.shape[:2]
    wide = weight.shape[0] if way == "dense" and weight is not None else c
    planar = way != "dense" and _planar(x)
    depth = prod(taps) * (c if way == "dense" else 1)
    sizes = (n * c, grid[0], grid[1], depth) if planar else (1, n * grid[0] * grid[1], wide, depth)
    name = f"v{len(kernel.reductions)}"

    def left(b: Index, m: Index, k: Index) -> Expr:
        found = [element for _, _, element in window.parts]
        total = found[0]
        for each in found[1:]:
            total = kernel.builder.apply("add", total, each)
        return total

    def right(b: Index, k: Index, n: Index) -> Expr:
        if weight is None:
            return kernel.builder.const(1.0, torch.float32)
        return weight.at(_axes("y", weight.shape))

    window = Window(
        name, sizes, left, right, x, weight, way, taps, stride, pad, dilation, grid, planar
    )  # fmt: skip
    kernel.reductions.append(window)
    order = (0, 1, 2, 3) if planar else (0, 2, 3, 1)
    shape = (n, wide, *grid)

    def rule(ix: tuple[Index, ...]) -> Expr:
        place = flatten([ix[k] for k in order], [shape[k] for k in order])
        return kernel.builder.reduced(name, place, torch.float32)

    return Tensor(shape, torch.float32, rule)


def _planar(x: Tensor) -> bool:
    """Whether a tensor lies in memory with its width innermost (else with its channels)."""
    axes = [Var(name, size) for name, size in zip("ncyx", x.shape, strict=True)]
    tensors = [piece.tensor for piece in x.pieces] or [x]
    score = 0
    for tensor in tensors:
        for node in walk(tensor.at(tuple(Index.of(axis) for axis in axes))):
            if node.leaf is not None and node.leaf.kind == "load":
                index = node.leaf.index
                score += (index.coefficient(axes[3]) == 1) - (index.coefficient(axes[1]) == 1)
    return score >= 0


def _pool_geometry(
    x: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    result: Sequence[int],
) -> Geometry:  # fmt: skip
    if len(x.shape) != 4 or x.dtype != torch.float32 or not prod(result) or not x.numel:
        raise Unfusable("a pool that is not over images in float32")
    taps = _pair(size)
    return taps, _pair(stride, taps), _pair(padding, (0, 0)), _pair(dilation), result[2:]


def _inside(x: Tensor, geometry: Geometry) -> bool:
    """Whether no window reaches over the border."""
    taps, stride, pad, dilation, grid = geometry
    return not any(pad) and all(
        (g - 1) * s + (t - 1) * d < size
        for g, s, t, d, size in zip(grid, stride, taps, dilation, x.shape[2:], strict=True)
    )


def _combine_window(kernel: Kernel, x: Tensor, geometry: Geometry, op: str, shape: Sequence[int]) -> Tensor:
    """A small window written out as one expression."""
    taps, stride, _, dilation, _ = geometry
    rows = [(i * dilation[0], j * dilation[1]) for i, j in product(range(taps[0]), range(taps[1]))]

    def rule(ix: tuple[Index, ...]) -> Expr:
        total: Expr | None = None
        for i, j in rows:
            value = x.at((ix[0], ix[1], ix[2] * stride[0] + i, ix[3] * stride[1] + j))
            total = value if total is None else kernel.builder.apply(op, total, value)
        assert total is not None
        return total

    return Tensor(tuple(shape), x.dtype, rule)


def _max_pool(
    kernel: Kernel, metas: Metas, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> Outputs:  # fmt: skip
    """(the largest, None): who asks for the places of the largest gets no kernel."""
    geometry = _pool_geometry(x, kernel_size, stride, padding, dilation, metas[0].shape)
    if _inside(x, geometry) and prod(geometry[0]) <= INLINE and not x.pieces:
        return _combine_window(kernel, x, geometry, "max", metas[0].shape), None
    return _slide(kernel, x, None, "largest", geometry), None


def _avg_pool(
    kernel: Kernel, metas: Metas, x: Tensor, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] = (0,), ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Outputs:  # fmt: skip
    geometry = _pool_geometry(x, kernel_size, stride, padding, (1,), metas[0].shape)
    inside = _inside(x, geometry)
    if not inside and (ceil_mode or (not count_include_pad and divisor_override is None)):
        raise Unfusable("an average over windows of several sizes")
    return (_mean(kernel, x, geometry, divisor_override or prod(geometry[0]), metas[0].shape),)


def _mean(kernel: Kernel, x: Tensor, geometry: Geometry, count: int, shape: Sequence[int]) -> Tensor:
    if _inside(x, geometry) and prod(geometry[0]) <= INLINE and not x.pieces:
        total = _combine_window(kernel, x, geometry, "add", shape)
    else:
        total = _slide(kernel, x, None, "total", geometry)
    return kernel.map(lambda b, v: b.apply("div", v, b.const(count, v.dtype)), total)


def _adaptive_avg_pool(kernel: Kernel, metas: Metas, x: Tensor, output_size: Sequence[int]) -> Outputs:
    grid = _pair(output_size)
    if len(x.shape) != 4 or any(size % want for size, want in zip(x.shape[2:], grid, strict=True)):
        raise Unfusable("an adaptive pool whose windows differ")
    taps = tuple(size // want for size, want in zip(x.shape[2:], grid, strict=True))
    if grid == (1, 1):
        total = kernel.reduce("sum", x, (2, 3))
        return (kernel.map(lambda b, v: b.apply("div", v, b.const(prod(taps), v.dtype)), total),)
    geometry = _pool_geometry(x, taps, taps, (0,), (1,), metas[0].shape)
    return (_mean(kernel, x, geometry, prod(taps), metas[0].shape),)


WINDOWS: dict[str, Callable[..., Outputs]] = {
    "aten.convolution.default": _convolution,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.avg_pool2d.default": _avg_pool,
    "aten._adaptive_avg_pool2d.default": _adaptive_avg_pool,
}
