"""Real calls of views and of element-wise operators: those tagged by PyTorch (a few) and all untagged."""

from __future__ import annotations

from tests.property.drawing import Build, Draw

from lowtide.ir.ops import Arg, Ref


def _regroup(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of the same number of elements: merge neighbours, split at divisors, add ones."""
    sizes = list(shape)
    for _ in range(draw.size(0, 3)):
        move = draw.one_of("merge", "split", "one")
        at = draw.size(0, max(0, len(sizes) - 1))
        if move == "merge" and at + 1 < len(sizes):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif move == "split" and sizes:
            divisors = [d for d in range(1, sizes[at] + 1) if sizes[at] % d == 0]
            first = draw.one_of(*divisors)
            sizes[at : at + 1] = [first, sizes[at] // first]
        elif move == "one":
            sizes.insert(at, 1)
    return tuple(sizes)


def _view(draw: Draw) -> tuple[Arg, ...]:
    shape = tuple(draw.one_of(1, 2, 3, 4, 6) for _ in range(draw.size(1, 4)))
    new = list(_regroup(draw, shape))
    if draw.flag() and new:
        new[draw.size(0, len(new) - 1)] = -1
    return (draw.tensor(*shape), tuple(new))


def _permute(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.permutation(len(shape)))


def _two_dims(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    rank = len(shape)
    return (draw.tensor(*shape), draw.size(-rank, rank - 1), draw.size(-rank, rank - 1))


def _one_dim(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.size(-len(shape), len(shape) - 1))


def _unsqueeze(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(0)
    return (draw.tensor(*shape), draw.size(-len(shape) - 1, len(shape)))


def _squeeze_dims(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), tuple(k for k in range(len(shape)) if draw.flag()))


def _expand(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(0, 3)
    new = tuple(draw.size() if size == 1 else draw.one_of(-1, size) for size in shape)
    return (draw.tensor(*shape), (*(draw.size() for _ in range(draw.size(0, 2))), *new))


def _repeat(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(1, 3)
    return (draw.tensor(*shape), tuple(draw.size(1, 3) for _ in range(len(shape) + draw.size(0, 1))))


def _select(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    return (draw.tensor(*shape), dim, draw.size(-shape[dim], shape[dim] - 1))


def _slice(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    bounds = draw.one_of((0, 9223372036854775807), (0, shape[dim]), (0, 1), (-1, 9223372036854775807))
    return (draw.tensor(*shape), dim, *bounds, draw.one_of(1, 1, 2))


def _split(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.size(1, 3), draw.size(0, len(shape) - 1))


def _split_sizes(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    first = draw.size(0, shape[dim])
    return (draw.tensor(*shape), (first, shape[dim] - first), dim)


def _slice_scatter(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    source = tuple(1 if k == dim else size for k, size in enumerate(shape))
    return (draw.tensor(*shape), draw.tensor(*source), dim, 0, 1)


def _select_scatter(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    return (draw.tensor(*shape), draw.tensor(*(s for k, s in enumerate(shape) if k != dim)), dim, 0)


def _select_backward(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    return (draw.tensor(*(s for k, s in enumerate(shape) if k != dim)), shape, dim, 0)


def _slice_backward(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    stop = draw.size(1, shape[dim])
    source = tuple(stop if k == dim else size for k, size in enumerate(shape))
    return (draw.tensor(*source), shape, dim, 0, stop, 1)


def _cat(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    parts = [
        tuple(draw.size() if k == dim else s for k, s in enumerate(shape)) for _ in range(draw.size(1, 3))
    ]
    return (tuple(draw.tensor(*part) for part in parts), draw.one_of(dim, dim - len(shape)))


def _stack(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(0, 3)
    return (tuple(draw.tensor(*shape) for _ in range(draw.size(1, 3))), draw.size(0, len(shape)))


def _pad(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    pad = tuple(draw.size(0, 2) for _ in range(2 * draw.size(1, len(shape))))
    return (draw.tensor(*shape), pad, 0.5)


def _dims_list(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), tuple(k for k in range(len(shape)) if draw.flag()))


def _roll(draw: Draw) -> tuple[Arg, ...]:
    tensor, dims = _dims_list(draw)
    dims = dims or (0,)
    assert isinstance(dims, tuple)
    return (tensor, tuple(draw.size(0, 2) for _ in dims), dims)


def _triangle(draw: Draw) -> tuple[Arg, ...]:
    return (draw.tensor(*draw.shape(2, 4)), draw.size(-1, 1))


def _unbind(draw: Draw) -> tuple[Arg, ...]:
    return _one_dim(draw)


def _new(*rest: Arg) -> Build:
    return lambda draw: (draw.tensor(draw.size()), draw.shape(), *rest)


def _unary(*rest: Arg) -> Build:
    return lambda draw: (draw.tensor(*draw.shape(0), low=0.1), *rest)


def _binary(*rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = draw.shape(0)
        pair = [draw.tensor(*shape), draw.broadcast(shape)]
        return (*(pair if draw.flag() else reversed(pair)), *rest)

    return build


def _same_shape(count: int, *rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = draw.shape(0)
        return (*(draw.tensor(*shape) for _ in range(count)), *rest)

    return build


def _insert(pair: tuple[Arg, ...], *between: Arg) -> tuple[Arg, ...]:
    return (pair[0], *between, *pair[1:])


def _where(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(0)
    condition = draw.use(draw.tensors[draw.broadcast(shape).index] > 0)
    draw.tensors.pop(0)
    return (Ref(condition.index - 1), draw.tensor(*shape), draw.broadcast(shape))


def _masked_fill(value: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = draw.shape(0)
        return (draw.tensor(*shape), draw.use(draw.random(*shape) > 0), value)

    return build


def _masked_fill_tensor(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(0)
    return (draw.tensor(*shape), draw.use(draw.random(*shape) > 0), draw.tensor())


VIEW_CALLS: dict[str, Build] = {
    "aten.view.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.view_copy.default": _view,
    "aten.reshape.default": _view,
    "aten.permute.default": _permute,
    "aten.transpose.int": _two_dims,
    "aten.t.default": lambda draw: (draw.tensor(*draw.shape(0, 2)),),
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.dim": _one_dim,
    "aten.squeeze.dims": _squeeze_dims,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_sizes,
    "aten.chunk.default": _split,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.select_backward.default": _select_backward,
    "aten.slice_backward.default": _slice_backward,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.flip.default": _dims_list,
    "aten.roll.default": _roll,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.full.default": lambda draw: (draw.shape(0), 1.5),
    "aten.zeros.default": lambda draw: (draw.shape(0),),
    "aten.ones.default": lambda draw: (draw.shape(0),),
    "aten.new_full.default": _new(1.5),
    "aten.new_zeros.default": _new(),
    "aten.new_ones.default": _new(),
    "aten.add.Tensor": _binary(),
    "aten.mul.Tensor": _binary(),
    "aten.div.Tensor": _binary(),
    "aten.pow.Tensor_Scalar": _unary(3),
    "aten.gelu.default": _unary(),
    "aten.relu.default": _unary(),
    "aten.clone.default": _unary(),
    "aten.threshold_backward.default": _same_shape(2, 0.0),
    "aten.gelu_backward.default": _same_shape(2),
    "aten.tanh_backward.default": _same_shape(2),
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill(-1.0),
    "aten.masked_fill.Tensor": _masked_fill_tensor,
    "aten._to_copy.default": _unary(),
    "aten.alias.default": _unary(),
    "aten.copy.default": lambda draw: (lambda s: (draw.tensor(*s), draw.broadcast(s)))(draw.shape(0)),
    "aten.detach.default": _unary(),
    "aten.elu_backward.default": lambda draw: _insert(_same_shape(2)(draw), 1.0, 1.0, 1.0, False),
    "aten.fill.Scalar": _unary(2.0),
    "aten.full_like.default": _unary(2.0),
    "aten.hardsigmoid_backward.default": _same_shape(2),
    "aten.hardswish.default": _unary(),
    "aten.hardswish_backward.default": _same_shape(2),
    "aten.hardtanh_backward.default": _same_shape(2, 0.0, 6.0),
    "aten.leaky_relu_backward.default": _same_shape(2, 0.1, False),
    "aten.lift_fresh_copy.default": _unary(),
    "aten.log_sigmoid_backward.default": _same_shape(3),
    "aten.mish_backward.default": _same_shape(2),
    "aten.ones_like.default": _unary(),
    "aten.softplus_backward.default": _same_shape(2, 1, 20),
    "aten.zeros_like.default": _unary(),
}
