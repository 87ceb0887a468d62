"""A file's graph as `lowtide.ir`: one real ATen operator per node, regions as Fission, transfers as Store
and Load.

Method.  Tags are translated by a table; a tuple's parts become values of the same node; a permutation and a
slice are views.  Shapes are not read from the file but follow from the weights' and inputs' (a fake run of
each operator), so a graph can be built at any size that keeps it consistent.

Invariants.  The outputs are the updated weights' gradients as they are added, in the order of the weights'
ids; updates themselves are `add_` nodes that write their weight.

Not done.  `flex_matmul` with batch dimensions, attributes that the four files do not use: refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lowtide.ir.graph import Graph as IrGraph
from lowtide.ir.graph import Node as IrNode
from lowtide.ir.graph import Origin, Role, TensorMeta
from lowtide.ir.ops import Arg, Aten, Fission, Load, Merge, Part, Ref, Slice, Store
from lowtide.transforms.draft import Draft

from .model import Graph, Node, Shape

__all__ = ["Built", "as_ir"]

_EPS = 1e-5
Emit = Callable[["_Builder", Node, list[int]], int]


@dataclass(frozen=True)
class Built:
    """The graph, and which of its inputs is which node of the file."""

    graph: IrGraph
    inputs: Mapping[int, int]


@dataclass
class _Builder:
    graph: Graph
    draft: Draft
    dtype: torch.dtype
    value: dict[int, int] = field(default_factory=dict)
    tuples: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def shape(self, value: int) -> Shape:
        return self.draft.values[value].meta.shape

    def given(self, shape: Shape, role: Role) -> int:
        meta = TensorMeta(shape, _dense(shape), self.dtype)
        return self.draft.value(meta, self.draft.storage(meta.span_bytes, role))

    def aten(
        self, overload: str, inputs: Sequence[int], args: tuple[Arg, ...], **kwargs: Arg
    ) -> tuple[int, ...]:
        op = Aten(f"aten.{overload}", args, tuple(sorted(kwargs.items())))
        return self.draft.emit(op, inputs, Origin())


def _dense(shape: Shape) -> tuple[int, ...]:
    stride, step = [1] * len(shape), 1
    for dim in reversed(range(len(shape))):
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def as_ir(graph: Graph, shapes: Mapping[int, Shape], dtype: torch.dtype = torch.float32) -> Built:
    """The graph with weights and inputs of these shapes (by node id)."""
    builder = _Builder(graph, Draft(IrGraph((), {}, {}, (), ())), dtype)
    inputs: dict[int, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            role = Role.PARAM if node.kind == "weight" else Role.INPUT
            inputs[node.id] = builder.value[node.id] = builder.given(tuple(shapes[node.id]), role)
    _emit_all(builder)
    order = sorted((node.inputs[0], node.inputs[1]) for node in graph.nodes if node.kind == "inplace")
    outputs = [builder.value[gradient] for _, gradient in order]
    return Built(builder.draft.graph(inputs.values(), outputs), inputs)


def _emit_all(builder: _Builder) -> None:
    for node in builder.graph.nodes:
        if node.op == "placeholder" or node.op == "fission_out":
            continue
        if node.split is not None:
            _emit_region(builder, node)
        elif node.op == "index_out":
            builder.value[node.id] = builder.tuples[node.inputs[0]][node.attrs["index"]]
        elif node.op in ("store", "load"):
            _emit_transfer(builder, node)
        elif node.kind == "inplace":
            _emit_update(builder, node)
        else:
            builder.value[node.id] = _TABLE[node.op](builder, node, [builder.value[v] for v in node.inputs])


def _emit_transfer(builder: _Builder, node: Node) -> None:
    draft = builder.draft
    source = builder.value[node.inputs[0]]
    meta = replace(draft.values[source].meta, stride=_dense(builder.shape(source)))
    made = draft.value(meta, draft.storage(meta.span_bytes, Role.TEMP))
    op = Store("host") if node.op == "store" else Load("host")
    draft.nodes.append(IrNode(draft.node_id(), op, (source,), (made,)))
    builder.value[node.id] = made


def _emit_update(builder: _Builder, node: Node) -> None:
    draft = builder.draft
    weight, gradient = (builder.value[v] for v in node.inputs)
    op = Aten("aten.add_.Tensor", (Ref(0), Ref(1)))
    draft.nodes.append(IrNode(draft.node_id(), op, (weight, gradient), (), writes=(weight,)))


def _emit_region(builder: _Builder, node: Node) -> None:
    split = node.split
    assert split is not None
    outer = [builder.value[v] for v in node.inputs]
    inner = _Builder(split.body, Draft(IrGraph((), {}, {}, (), ())), builder.dtype)
    given = []
    for number, value, dim in zip(split.body.inputs, outer, split.in_dims, strict=True):
        shape = list(builder.shape(value))
        if dim is not None:
            if shape[dim] % split.parts:
                raise ValueError(f"{split.parts} parts do not divide {shape} along {dim}")
            shape[dim] //= split.parts
        inner.value[number] = inner.given(tuple(shape), Role.INPUT)
        given.append(inner.value[number])
    _emit_all(inner)
    results = [inner.value[value] for value in split.body.outputs]
    body = _with_outputs(inner, given, results)
    metas = [body.values[value].meta for value in body.outputs]
    parts = tuple(_part(builder, inner, split.parts, k, outer, split, metas) for k in range(split.parts))
    merges = tuple(Merge.ADD if dim < 0 else Merge.WRITE for dim in split.out_dims)
    draft = builder.draft
    made = []
    for meta, dim in zip(metas, split.out_dims, strict=True):
        shape = tuple(size * split.parts if k == dim else size for k, size in enumerate(meta.shape))
        whole = TensorMeta(shape, _dense(shape), meta.dtype)
        made.append(draft.value(whole, draft.storage(whole.span_bytes, Role.TEMP)))
    op = Fission((body,), parts, merges)
    draft.nodes.append(IrNode(draft.node_id(), op, tuple(outer), tuple(made)))
    for reader in builder.graph.readers[node.id]:
        builder.value[reader] = made[builder.graph.node[reader].attrs["index"]]


def _with_outputs(inner: _Builder, given: list[int], results: list[int]) -> IrGraph:
    """The body; a result that is a view or a given value leaves as a copy of its own."""
    taken: set[int] = {inner.draft.values[value].storage for value in given}
    for k, value in enumerate(results):
        if inner.draft.values[value].storage in taken or not inner.draft.values[value].meta.contiguous:
            (results[k],) = inner.aten(
                "clone.default", [value], (Ref(0),), memory_format=torch.contiguous_format
            )
        taken.add(inner.draft.values[results[k]].storage)
    return inner.draft.graph(given, results)


def _part(
    builder: _Builder,
    inner: _Builder,
    count: int,
    number: int,
    outer: list[int],
    split: object,
    metas: list[TensorMeta],
) -> Part:
    def piece(size: int, dim: int | None) -> Slice:
        return Slice(None) if dim is None else Slice(dim, number * size, (number + 1) * size)

    in_dims, out_dims = split.in_dims, split.out_dims  # type: ignore[attr-defined]
    ins = tuple(
        piece(builder.shape(value)[dim] // count if dim is not None else 0, dim)
        for value, dim in zip(outer, in_dims, strict=True)
    )
    outs = tuple(
        piece(meta.shape[dim] if dim >= 0 else 0, dim if dim >= 0 else None)
        for meta, dim in zip(metas, out_dims, strict=True)
    )
    return Part(0, ins, outs)


# --- the table ------------------------------------------------------------------------------------


def _binary(overload: str) -> Emit:
    return lambda b, node, ins: b.aten(overload, ins, (Ref(0), Ref(1)))[0]


def _unary(overload: str) -> Emit:
    return lambda b, node, ins: b.aten(overload, ins, (Ref(0),))[0]


def _scalar(overload: str) -> Emit:
    return lambda b, node, ins: b.aten(overload, ins, (Ref(0), node.attrs["const"]))[0]


def _flex(b: _Builder, node: Node, ins: list[int]) -> int:
    if node.attrs["n_batch_dims"] or node.attrs.get("activation"):
        raise NotImplementedError(f"{node.id}: flex_matmul with batch dimensions or an activation")
    count = node.attrs["n_reduce_dims"]
    ranks = [len(b.shape(value)) for value in ins]
    left = range(count) if node.attrs["trans_a"] else range(ranks[0] - count, ranks[0])
    right = range(ranks[1] - count, ranks[1]) if node.attrs["trans_b"] else range(count)
    return b.aten("tensordot.default", ins, (Ref(0), Ref(1), tuple(left), tuple(right)))[0]


def _matmul(b: _Builder, node: Node, ins: list[int]) -> int:
    lead = "abcdefgh"[: len(b.shape(ins[0])) - 2]
    left = "km" if node.attrs["trans_a"] else "mk"
    right = "nk" if node.attrs["trans_b"] else "kn"
    out = "nm" if node.attrs["trans_c"] else "mn"
    equation = f"{lead}{left},{lead}{right}->{lead}{out}"
    return b.aten("einsum.default", ins, (equation, (Ref(0), Ref(1))))[0]


def _layer_norm(b: _Builder, node: Node, ins: list[int]) -> int:
    dims = b.shape(ins[0])[-len(node.attrs["norm_shape"]) :]
    b.tuples[node.id] = b.aten("native_layer_norm.default", ins, (Ref(0), dims, None, None, _EPS))
    return b.tuples[node.id][0]


def _layer_norm_bwd(b: _Builder, node: Node, ins: list[int]) -> int:
    dims = b.shape(ins[0])[-len(node.attrs["norm_shape"]) :]
    args = (Ref(0), Ref(1), dims, Ref(2), Ref(3), None, None, (True, False, False))
    return b.aten("native_layer_norm_backward.default", ins, args)[0]


def _softmax_bwd(b: _Builder, node: Node, ins: list[int]) -> int:
    args = (Ref(0), Ref(1), node.attrs["dim"], b.dtype)
    return b.aten("_softmax_backward_data.default", ins, args)[0]


def _permute(b: _Builder, node: Node, ins: list[int]) -> int:
    return b.aten("permute.default", ins, (Ref(0), tuple(node.attrs["dims"])))[0]


def _reshape(b: _Builder, node: Node, ins: list[int]) -> int:
    size = list(node.shape)
    first = b.shape(ins[0])[0]
    return b.aten("reshape.default", ins, (Ref(0), (first, *size[1:])))[0]


def _slice(b: _Builder, node: Node, ins: list[int]) -> int:
    whole = b.graph.node[node.inputs[0]].shape
    value = ins[0]
    for dim, start, end in zip(*(node.attrs[name] for name in ("dims", "starts", "ends")), strict=True):
        size = b.shape(ins[0])[dim]
        bounds = (_scaled(start, size, whole[dim]), _scaled(end, size, whole[dim]))
        (value,) = b.aten("slice.Tensor", [value], (Ref(0), dim, *bounds, 1))
    return value


def _scaled(place: int, size: int, whole: int) -> int:
    """A place inside `whole` as one inside `size`; what is inside stays inside."""
    return place * size // whole if place in (0, whole) else max(1, min(size - 1, place * size // whole))


def _concat(b: _Builder, node: Node, ins: list[int]) -> int:
    return b.aten("cat.default", ins, (tuple(Ref(k) for k in range(len(ins))), node.attrs["dim"]))[0]


def _window(node: Node) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        tuple(node.attrs["stride"]),
        tuple(node.attrs["padding"]),
        tuple(node.attrs.get("dilation", (1, 1))),
    )


def _conv(b: _Builder, node: Node, ins: list[int]) -> int:
    stride, padding, dilation = _window(node)
    args = (Ref(0), Ref(1), None, stride, padding, dilation, False, (0, 0), 1)
    return b.aten("convolution.default", ins, args)[0]


def _conv_data(b: _Builder, node: Node, ins: list[int]) -> int:
    stride, padding, dilation = _window(node)
    given, kernel = b.shape(ins[0])[2:], b.shape(ins[1])[2:]
    extra = tuple(
        want - ((n - 1) * s - 2 * p + d * (k - 1) + 1)
        for want, n, s, p, d, k in zip(node.shape[2:], given, stride, padding, dilation, kernel, strict=True)
    )
    args = (Ref(0), Ref(1), None, stride, padding, dilation, True, extra, 1)
    return b.aten("convolution.default", ins, args)[0]


def _conv_weight(b: _Builder, node: Node, ins: list[int]) -> int:
    stride, padding, dilation = _window(node)
    shape = (b.shape(ins[1])[1], b.shape(ins[0])[1], *node.shape[2:])
    (like,) = b.aten("new_zeros.default", [ins[0]], (Ref(0), shape))
    args = (Ref(1), Ref(0), Ref(2), None, stride, padding, dilation, False, (0, 0), 1, (False, True, False))
    return b.aten("convolution_backward.default", [*ins, like], args)[0]


def _pool(b: _Builder, node: Node, ins: list[int]) -> int:
    stride, padding, _ = _window(node)
    return b.aten("avg_pool2d.default", ins, (Ref(0), tuple(node.attrs["kernel_size"]), stride, padding))[0]


def _pool_bwd(b: _Builder, node: Node, ins: list[int]) -> int:
    stride, padding, _ = _window(node)
    args = (Ref(0), Ref(1), tuple(node.attrs["kernel_size"]), stride, padding, False, True, None)
    return b.aten("avg_pool2d_backward.default", ins, args)[0]


def _interpolate(b: _Builder, node: Node, ins: list[int]) -> int:
    return b.aten("upsample_nearest2d.default", ins, (Ref(0), tuple(node.shape[2:])))[0]


def _interpolate_bwd(b: _Builder, node: Node, ins: list[int]) -> int:
    grad = b.shape(ins[0])
    args = (Ref(0), tuple(grad[2:]), (*grad[:2], *node.shape[2:]))
    return b.aten("upsample_nearest2d_backward.default", ins, args)[0]


_TABLE: Mapping[str, Emit] = {
    "ewise.bin.add": _binary("add.Tensor"),
    "ewise.bin.mul": _binary("mul.Tensor"),
    "ewise.bin.sub": _binary("sub.Tensor"),
    "ewise.bin.sigmoid_backward": _binary("sigmoid_backward.default"),
    "ewise.bin.threshold_backward": lambda b, n, ins: b.aten(
        "threshold_backward.default", ins, (Ref(0), Ref(1), 0)
    )[0],
    "ewise.uni.const.div": _scalar("div.Scalar"),
    "ewise.uni.const.mul": _scalar("mul.Scalar"),
    "ewise.uni.const.pow": _scalar("pow.Tensor_Scalar"),
    "ewise.uni.const.gt": _scalar("gt.Scalar"),
    "ewise.uni.relu": _unary("relu.default"),
    "ewise.uni.sigmoid": _unary("sigmoid.default"),
    "softmax": lambda b, n, ins: b.aten("_softmax.default", ins, (Ref(0), n.attrs["dim"], False))[0],
    "softmax_bwd": _softmax_bwd,
    "layer_norm": _layer_norm,
    "layer_norm_bwd": _layer_norm_bwd,
    "flex_matmul": _flex,
    "matmul": _matmul,
    "permute": _permute,
    "reshape": _reshape,
    "slice": _slice,
    "concat": _concat,
    "conv2d": _conv,
    "conv2d_bwd_inp": _conv_data,
    "conv2d_bwd_wgt": _conv_weight,
    "pool2d.avg": _pool,
    "pool2d_bwd.avg": _pool_bwd,
    "interpolate": _interpolate,
    "interpolate_bwd": _interpolate_bwd,
}
