"""Real calls of reductions, row operators, normalisations, losses and gathers."""

from __future__ import annotations

import math

import torch
from tests.property.drawing import Build, Draw, real_call

from lowtide.ir.ops import Arg, Ref
from lowtide.ir.philox import PHILOX


def _philox(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    given = tuple(draw.use(torch.arange(size) * step) for size, step in zip(shape, strides, strict=True))
    order = tuple(reversed(range(len(shape)))) if draw.flag() else tuple(range(len(shape)))
    kind = draw.one_of("bernoulli", "uniform", "normal")
    return (12345.0, given, tuple(range(len(shape))), shape, strides, order, kind, 0.5, 1.0, torch.float64)


def _reduce(*rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = draw.shape()
        dims = tuple(k - draw.one_of(0, len(shape)) for k in range(len(shape)) if draw.flag())
        return (draw.tensor(*shape), dims or (0,), *rest, draw.flag())

    return build


def _reduce_one(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.size(-len(shape), len(shape) - 1), draw.flag())


def _any(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.use(draw.random(*shape) > 0), draw.size(0, len(shape) - 1), draw.flag())


def _norm(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), 2, (draw.size(0, len(shape) - 1),), draw.flag())


def _rows(draw: Draw, *rest: Arg) -> tuple[Arg, ...]:
    shape = draw.shape()
    return (draw.tensor(*shape), draw.size(-len(shape), len(shape) - 1), *rest)


def _rows_backward(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    output = draw.random(*shape).softmax(dim)
    return (draw.tensor(*shape), draw.use(output), dim, torch.float64)


def _layer_norm(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(2, 4)
    normalized = shape[draw.size(1, len(shape) - 1) :]
    weights = (draw.tensor(*normalized), draw.tensor(*normalized)) if draw.flag() else (None, None)
    return (draw.tensor(*shape), normalized, *weights, 1e-5)


def _layer_norm_backward(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(2, 4)
    normalized = shape[draw.size(1, len(shape) - 1) :]
    x, weight, bias = draw.random(*shape), draw.random(*normalized), draw.random(*normalized)
    _, mean, rstd = real_call("aten.native_layer_norm.default", x, normalized, weight, bias, 1e-5)
    tensors = (draw.tensor(*shape), draw.use(x), draw.use(mean), draw.use(rstd))
    mask = (True, draw.flag(), draw.flag())
    return (*tensors[:2], normalized, *tensors[2:], draw.use(weight), draw.use(bias), mask)


def _group_norm_sizes(draw: Draw) -> tuple[tuple[int, ...], int]:
    groups = draw.size(1, 3)
    return (draw.size(), groups * draw.size(1, 2), draw.size(2, 3), draw.size(1, 3)), groups


def _group_norm(draw: Draw) -> tuple[Arg, ...]:
    shape, groups = _group_norm_sizes(draw)
    n, c, h, w = shape
    return (draw.tensor(*shape), draw.tensor(c), draw.tensor(c), n, c, h * w, groups, 1e-5)


def _group_norm_backward(draw: Draw) -> tuple[Arg, ...]:
    shape, groups = _group_norm_sizes(draw)
    n, c, h, w = shape
    x, weight = draw.random(*shape), draw.random(c)
    sizes = (n, c, h * w, groups)
    _, mean, rstd = real_call("aten.native_group_norm.default", x, weight, None, *sizes, 1e-5)
    refs = [draw.use(each) for each in (draw.random(*shape), x, mean, rstd, weight)]
    return (*refs, *sizes, (True, draw.flag(), draw.flag()))


def _batch_norm(*mode: bool | None) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = (draw.size(2), draw.size(), *(draw.size(2, 4) for _ in range(draw.size(1, 2))))
        c = shape[1]
        weights = [
            draw.tensor(*shape),
            draw.tensor(c),
            draw.tensor(c),
            draw.tensor(c),
            draw.tensor(c, low=0.5),
        ]
        modes = tuple(draw.flag() if each is None else each for each in mode)
        return (*weights, *modes, 0.1, 1e-5)

    return build


def _batch_norm_no_stats(draw: Draw) -> tuple[Arg, ...]:
    c = draw.size()
    return (draw.tensor(draw.size(2), c, 3), draw.tensor(c), draw.tensor(c), True, 0.1, 1e-5)


def _batch_norm_backward(draw: Draw) -> tuple[Arg, ...]:
    train = draw.flag()
    _batch_norm(train)(draw)
    x, weight, bias, mean, var = draw.tensors
    _, saved, inverse = real_call(
        "aten.native_batch_norm.default", x, weight, bias, mean, var, train, 0.1, 1e-5
    )
    draw.tensors[:] = [draw.random(*x.shape), x, weight, mean, var, *((saved, inverse) if train else ())]
    stats = (Ref(5), Ref(6)) if train else (None, None)
    mask = (True, draw.flag(), draw.flag())
    return (*(Ref(k) for k in range(5)), *stats, train, 1e-5, mask)


def _nll(space: int, reductions: tuple[int, ...] = (0, 2)) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        n, classes = draw.size(), draw.size(2, 4)
        plane = tuple(draw.size(1, 3) for _ in range(space))
        targets = draw.integers(classes, n, *plane)
        x = draw.tensor(n, classes, *plane)
        weight = draw.tensor(classes, low=0.1) if draw.flag() else None
        refs = (x, draw.use(targets), weight)
        return (*refs, draw.one_of(*reductions), draw.one_of(-100, 1))

    return build


def _nll_backward(space: int) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        x, target, weight, reduction, ignored = _nll(space, (0, 1, 2))(draw)
        assert isinstance(target, Ref)
        shape = draw.tensors[target.index].shape
        grad = draw.tensor(*shape) if reduction == 0 else draw.tensor()
        return (grad, x, target, weight, reduction, ignored, draw.tensor(low=1.0))

    return build


def _loss(*rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        shape = draw.shape(0)
        pair = (draw.use(draw.random(*shape).sigmoid()), draw.use(draw.random(*shape).sigmoid()))
        return (*pair, *rest[:1], draw.one_of(0, 2), *rest[1:])

    return build


def _logits_loss(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    pair = (draw.tensor(*shape), draw.use(draw.random(*shape).sigmoid()))
    weight = draw.tensor(*shape, low=0.1) if draw.flag() else None
    positive = draw.tensor(shape[-1], low=0.1) if draw.flag() else None
    return (*pair, weight, positive, draw.one_of(0, 2))


def _loss_backward(*rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        x, y, *middle = _loss(*rest)(draw)
        assert isinstance(x, Ref)
        reduction = middle[1] if rest[:1] == (None,) else middle[0]
        shape = draw.tensors[x.index].shape if reduction == 0 else ()
        return (draw.tensor(*shape), x, y, *middle)

    return build


def _embedding(draw: Draw) -> tuple[Arg, ...]:
    return (draw.tensor(6, draw.size()), draw.use(draw.integers(6, *draw.shape(1, 3))))


def _embedding_backward(draw: Draw) -> tuple[Arg, ...]:
    where, width = draw.shape(1, 3), draw.size()
    return (draw.tensor(*where, width), draw.use(draw.integers(6, *where)), 6, draw.one_of(-1, 2), False)


def _index_select(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    return (draw.tensor(*shape), dim, draw.use(draw.integers(shape[dim], draw.size())))


def _gather(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape()
    dim = draw.size(0, len(shape) - 1)
    where = tuple(draw.size() if k == dim else draw.size(1, s) for k, s in enumerate(shape))
    return (draw.tensor(*shape), dim, draw.use(draw.integers(shape[dim], *where)))


def _index(draw: Draw) -> tuple[Arg, ...]:
    shape = draw.shape(1, 4)
    self = draw.tensor(*shape)
    where = draw.shape(1, 2)
    picked = [k for k in range(len(shape)) if draw.flag()] or [0]
    indices: list[Arg] = [None] * (max(picked) + 1)
    for k in picked:
        tail = where[draw.size(0, len(where) - 1) :]
        indices[k] = draw.use(draw.integers(shape[k], *(1 if draw.flag() else size for size in tail)))
    return (self, tuple(indices))


ROW_CALLS: dict[str, Build] = {
    PHILOX: _philox,
    "aten.sum.default": lambda draw: (draw.tensor(*draw.shape(0)),),
    "aten.sum.dim_IntList": _reduce(),
    "aten.mean.dim": _reduce(),
    "aten.amax.default": _reduce(),
    "aten.amin.default": _reduce(),
    "aten.logsumexp.default": _reduce(),
    "aten.max.dim": _reduce_one,
    "aten.min.dim": _reduce_one,
    "aten.argmax.default": _reduce_one,
    "aten.argmin.default": _reduce_one,
    "aten.prod.dim_int": _reduce_one,
    "aten.any.dim": _any,
    "aten.all.dim": _any,
    "aten.var.correction": lambda draw: _reduce()(draw)[:2],
    "aten.std.correction": lambda draw: _reduce()(draw)[:2],
    "aten.var_mean.correction": lambda draw: _reduce()(draw)[:2],
    "aten.linalg_vector_norm.default": _norm,
    "aten._softmax.default": lambda draw: _rows(draw, False),
    "aten._log_softmax.default": lambda draw: _rows(draw, False),
    "aten._safe_softmax.default": _rows,
    "aten._softmax_backward_data.default": _rows_backward,
    "aten._log_softmax_backward_data.default": _rows_backward,
    "aten.cumsum.default": _rows,
    "aten.cumprod.default": _rows,
    "aten.sort.default": _rows,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._native_batch_norm_legit_functional.default": _batch_norm(None),
    "aten.native_batch_norm.default": _batch_norm(None),
    "aten._native_batch_norm_legit.no_stats": _batch_norm_no_stats,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm(),
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.nll_loss_forward.default": _nll(0),
    "aten.nll_loss_backward.default": _nll_backward(0),
    "aten.nll_loss2d_forward.default": _nll(2),
    "aten.nll_loss2d_backward.default": _nll_backward(2),
    "aten.mse_loss.default": _loss(),
    "aten.mse_loss_backward.default": _loss_backward(),
    "aten.smooth_l1_loss.default": _loss(),
    "aten.smooth_l1_loss_backward.default": lambda draw: (*_loss_backward()(draw), 1.0),
    "aten.huber_loss.default": _loss(),
    "aten.huber_loss_backward.default": lambda draw: (*_loss_backward()(draw), 1.0),
    "aten.soft_margin_loss.default": _loss(),
    "aten.soft_margin_loss_backward.default": _loss_backward(),
    "aten.binary_cross_entropy_with_logits.default": _logits_loss,
    "aten.binary_cross_entropy.default": _loss(None),
    "aten.binary_cross_entropy_backward.default": _loss_backward(None),
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
}
