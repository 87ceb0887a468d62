"""Axis rules of reductions, softmax, normalisations, pools, gathers and losses.

BatchNorm in training mode couples the whole batch, so only its channels can be cut; with running
statistics it is an element-wise map.  A loss with `reduction="mean"` divides by the size of its own
part, so it has no rule: `lowtide.transforms.normalise` rewrites it into a sum and a division first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowtide.analysis.axis import Call, Link, Rule, einsum, masked
from lowtide.ir.ops import Merge
from lowtide.ir.philox import PHILOX

__all__ = ["ROW_RULES"]

_MEAN, _SUM = 1, 2


def _philox(call: Call) -> Iterator[Link]:
    """Every dimension that has an index tensor: a part reads a slice of it."""
    cut = call.integers("dims")
    for position, dim in enumerate(cut):
        slices = tuple(0 if other == position else None for other in range(len(cut)))
        yield Link(call.outputs[0].shape[dim], {"indices": slices}, (dim,))


def _reduced_dims(call: Call) -> set[int]:
    rank = call.rank("self")
    return set(call.dims("dim", rank)) if "dim" in call.arguments else set(range(rank))


def _reduction(call: Call, summed: bool) -> Iterator[Link]:
    shape = call.shape("self")
    reduced = _reduced_dims(call)
    keep = bool(call.arguments.get("keepdim"))
    target = 0
    for dim, size in enumerate(shape):
        gone = dim in reduced
        if size > 1 and not gone:
            yield Link(size, {"self": dim}, (target,) * len(call.outputs))
        elif size > 1 and summed:
            yield Link(size, {"self": dim}, (None,) * len(call.outputs))
        target += not gone or keep


def _sum(call: Call) -> Iterator[Link]:
    return _reduction(call, summed=True)


def _reduce(call: Call) -> Iterator[Link]:
    """Only the dimensions that stay."""
    if call.arguments.get("dim") is None and "dim" in call.arguments and call.rank("self") > 0:
        return iter(())  # over the flattened tensor
    return _reduction(call, summed=False)


def _combined(merge: Merge) -> Rule:
    """Dimensions that stay, and those that are reduced where parts can be combined."""

    def rule(call: Call) -> Iterator[Link]:
        yield from _reduce(call)
        reduced = call.arguments.get("dim") is not None and call.rank("self") > 0
        if not reduced or (merge is Merge.MOMENTS and call.arguments.get("correction") not in (0, 0.0)):
            return
        for link in _reduction(call, summed=True):
            if None in link.outputs:
                yield Link(link.extent, link.arguments, link.outputs, merge=merge)

    return rule


def _rows(*arguments: str) -> Rule:
    """softmax, cumsum, sort: same shape in and out, every dimension but `dim`."""

    def rule(call: Call) -> Iterator[Link]:
        shape = call.shape(arguments[0])
        row = call.dim("dim", len(shape))
        for dim, size in enumerate(shape):
            if dim != row and size > 1:
                yield Link(size, dict.fromkeys(arguments, dim), (dim,) * len(call.outputs))

    return rule


def _layer_norm(call: Call) -> Iterator[Link]:
    leading = call.rank("input") - len(call.integers("normalized_shape"))
    for dim, size in enumerate(call.shape("input")[:leading]):
        if size > 1:
            yield Link(size, {"input": dim}, (dim,) * len(call.outputs))


def _layer_norm_backward(call: Call) -> Iterator[Link]:
    leading = call.rank("input") - len(call.integers("normalized_shape"))
    wanted = masked(call, "output_mask", ("input", "weight", "bias"))
    for dim, size in enumerate(call.shape("input")[:leading]):
        if size > 1:
            cut = dict.fromkeys(("grad_out", "input", "mean", "rstd"), dim)
            yield Link(size, cut, tuple(dim if name == "input" else None for name in wanted))


def _group_norm(call: Call) -> Iterator[Link]:
    yield Link(call.shape("input")[0], {"input": 0}, (0, 0, 0), (("N", None),))
    cut = {"input": 1, "weight": 0, "bias": 0}
    yield Link(call.integer("group"), cut, (1, 1, 1), (("C", None), ("group", None)))


def _group_norm_backward(call: Call) -> Iterator[Link]:
    wanted = masked(call, "output_mask", ("input", "weight", "bias"))
    cut = dict.fromkeys(("grad_out", "input", "mean", "rstd"), 0)
    batch = tuple(0 if name == "input" else None for name in wanted)
    yield Link(call.shape("input")[0], cut, batch, (("N", None),))
    cut = {"grad_out": 1, "input": 1, "mean": 1, "rstd": 1, "weight": 0}
    groups = tuple(1 if name == "input" else 0 for name in wanted)
    yield Link(call.integer("group"), cut, groups, (("C", None), ("group", None)))


def _batch_norm(results: str, mode: str = "training") -> Rule:
    statistics = "weight=c bias=c running_mean=c running_var=c"
    together = einsum(f"input=Nc# {statistics} -> Nc# {results}")
    apart = einsum(f"input=nc* {statistics} -> nc* {results}")

    def rule(call: Call) -> Iterator[Link]:
        training = call.integer(mode) if mode else 0
        yield from (together if training else apart)(call)

    return rule


def _batch_norm_functional(call: Call) -> Iterator[Link]:
    """As `_batch_norm`; without training the running statistics are returned unchanged, not summed."""
    count = len(call.outputs)
    for link in _batch_norm("c c c c")(call):
        lacking = tuple(k for k in range(1, count) if link.outputs[k] is None)
        yield Link(link.extent, link.arguments, link.outputs, link.scaled, lacking)


def _batch_norm_backward(call: Call) -> Iterator[Link]:
    rest = "weight=c running_mean=c running_var=c save_mean=c save_invstd=c"
    coupled = call.integer("train") and call.integers("output_mask")[0]  # else nothing but sums is asked for
    n, many = ("N", "#") if coupled else ("n", "*")
    whole = f"{n}c{many}"
    rule = einsum(f"grad_out={whole} input={whole} {rest} -> {whole} c c", mask="output_mask")
    return iter(rule(call))


def _nll(space: str) -> Rule:
    """Sums over everything; with `reduction="none"` the total weight is no sum (it is 0)."""
    summed = einsum(f"self=nC{space} target=n{space} weight=C -> - -")
    apart = einsum(f"self=nC{space} target=n{space} weight=C -> n{space} -")

    def rule(call: Call) -> Iterator[Link]:
        reduction = call.integer("reduction")
        if reduction == _SUM:
            yield from summed(call)
        elif reduction != _MEAN:
            for link in apart(call):
                yield Link(link.extent, link.arguments, link.outputs, link.scaled, (1,))

    return rule


def _nll_backward(space: str) -> Rule:
    """Divides by the *given* total weight, so that a mean may be cut when the whole's is given."""
    given = f"self=nC{space} target=n{space} weight=C total_weight=- -> nC{space}"
    reduced = einsum(f"grad_output=- {given}")
    apart = einsum(f"grad_output=n{space} {given}")
    return lambda call: (apart if call.integer("reduction") == 0 else reduced)(call)


_LOSS_OPERANDS = ("self", "target", "weight", "pos_weight")


def _loss(call: Call) -> Iterator[Link]:
    """mse, smooth l1, huber, binary cross-entropy: element-wise with broadcast, then reduced."""
    shapes = {name: call.shape(name) for name in _LOSS_OPERANDS if call.has(name)}
    whole, reduction = call.shape("self"), call.integer("reduction")
    if reduction == _MEAN or any(len(shape) > len(whole) for shape in shapes.values()):
        return
    if shapes["target"] != whole:
        return
    for dim, size in enumerate(whole):
        if size > 1:
            cut = {name: _aligned(shape, dim, len(whole), size) for name, shape in shapes.items()}
            yield Link(size, cut, (None if reduction == _SUM else dim,))


def _loss_backward(call: Call) -> Iterator[Link]:
    if call.integer("reduction") == _MEAN:
        return iter(())
    rule = einsum("grad_output=* self=* target=* weight=* -> *")
    return iter(rule(call)) if call.rank("grad_output") else iter(_loss_backward_reduced(call))


_loss_backward_reduced = einsum("grad_output=- self=* target=* weight=* -> *")


def _embedding(call: Call) -> Iterator[Link]:
    where = call.rank("indices")
    for dim, size in enumerate(call.outputs[0].shape):
        if size > 1:
            yield Link(size, {"indices": dim} if dim < where else {"weight": 1}, (dim,))


def _embedding_backward(call: Call) -> Iterator[Link]:
    where = call.rank("indices")
    frequencies = bool(call.integer("scale_grad_by_freq"))
    for dim, size in enumerate(call.shape("grad_output")):
        if size < 2:
            continue
        if dim == where:
            yield Link(size, {"grad_output": dim}, (1,))
        elif not frequencies:
            yield Link(size, {"grad_output": dim, "indices": dim}, (None,))


def _index_select(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    taken = call.dim("dim", rank)
    for dim, size in enumerate(call.outputs[0].shape):
        if size > 1:
            yield Link(size, {"index": 0} if dim == taken else {"self": dim}, (dim,))


def _gather(call: Call) -> Iterator[Link]:
    rank = call.rank("self")
    taken = call.dim("dim", rank)
    sizes = call.shape("self")
    for dim, size in enumerate(call.outputs[0].shape):
        if size > 1 and dim == taken:
            yield Link(size, {"index": dim}, (dim,))
        elif size > 1 and sizes[dim] == size:
            yield Link(size, {"self": dim, "index": dim}, (dim,))


def _index(call: Call) -> Iterator[Link]:
    """Integer indices on adjacent dimensions, or spread ones (their result then comes first)."""
    indices = call.tensors("indices")
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if not given or any(index.dtype.itemsize < 4 for index in given.values()):
        return  # bool masks: the result's size depends on the data
    rank = max(len(index.shape) for index in given.values())
    adjacent = max(given) - min(given) + 1 == len(given)
    first = min(given) if adjacent else 0
    out = call.outputs[0].shape
    for k in range(rank):
        dims = tuple(_aligned(index.shape, k, rank, out[first + k]) for index in given.values())
        if out[first + k] > 1:
            yield Link(out[first + k], {"indices": dims}, (first + k,))
    rest = [dim for dim in range(call.rank("self")) if dim not in given]
    places = [place for place in range(len(out)) if not first <= place < first + rank]
    for dim, place in zip(rest, places, strict=True):
        if out[place] > 1:
            yield Link(out[place], {"self": dim}, (place,))


def _aligned(shape: tuple[int, ...], k: int, rank: int, extent: int) -> int | None:
    dim = k - (rank - len(shape))
    return dim if dim >= 0 and shape[dim] == extent else None


def _planes(*arguments: str, sizes: str = "", space: int = 2) -> Rule:
    """Pools and interpolation: batch and channels are loops, the plane is not (windows overlap)."""

    def rule(call: Call) -> Iterator[Link]:
        shape = call.shape(arguments[0])
        for dim, size in enumerate(shape[: len(shape) - space]):
            if size > 1:
                scaled = ((sizes, dim),) if sizes else ()
                yield Link(size, dict.fromkeys(arguments, dim), (dim,) * len(call.outputs), scaled)

    return rule


def _scan(call: Call) -> Iterator[Link]:
    return iter(_rows("self")(call)) if math.prod(call.shape("self")) else iter(())


ROW_RULES: dict[str, Rule] = {
    PHILOX: _philox,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.dim": _reduce,
    "aten.amax.default": _reduce,
    "aten.amin.default": _reduce,
    "aten.max.dim": _reduce,
    "aten.min.dim": _reduce,
    "aten.argmax.default": _reduce,
    "aten.argmin.default": _reduce,
    "aten.any.dim": _reduce,
    "aten.all.dim": _reduce,
    "aten.prod.dim_int": _reduce,
    "aten.var.correction": _reduce,
    "aten.std.correction": _reduce,
    "aten.var_mean.correction": _combined(Merge.MOMENTS),
    "aten.logsumexp.default": _combined(Merge.LOGSUMEXP),
    "aten.linalg_vector_norm.default": _reduce,
    "aten._softmax.default": _rows("self"),
    "aten._log_softmax.default": _rows("self"),
    "aten._safe_softmax.default": _rows("self"),
    "aten._softmax_backward_data.default": _rows("grad_output", "output"),
    "aten._log_softmax_backward_data.default": _rows("grad_output", "output"),
    "aten.cumsum.default": _scan,
    "aten.cumprod.default": _scan,
    "aten.sort.default": _scan,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten._native_batch_norm_legit_functional.default": _batch_norm_functional,
    "aten.native_batch_norm.default": _batch_norm("c c"),
    "aten._native_batch_norm_legit.no_stats": _batch_norm("c c"),
    "aten._native_batch_norm_legit_no_training.default": _batch_norm("c c", mode=""),
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.nll_loss_forward.default": _nll(""),
    "aten.nll_loss_backward.default": _nll_backward(""),
    "aten.nll_loss2d_forward.default": _nll("hw"),
    "aten.nll_loss2d_backward.default": _nll_backward("hw"),
    "aten.mse_loss.default": _loss,
    "aten.mse_loss_backward.default": _loss_backward,
    "aten.smooth_l1_loss.default": _loss,
    "aten.smooth_l1_loss_backward.default": _loss_backward,
    "aten.huber_loss.default": _loss,
    "aten.huber_loss_backward.default": _loss_backward,
    "aten.soft_margin_loss.default": _loss,
    "aten.soft_margin_loss_backward.default": _loss_backward,
    "aten.binary_cross_entropy_with_logits.default": _loss,
    "aten.binary_cross_entropy.default": _loss,
    "aten.binary_cross_entropy_backward.default": _loss_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.max_pool2d_with_indices.default": _planes("self"),
    "aten.max_pool2d_with_indices_backward.default": _planes("grad_output", "self", "indices"),
    "aten.avg_pool2d.default": _planes("self"),
    "aten.avg_pool2d_backward.default": _planes("grad_output", "self"),
    "aten._adaptive_avg_pool2d.default": _planes("self"),
    "aten._adaptive_avg_pool2d_backward.default": _planes("grad_output", "self"),
    "aten.upsample_nearest2d.default": _planes("self"),
    "aten.upsample_nearest2d_backward.default": _planes("grad_output", sizes="input_size"),
    "aten.upsample_bilinear2d.default": _planes("self"),
    "aten.upsample_bilinear2d_backward.default": _planes("grad_output", sizes="input_size"),
    "aten.upsample_bicubic2d.default": _planes("self"),
    "aten.upsample_bicubic2d_backward.default": _planes("grad_output", sizes="input_size"),
}
