"""Softmax and BatchNorm as two passes, each of which can run in parts along what they reduce.

Problem.  `_softmax` along the axis that is cut, and BatchNorm in training along the batch, need all of their
input before they make any of their output: no loop of theirs runs there.

rewrite:    softmax(x)       ->  exp(x - s)     with s = logsumexp(x)            (merge: log-sum-exp)
            log_softmax(x)   ->  x - s
            batch_norm(x)    ->  var, mean = var_mean(x)                         (merge: moments)
                                 y = batch_norm(x) with these for running statistics
            its backward     ->  dw, db = sums over the batch                    (merge: add)
                                 dx = w invstd (g - db / n - normalised(x) dw / n)
legal when: float32 or float64; training statistics of the batch.
effect:     the first pass ends where its statistics are known, the second can start in the region of what
            follows.  Rounded differently (class `reassociates`).

Not done.  Softmax's backward, which is two passes of another kind; GroupNorm (its groups can be cut as
they are).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowtide.analysis.axis import Call, describe_call, with_argument
from lowtide.ir import Aten, Edit, Graph, Node, Ref
from lowtide.ir.graph import Role
from lowtide.ir.ops import Arg
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict

__all__ = ["open_reductions"]

_EXACT = (torch.float32, torch.float64)


def open_reductions(graph: Graph) -> Edit:
    """`graph` with every rewrite above applied where it matches; values keep their ids."""
    draft = Draft(graph)
    for node in graph.nodes:
        rewrite = _REWRITES.get(node.op.overload) if isinstance(node.op, Aten) else None
        if rewrite is None or not rewrite(_Site(graph, draft, node)):
            draft.nodes.append(node)
    return Edit(draft.graph(graph.inputs, graph.outputs))


class _Site:
    """One node to rewrite; `emit` appends operators in its place."""

    def __init__(self, graph: Graph, draft: Draft, node: Node) -> None:
        assert isinstance(node.op, Aten)
        inputs = tuple(graph.values[value].meta for value in node.inputs)
        outputs = tuple(graph.values[value].meta for value in node.outputs)
        self.node, self.draft = node, draft
        self.call: Call = describe_call(node.op, inputs, outputs)
        self.operands = [node.inputs[arg.index] if isinstance(arg, Ref) else None for arg in node.op.args]

    def emit(
        self, name: str, inputs: Sequence[int], *args: Arg, out: int | None = None, **kwargs: Arg
    ) -> int:
        """The first result of an operator on `inputs`, then `args`; `out`: the value that it makes."""
        op = Aten(name, (*map(Ref, range(len(inputs))), *args), tuple(sorted(kwargs.items())))
        outputs = None if out is None else (out,)
        return self.draft.emit(op, inputs, self.node.origin, outputs=outputs)[0]


def _softmax(site: _Site) -> bool:
    (x,) = site.node.inputs
    if site.call.outputs[0].dtype not in _EXACT or site.call.integer("half_to_float"):
        return False
    log = site.emit("aten.logsumexp.default", [x], (site.call.integer("dim"),), True)
    (out,) = site.node.outputs
    if "log_softmax" in site.call.overload:
        site.emit("aten.sub.Tensor", [x, log], out=out)
    else:
        site.emit("aten.exp.default", [site.emit("aten.sub.Tensor", [x, log])], out=out)
    return True


def _reduced(site: _Site) -> tuple[tuple[int, ...], int]:
    """The dimensions that statistics are taken over, and how many numbers go into one."""
    shape = site.call.shape("input")
    dims = (0, *range(2, len(shape)))
    count = 1
    for dim in dims:
        count *= shape[dim]
    return dims, count


def _batch_norm(site: _Site) -> bool:
    call, node = site.call, site.node
    tensors = ("weight", "bias", "running_mean", "running_var")
    whole = all(call.has(name) for name in tensors) and len(node.outputs) == 5
    if not call.integer("training") or not whole or call.meta("input").dtype not in _EXACT:
        return False
    dims, count = _reduced(site)
    x, weight, bias, running_mean, running_var = site.operands[:5]
    momentum, eps = call.arguments["momentum"], call.arguments["eps"]
    if (
        None in site.operands[:5]
        or not isinstance(momentum, float)
        or not isinstance(eps, float)
        or count < 2
    ):
        return False
    assert x is not None and weight is not None and bias is not None
    assert running_mean is not None and running_var is not None
    y, mean, invstd, new_mean, new_var = node.outputs
    (var,) = _fresh(site, (site.draft.values[mean].meta.dtype, call.shape("weight")))
    pair = Aten("aten.var_mean.correction", (Ref(0), dims), (("correction", 0),))
    site.draft.emit(pair, (x,), node.origin, outputs=(var, mean))
    site.emit("aten.rsqrt.default", [site.emit("aten.add.Scalar", [var], eps)], out=invstd)
    site.emit("aten.lerp.Scalar", [running_mean, mean], momentum, out=new_mean)
    unbiased = site.emit("aten.mul.Scalar", [var], count / (count - 1))
    site.emit("aten.lerp.Scalar", [running_var, unbiased], momentum, out=new_var)
    inputs = (x, weight, bias, mean, var)
    given = Aten("aten.native_batch_norm.default", (*map(Ref, range(5)), False, momentum, eps))
    empty = predict(given, tuple(site.draft.values[value].meta for value in inputs))[1:]
    rest = [site.draft.value(each.meta, site.draft.storage(each.nbytes, Role.TEMP)) for each in empty]
    site.draft.emit(given, inputs, node.origin, outputs=(y, *rest), node=node.id)
    return True


def _fresh(site: _Site, *wanted: tuple[torch.dtype, tuple[int, ...]]) -> list[int]:
    found = []
    for dtype, shape in wanted:
        (made,) = predict(Aten("aten.empty.memory_format", (shape,), (("dtype", dtype),)), ())
        found.append(site.draft.value(made.meta, site.draft.storage(made.nbytes, Role.TEMP)))
    return found


def _batch_norm_backward(site: _Site) -> bool:
    call, node = site.call, site.node
    if not call.integer("train") or not all(call.integers("output_mask")) or not call.has("weight"):
        return False
    gradient, x, weight = site.operands[:3]
    mean, invstd = site.operands[5:7]
    if None in (gradient, x, weight, mean, invstd) or call.meta("input").dtype not in _EXACT:
        return False
    assert gradient is not None and x is not None and weight is not None
    assert mean is not None and invstd is not None and isinstance(node.op, Aten)
    dims, count = _reduced(site)
    out, of_weight, of_bias = node.outputs
    sums = with_argument(node.op, "output_mask", (False, True, True))
    site.draft.emit(sums, node.inputs, node.origin, outputs=(of_weight, of_bias), node=node.id)
    wide = tuple(1 if dim in dims else size for dim, size in enumerate(call.shape("input")))

    def spread(value: int) -> int:
        return site.emit("aten.view.default", [value], wide)

    slope = spread(site.emit("aten.mul.Tensor", [invstd, of_weight]))
    scale = spread(site.emit("aten.mul.Tensor", [invstd, weight]))
    centred = site.emit("aten.sub.Tensor", [x, spread(mean)])
    bent = site.emit("aten.addcmul.default", [gradient, centred, slope], value=-1 / count)
    level = site.emit("aten.sub.Tensor", [bent, spread(of_bias)], alpha=1 / count)
    site.emit("aten.mul.Tensor", [level, scale], out=out)
    return True


_REWRITES: dict[str, Callable[[_Site], bool]] = {
    "aten._softmax.default": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
}
