"""Made-up operands for one operator call: the right windows, values that the operator accepts.

Problem.  What an operator allocates, and how long it takes, is measured on real memory, but the
program's own tensors do not exist yet.

Method.  Every input gets memory of its own of exactly its span.  Floating values lie in (0.25, 0.75): a
variance is positive, a probability is one, a logarithm is finite.  Masks are random.  Integers index
something in most operators that take them: `INDEXED` says what, as data; elsewhere they are one.

Not done.  Values as the model would have them: branches that depend on data cost what they cost here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.ir.aten import resolve
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Ref

__all__ = ["INDEXED", "make_operands", "scalar_operand", "window"]


def window(storage: torch.UntypedStorage, byte_offset: int, meta: TensorMeta) -> Tensor:
    """A tensor that views `storage` from `byte_offset` (a multiple of the element's size)."""
    empty = torch.empty(0, dtype=meta.dtype)
    return empty.set_(storage, byte_offset // meta.dtype.itemsize, meta.shape, meta.stride)


def _class_count(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    shape = metas["self"].shape
    return shape[1] if len(shape) > 1 else shape[0]


def _along_dim(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    shape = metas["self"].shape
    return shape[arguments["dim"]] if shape else 1


def _rows(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    return metas["weight"].shape[0]


def _window_count(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    return metas["self"].shape[-1] * metas["self"].shape[-2]


def _smallest_dim(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    return min(metas["self"].shape, default=1)


def _numel(arguments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> int:
    return metas["self"].numel


Bound = Callable[[Mapping[str, Any], Mapping[str, TensorMeta]], int]

INDEXED: Mapping[str, Bound] = {
    "embedding": _rows,
    "embedding_dense_backward": lambda arguments, metas: int(arguments["num_weights"]),
    "nll_loss_forward": _class_count,
    "nll_loss_backward": _class_count,
    "nll_loss2d_forward": _class_count,
    "nll_loss2d_backward": _class_count,
    "gather": _along_dim,
    "gather_backward": _along_dim,
    "scatter": _along_dim,
    "scatter_add": _along_dim,
    "scatter_reduce": _along_dim,
    "index_select": _along_dim,
    "index_add": _along_dim,
    "index_copy": _along_dim,
    "index_fill": _along_dim,
    "index": _smallest_dim,
    "index_put": _smallest_dim,
    "_unsafe_index": _smallest_dim,
    "_unsafe_index_put": _smallest_dim,
    "take": _numel,
    "max_pool2d_with_indices_backward": _window_count,
}
"""Operator name -> exclusive bound of its integer operands."""


def scalar_operand() -> float:
    """What a host scalar is while nothing is known about it."""
    return 0.5


def make_operands(graph: Graph, node: Node, seed: int = 0) -> list[Any]:
    """One operand per input of `node`; inputs that are the same value share a tensor."""
    bound = _bound(graph, node)
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, Any] = {}
    for value in node.inputs:
        if value not in made:
            meta = graph.values[value].meta
            made[value] = scalar_operand() if meta.device == "host" else _filled(meta, bound, generator)
    return [made[value] for value in node.inputs]


def _bound(graph: Graph, node: Node) -> int | None:
    """Exclusive bound of integer operands, or None where they index nothing."""
    if not isinstance(node.op, Aten):
        return None
    rule = INDEXED.get(node.op.overload.split(".")[1])
    if rule is None:
        return None
    arguments = _named_arguments(node.op)
    metas = {
        name: graph.values[node.inputs[arg.index]].meta
        for name, arg in arguments.items()
        if isinstance(arg, Ref)
    }
    return max(1, rule(arguments, metas))


def _named_arguments(op: Aten) -> dict[str, Any]:
    arguments = resolve(op.overload)._schema.arguments
    found = {argument.name: argument.default_value for argument in arguments}
    found.update({argument.name: value for argument, value in zip(arguments, op.args, strict=False)})
    found.update(op.kwargs)
    return found


def _filled(meta: TensorMeta, bound: int | None, generator: torch.Generator) -> Tensor:
    elements = meta.span_bytes // meta.dtype.itemsize
    flat = torch.empty(elements, dtype=meta.dtype)
    _fill(flat, bound, generator)
    return flat.as_strided(meta.shape, meta.stride)


def _fill(flat: Tensor, bound: int | None, generator: torch.Generator) -> None:
    if flat.dtype.is_floating_point:
        flat.uniform_(0.25, 0.75, generator=generator)
    elif flat.dtype.is_complex:
        torch.view_as_real(flat).uniform_(0.25, 0.75, generator=generator)
    elif flat.dtype == torch.bool:
        flat.random_(0, 2, generator=generator)
    elif bound is None:
        flat.fill_(1)
    else:
        flat.random_(0, min(bound, torch.iinfo(flat.dtype).max), generator=generator)
