"""Virtual tensors: a value of a fused body as a function from indices to a scalar expression.

Problem.  Intermediates of a fused group are never stored; what exists of them is a rule that gives any
element when a consumer asks for it.

Method.  `Tensor.at(indices)` makes that expression.  Element-wise operators apply to the operands' elements
(with broadcasting), views change the indices, and a reduction is a named result that `reduce` registers in
the kernel and that later expressions refer to.  `concat` makes a tensor of pieces: element-wise operators
keep the pieces apart, and a store writes each into its slice, so that no branch is taken per element.

Invariants.  `at` is memoised per tensor, so shared sub-graphs cost one visit per distinct index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from lowtide.errors import LowtideError
from lowtide.fusion.codegen.expr import Builder, Expr, walk
from lowtide.fusion.codegen.index import Index, Var, flatten, unflatten

__all__ = [
    "Contraction",
    "Kernel",
    "Piece",
    "Reduction",
    "Store",
    "Tensor",
    "Unfusable",
    "Window",
    "broadcast",
    "reshape",
]

At = Callable[[tuple[Index, ...]], Expr]


class Unfusable(LowtideError):
    """A body holds something for which no kernel can be generated; the group runs unfused."""


@dataclass(frozen=True)
class Piece:
    """``[start, stop)`` of one axis of a concatenation."""

    start: int
    stop: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Tensor:
    """A virtual tensor: shape, stored dtype and the rule for its elements; `pieces` lie along `axis`.

    `finer` is the same tensor ``[n, c, h, w]`` as ``[n, c, h / a, a, w / b, b]``, where a store can use that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: At
    axis: int = 0
    pieces: tuple[Piece, ...] = ()
    finer: Tensor | None = None
    _memo: dict[tuple[Index, ...], Expr] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def at(self, indices: tuple[Index, ...]) -> Expr:
        """The element at `indices`; raises Unfusable inside a concatenation."""
        found = self._memo.get(indices)
        if found is None:
            if self.pieces:
                raise Unfusable(
                    "a concatenation is read by something that is not element-wise: keep it apart"
                )
            found = self._memo[indices] = self.rule(indices)
        return found


@dataclass(frozen=True, eq=False)
class Reduction:
    """``result[kept] = combine over reduced of element(kept, reduced)``.

    `kind` is sum, prod, max, min, any or all; `dtype` the type of the result (float32 sums accumulate
    blocks in float32 and add the blocks in float64).  `trailing`: the reduced axes are the last ones.
    """

    name: str
    kind: str
    dtype: torch.dtype
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    element: Callable[[tuple[Index, ...], tuple[Index, ...]], Expr]
    trailing: bool = True


@dataclass(frozen=True, eq=False)
class Contraction:
    """``result[b, m, n] = sum over k of left(b, m, k) * right(b, k, n)``, float32."""

    name: str
    sizes: tuple[int, int, int, int]  # batch, m, n, k
    left: Callable[[Index, Index, Index], Expr]
    right: Callable[[Index, Index, Index], Expr]

    @property
    def kept(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return self.sizes[:3]


@dataclass(frozen=True, eq=False)
class Window(Contraction):
    """Every result combines a window of `source` ``[n, c, h, w]``; `pad` surrounds it as `fill` says.

    `way` is dense (a convolution: `weight` is ``[result channel, c, kh, kw]``), or, each channel by itself,
    multiply, largest or total (`weight` is ``[c, 1, kh, kw]`` or None).  `grid` is the results' height and
    width.  The result is stored channels-last, ``[n, h, w, c]``; if `planar`, ``[n, c, h, w]``.
    """

    source: Tensor
    weight: Tensor | None
    way: str
    taps: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int]
    grid: tuple[int, int]
    planar: bool = False

    @property
    def axes(self) -> tuple[Var, Var, Var, Var]:
        """The variables over which `source` is read."""
        return tuple(  # type: ignore[return-value]
            Var(name, size) for name, size in zip(("xn", "xc", "xh", "xw"), self.source.shape, strict=True)
        )

    @property
    def parts(self) -> tuple[tuple[int, int, Expr], ...]:
        """(first channel, one past the last, element) of `source`; several if it is a concatenation."""
        indices = tuple(Index.of(axis) for axis in self.axes)
        if not self.source.pieces:
            return ((0, self.source.shape[1], self.source.at(indices)),)
        if self.source.axis != 1:
            raise Unfusable("a window over a concatenation that is not along the channels")
        return tuple((p.start, p.stop, p.tensor.at(indices)) for p in self.source.pieces)


@dataclass(frozen=True, eq=False)
class Store:
    """Write all elements of `tensor` to ``buffer[offset + sum(stride * index)]`` as `dtype`."""

    buffer: str
    tensor: Tensor
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


@dataclass
class Kernel:
    """What one kernel has to do: reductions in dependency order, stores, and the builder they share.

    `constants` are the buffers that stay the same from call to call; `prepared` are tensors that are computed
    from them once, under the name of the buffer that keeps them.
    """

    builder: Builder = field(default_factory=Builder)
    reductions: list[Reduction | Contraction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    prepared: list[tuple[str, Tensor]] = field(default_factory=list)

    def prepare(self, tensor: Tensor) -> Tensor:
        """`tensor`, computed once and kept if it depends on constants alone; else itself."""
        axes = tuple(Index.of(Var(f"d{k}", size)) for k, size in enumerate(tensor.shape))
        if tensor.dtype != torch.float32 or not self.constant_only(tensor.at(axes)):
            return tensor
        name = f"w{len(self.prepared)}"
        self.prepared.append((name, tensor))
        shape = tensor.shape
        return Tensor(
            shape, tensor.dtype, lambda ix: self.builder.load(name, flatten(ix, shape), torch.float32)
        )

    def constant_only(self, element: Expr) -> bool:
        """Whether an element is made of constants, at least one of them."""
        leaves = [node.leaf for node in walk(element) if node.leaf is not None and node.leaf.kind != "const"]
        known = all(leaf.kind == "load" and leaf.source in self.constants for leaf in leaves)
        return bool(leaves) and known

    def constant(self, value: float | int | bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor filled with one number."""
        return Tensor(tuple(shape), dtype, lambda _: self.builder.const(value, dtype))

    def map(self, emit: Callable[..., Expr], *tensors: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Element-wise `emit(builder, *elements)` with broadcasting, stored as `dtype`."""
        shape: tuple[int, ...] = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
        stored = dtype or tensors[0].dtype
        split = next((t for t in tensors if t.pieces and t.shape == tuple(shape)), None)
        if split is not None:
            return self._map_pieces(split, emit, tensors, stored)
        builder = self.builder

        def rule(indices: tuple[Index, ...]) -> Expr:
            elements = (t.at(_project(indices, t.shape)) for t in tensors)
            return builder.narrow(emit(builder, *elements), stored)

        return Tensor(tuple(shape), stored, rule)

    def _map_pieces(
        self, split: Tensor, emit: Callable[..., Expr], tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> Tensor:
        pieces = []
        for piece in split.pieces:
            parts = [_restrict(t, split, piece) for t in tensors]
            pieces.append(Piece(piece.start, piece.stop, self.map(emit, *parts, dtype=dtype)))
        return Tensor(split.shape, dtype, split.rule, split.axis, tuple(pieces))

    def reduce(
        self, kind: str, tensor: Tensor, axes: Sequence[int], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Combine over `axes`; they stay with size 1.  `dtype` is the result's (default: the input's)."""
        axes = tuple(sorted({axis % len(tensor.shape) for axis in axes})) if tensor.shape else ()
        stored = dtype or tensor.dtype
        kept_axes = tuple(k for k in range(len(tensor.shape)) if k not in axes)
        order = kept_axes + axes

        def element(kept: tuple[Index, ...], reduced: tuple[Index, ...]) -> Expr:
            place = dict(zip(order, kept + reduced, strict=True))
            return tensor.at(tuple(place[k] for k in range(len(tensor.shape))))

        kept_sizes = tuple(tensor.shape[k] for k in kept_axes)
        reduced_sizes = tuple(tensor.shape[k] for k in axes)
        result = self._register(kind, stored, kept_sizes, reduced_sizes, element)
        self._mark(kept_axes, axes, tensor.shape)
        shape = tuple(1 if k in axes else size for k, size in enumerate(tensor.shape))

        def rule(indices: tuple[Index, ...]) -> Expr:
            return self.builder.narrow(result(tuple(indices[k] for k in kept_axes)), stored)

        return Tensor(shape, stored, rule)

    def _mark(self, kept: Sequence[int], reduced: Sequence[int], shape: Sequence[int]) -> None:
        """Note whether the last reduction's axes come after all that it keeps."""
        wide = [k for k in kept if shape[k] > 1]
        last = self.reductions[-1]
        if isinstance(last, Reduction) and wide and reduced and max(wide) > min(reduced):
            self.reductions[-1] = replace(last, trailing=False)

    def contract(self, left: Tensor, right: Tensor) -> Tensor:
        """The matrix product of ``[b, m, k]`` and ``[b, k, n]``, both float32."""
        if (left.dtype, right.dtype) != (torch.float32, torch.float32):
            raise Unfusable(f"a matrix product of {left.dtype} and {right.dtype}")
        (batch, m, k), n = left.shape, right.shape[2]
        if min(batch, m, n, k) < 1:
            raise Unfusable("a matrix product without elements")
        name = f"g{len(self.reductions)}"
        self.reductions.append(
            Contraction(
                name,
                (batch, m, n, k),
                lambda b, i, j: left.at((b, i, j)),
                lambda b, i, j: right.at((b, i, j)),
            )
        )
        shape = (batch, m, n)
        return Tensor(
            shape, torch.float32, lambda ix: self.builder.reduced(name, flatten(ix, shape), torch.float32)
        )

    def _register(
        self,
        kind: str,
        dtype: torch.dtype,
        kept: tuple[int, ...],
        reduced: tuple[int, ...],
        element: Callable[[tuple[Index, ...], tuple[Index, ...]], Expr],
    ) -> At:
        """Add a reduction; few results over many elements are split into chunks first."""
        chunks = _chunks(prod(kept), prod(reduced))
        if chunks > 1:
            part = prod(reduced) // chunks

            def chunk_element(k: tuple[Index, ...], r: tuple[Index, ...]) -> Expr:
                return element(k[1:], unflatten(k[0] * part + r[0], reduced))

            inner = self._add(kind, dtype, (chunks, *kept), (part,), chunk_element)
            return self._add(kind, dtype, kept, (chunks,), lambda k, r: inner((r[0], *k)))
        return self._add(kind, dtype, kept, reduced, element)

    def _add(
        self,
        kind: str,
        dtype: torch.dtype,
        kept: tuple[int, ...],
        reduced: tuple[int, ...],
        element: Callable[[tuple[Index, ...], tuple[Index, ...]], Expr],
    ) -> At:
        name = f"m{len(self.reductions)}"
        self.reductions.append(Reduction(name, kind, dtype, kept, reduced, element))
        return lambda indices: self.builder.reduced(name, flatten(indices, kept), dtype)


def _chunks(results: int, elements: int) -> int:
    """Into how many chunks to split a reduction so that threads share it; fixed by the shape alone."""
    if results >= 64 or elements < 1 << 16:
        return 1
    most = max(64 // max(results, 1), 1) * 2
    return max((c for c in range(1, most + 1) if elements % c == 0), default=1)


def _project(indices: tuple[Index, ...], shape: tuple[int, ...]) -> tuple[Index, ...]:
    """The indices of a broadcast operand."""
    own = indices[len(indices) - len(shape) :]
    return tuple(Index() if size == 1 else index for index, size in zip(own, shape, strict=True))


def _restrict(tensor: Tensor, split: Tensor, piece: Piece) -> Tensor:
    """The part of an operand that belongs to one piece of `split`."""
    axis = split.axis - (len(split.shape) - len(tensor.shape))
    if axis < 0 or tensor.shape[axis] == 1:
        return tensor
    for own in tensor.pieces if tensor.axis == axis else ():
        if (own.start, own.stop) == (piece.start, piece.stop):
            return own.tensor
    shape = (*tensor.shape[:axis], piece.stop - piece.start, *tensor.shape[axis + 1 :])

    def rule(indices: tuple[Index, ...]) -> Expr:
        return tensor.at((*indices[:axis], indices[axis] + piece.start, *indices[axis + 1 :]))

    return Tensor(shape, tensor.dtype, rule)


def reshape(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)

    def rule(indices: tuple[Index, ...]) -> Expr:
        return tensor.at(unflatten(flatten(indices, shape), tensor.shape))

    return Tensor(shape, tensor.dtype, rule)


def broadcast(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand to `shape` (-1 keeps a size)."""
    lead = len(shape) - len(tensor.shape)
    full = tuple(tensor.shape[k - lead] if size == -1 else size for k, size in enumerate(shape))
    return Tensor(full, tensor.dtype, lambda indices: tensor.at(_project(indices, tensor.shape)))
