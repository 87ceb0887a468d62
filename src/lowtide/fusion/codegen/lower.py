"""From a body of ATen nodes to a kernel of virtual tensors, reductions and stores.

Problem.  The body of a Fused node is a small graph of operators on strided values; generated code wants to
know, for each output element, the expression that computes it from loads of the inputs.

Method.  Nodes are visited in order.  A value on an input's storage is a load at its strides, whatever view
made it.  Other values are virtual tensors from three tables: `POINTWISE`, `MOVERS`, `COMPOSITES`.  Writes
to input storages (optimizer updates) rebind the storage's current tensor; the last one is stored.

Invariants.  Buffers are named ``i<k>`` (body input k) and ``o<k>`` (body output k); host scalars are
numbered in input order.  Raises `Unfusable` naming the node; never emits a kernel it cannot justify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.fusion.codegen.composite import COMPOSITES
from lowtide.fusion.codegen.expr import STORABLE, Builder, Expr, compute_dtype
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.pointwise import POINTWISE, Pointwise
from lowtide.fusion.codegen.tensor import Kernel, Store, Tensor, Unfusable, reshape
from lowtide.fusion.codegen.views import MOVERS
from lowtide.ir.aten import resolve
from lowtide.ir.graph import Graph, Node, Role, TensorMeta
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = ["Lowered", "functional", "knows", "lower"]

_LAZY = frozenset({"condition", "mask"})  # operands that keep their own type


@dataclass(frozen=True)
class Lowered:
    """A kernel with its buffers: stored dtype by name, and how many host scalars it takes.

    Names: ``i`` inputs and ``o`` outputs by position, ``w`` what is prepared once.
    """

    kernel: Kernel
    dtypes: Mapping[str, torch.dtype]
    scalars: int


def functional(overload: str) -> str:
    """The out-of-place name of an in-place overload (``aten.mul_.Tensor`` -> ``aten.mul.Tensor``)."""
    namespace, name, variant = overload.split(".", 2)
    return f"{namespace}.{name.rstrip('_') or name}.{variant}"


def knows(op: object) -> bool:
    """Whether the tables have an entry for an operation."""
    if not isinstance(op, Aten):
        return False
    name = functional(op.overload)
    return name in POINTWISE or name in MOVERS or name in COMPOSITES or name in _CREATORS


def lower(body: Graph, exact_sqrt: bool = False, keep: bool = False) -> Lowered:
    """The kernel of `body`.

    `exact_sqrt` keeps eager's own square root (updates are bit-equal); `keep`: what is made of constants may
    be kept from call to call.
    """
    work = _Lowering(body, exact_sqrt, keep)
    for node in body.nodes:
        if node.writes or any(body.readers[out] or out in body.outputs for out in node.outputs):
            work.visit(node)
    work.store()
    kept = {name: tensor.dtype for name, tensor in work.kernel.prepared}
    return Lowered(work.kernel, {**work.dtypes, **kept}, work.scalars)


@dataclass
class _Lowering:
    body: Graph
    exact_sqrt: bool
    keep: bool
    kernel: Kernel = field(default_factory=Kernel)
    tensors: dict[int, Tensor | Expr] = field(default_factory=dict)
    written: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scalars: int = 0

    def __post_init__(self) -> None:
        self.kernel.builder = Builder(self.exact_sqrt)
        self.inputs: dict[int, int] = {}
        for position, value in enumerate(self.body.inputs):
            if self.body.storage_of(value).role is Role.HOST:
                self.tensors[value] = self.kernel.builder.scalar(self.scalars)
                self.scalars += 1
                continue
            meta = self.body.values[value].meta
            _check_dtype(meta, f"input {position}")
            self.dtypes[f"i{position}"] = meta.dtype
            self.inputs.setdefault(self.body.values[value].storage, position)
            if self.keep and self.body.storage_of(value).role is Role.CONST:
                self.kernel.constants.add(f"i{position}")
            self.tensors[value] = self._load(f"i{position}", meta, 0)

    def _load(self, buffer: str, meta: TensorMeta, offset: int) -> Tensor:
        builder = self.kernel.builder

        def rule(indices: tuple[Index, ...]) -> Expr:
            place = Index.of(offset)
            for index, step in zip(indices, meta.stride, strict=True):
                place = place + index * step
            return builder.load(buffer, place, meta.dtype)

        return Tensor(meta.shape, meta.dtype, rule)

    def tensor(self, value: int) -> Tensor | Expr:
        """What a value is at this point of the body."""
        home = self.body.values[value]
        if home.storage in self.written:
            base, current = self.written[home.storage]
            return self._window(value, base, current)
        return self.tensors[value]

    def _window(self, value: int, base: int, current: Tensor) -> Tensor:
        here, there = self.body.values[value], self.body.values[base]
        if (here.meta, here.offset) != (there.meta, there.offset):
            raise Unfusable(f"value %{value} is another view of a storage that the body has written")
        return current

    def visit(self, node: Node) -> None:
        """Define the outputs of one node, or rebind what it writes."""
        if not isinstance(node.op, Aten):
            raise Unfusable(f"node {node.id}: a body holds only ATen operators, not {type(node.op).__name__}")
        if self._view_of_input(node):
            return
        metas = [self.body.values[out].meta for out in (node.outputs or node.writes)]
        try:
            results = self._lower(node, node.op, metas)
        except Unfusable as error:
            raise Unfusable(f"node {node.id} ({node.op.overload}): {error}") from error
        if node.writes:
            self._write(node, results)
        elif len(results) < len(node.outputs):
            raise Unfusable(f"node {node.id} ({node.op.overload}) has more outputs than its rule makes")
        else:
            for out, result in zip(node.outputs, results, strict=False):
                self._define(out, result)

    def _define(self, value: int, result: Tensor | None) -> None:
        meta = self.body.values[value].meta
        if result is None and not self.body.readers[value] and value not in self.body.outputs:
            return
        if result is None or result.shape != meta.shape or result.dtype != meta.dtype:
            made = None if result is None else (result.shape, result.dtype)
            raise Unfusable(f"value %{value} should be {meta.dtype} {meta.shape}, its rule makes {made}")
        self.tensors[value] = result

    def _view_of_input(self, node: Node) -> bool:
        if node.writes or not self.body.is_view(node):
            return False
        for out in node.outputs:
            value = self.body.values[out]
            position = self.inputs.get(value.storage)
            if position is None or value.storage in self.written:
                return False
            base = self.body.values[self.body.inputs[position]]
            if value.meta.dtype != base.meta.dtype:
                raise Unfusable(f"value %{out} views {base.meta.dtype} bytes as {value.meta.dtype}")
            self.tensors[out] = self._load(f"i{position}", value.meta, value.offset - base.offset)
        return True

    def _write(self, node: Node, results: Sequence[Tensor | None]) -> None:
        for value, result in zip(node.writes, results, strict=True):
            home = self.body.values[value]
            if result is None:
                raise Unfusable(f"node {node.id} writes what its rule does not define")
            if result.shape != home.meta.shape:
                old = self.tensor(value)
                assert isinstance(old, Tensor)
                result = self.kernel.map(lambda b, x, y: y, old, result)
            cast = (
                result
                if result.dtype == home.meta.dtype
                else self.kernel.map(_same, result, dtype=home.meta.dtype)
            )
            self.written[home.storage] = (value, cast)

    def _lower(self, node: Node, op: Aten, metas: Sequence[TensorMeta]) -> Sequence[Tensor | None]:
        name = functional(op.overload)
        args = self._bind(node, op, name)
        if name in POINTWISE:
            return (self._pointwise(POINTWISE[name], args, metas[0]),)
        values = list(args.values())
        if name in MOVERS:
            moved = MOVERS[name](self.kernel, *values[: _arity(MOVERS[name], values)])
            return [self._retype(m, meta) for m, meta in zip(moved, metas, strict=False)]
        if name in COMPOSITES:
            return COMPOSITES[name](self.kernel, metas, *values)
        if name in _CREATORS:
            return (_CREATORS[name](self.kernel, metas[0], args),)
        raise Unfusable("the tables have no entry for it")

    def _retype(self, tensor: Tensor, meta: TensorMeta) -> Tensor:
        return tensor if tensor.dtype == meta.dtype else self.kernel.map(_same, tensor, dtype=meta.dtype)

    def _bind(self, node: Node, op: Aten, name: str) -> dict[str, Any]:
        """Schema argument name -> tensor, host scalar or plain argument."""
        try:
            schema = resolve(name)._schema
        except ValueError as error:
            raise Unfusable(str(error)) from error
        given = dict(op.kwargs)
        for argument, value in zip(schema.arguments, op.args, strict=False):
            given[argument.name] = value
        bound = {}
        for argument in schema.arguments:
            if argument.name in given:
                bound[argument.name] = self._resolve(node, given[argument.name])
            elif argument.has_default_value():
                bound[argument.name] = argument.default_value
        return bound

    def _resolve(self, node: Node, arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return self.tensor(node.inputs[arg.index])
        if isinstance(arg, tuple):
            return tuple(self._resolve(node, item) for item in arg)
        return arg

    def _pointwise(self, rule: Pointwise, args: Mapping[str, Any], meta: TensorMeta) -> Tensor:
        _check_dtype(meta, "the result")
        operands = [args.get(name) for name in rule.operands]
        target = _target(rule, operands, meta)
        params = {name: args[name] for name in rule.params if name in args}
        tensors = [x for x in operands if isinstance(x, Tensor)]

        def emit(builder: Builder, *elements: Expr) -> Expr:
            found = iter(elements)
            values = []
            for name, operand in zip(rule.operands, operands, strict=True):
                value = next(found) if isinstance(operand, Tensor) else operand
                values.append(_element(builder, value, None if name in _LAZY else target))
            result = rule.emit(builder, *values, **params)
            return builder.cast(result, meta.dtype)

        if not tensors:
            raise Unfusable("no tensor operand")
        result = self.kernel.map(emit, *tensors, dtype=meta.dtype)
        return reshape(result, meta.shape) if result.shape != meta.shape else result

    def store(self) -> None:
        """Stores for the body's outputs and for the storages that it wrote."""
        for position, value in enumerate(self.body.outputs):
            tensor = self.tensor(value)
            meta = self.body.values[value].meta
            if not isinstance(tensor, Tensor):
                raise Unfusable(f"output %{value} is a host scalar")
            _check_dtype(meta, f"output {position}")
            self.dtypes[f"o{position}"] = meta.dtype
            self._store_into(f"o{position}", tensor, meta, 0)
        for storage, (value, tensor) in self.written.items():
            slot = self.inputs.get(storage)
            if slot is None:
                continue  # an intermediate, written in place
            base = self.body.values[self.body.inputs[slot]]
            home = self.body.values[value]
            self._store_into(f"i{slot}", tensor, home.meta, home.offset - base.offset)

    def _store_into(self, buffer: str, tensor: Tensor, meta: TensorMeta, offset: int) -> None:
        if tensor.finer is not None:
            (_, _, _, a, _, b), (s0, s1, s2, s3) = tensor.finer.shape, meta.stride
            fine = (s0, s1, s2 * a, s2, s3 * b, s3)
            self.kernel.stores.append(Store(buffer, tensor.finer, fine, meta.dtype, offset))
            return
        if not tensor.pieces:
            self.kernel.stores.append(Store(buffer, tensor, meta.stride, meta.dtype, offset))
            return
        for piece in tensor.pieces:
            if piece.stop > piece.start:
                self._store_into(buffer, piece.tensor, meta, offset + piece.start * meta.stride[tensor.axis])


def _same(b: Builder, x: Expr) -> Expr:
    return x


def _check_dtype(meta: TensorMeta, what: str) -> None:
    if meta.dtype not in STORABLE or meta.device != "cpu":
        raise Unfusable(f"{what} is {meta.dtype} on {meta.device}")


def _arity(rule: Any, values: Sequence[Any]) -> int:
    """How many of the schema's arguments a mover takes (memory formats and the like come last)."""
    code = rule.__code__
    return len(values) if code.co_flags & 4 else min(len(values), code.co_argcount - 1)


def _element(builder: Builder, value: Any, target: torch.dtype | None) -> Any:
    if value is None or (target is None and isinstance(value, Expr)):
        return value
    if isinstance(value, Expr):
        return builder.cast(value, target or value.dtype)
    return builder.const(value, target or torch.float32)


def _target(rule: Pointwise, operands: Sequence[Any], meta: TensorMeta) -> torch.dtype | None:
    """The type in which the operator computes; None leaves the operands as they are."""
    if rule.kind in ("default", "float"):
        return compute_dtype(meta.dtype)
    if rule.kind == "logic":
        return torch.bool
    return compute_dtype(_promoted(operands)) if rule.kind == "compare" else None


def _promoted(operands: Sequence[Any]) -> torch.dtype:
    """ATen's promotion: dimensioned tensors first, then 0-d tensors, then Python numbers."""
    examples = [
        torch.empty((0,) if x.shape else (), dtype=x.dtype, device="meta")
        if isinstance(x, Tensor)
        else (1.0 if isinstance(x, Expr) else x)
        for x in operands
    ]
    return torch.result_type(examples[0], examples[1])


def _full(kernel: Kernel, meta: TensorMeta, args: Mapping[str, Any]) -> Tensor:
    value = args.get("fill_value", args.get("value", 0))
    if isinstance(value, Tensor):
        return kernel.map(
            lambda b, x, v: b.cast(v, x.dtype), kernel.constant(0, meta.shape, meta.dtype), value
        )
    if isinstance(value, Expr):
        return Tensor(meta.shape, meta.dtype, lambda _: kernel.builder.cast(value, meta.dtype))
    return kernel.constant(value, meta.shape, meta.dtype)


def _ones(kernel: Kernel, meta: TensorMeta, args: Mapping[str, Any]) -> Tensor:
    return kernel.constant(1, meta.shape, meta.dtype)


def _scalar_tensor(kernel: Kernel, meta: TensorMeta, args: Mapping[str, Any]) -> Tensor:
    return kernel.constant(args["s"], meta.shape, meta.dtype)


def _arange(kernel: Kernel, meta: TensorMeta, args: Mapping[str, Any]) -> Tensor:
    start, step = args.get("start", 0), args.get("step", 1)
    if meta.dtype.is_floating_point or not all(isinstance(n, int) for n in (start, step)):
        raise Unfusable("arange of floating point numbers")
    builder = kernel.builder
    return Tensor(
        meta.shape, meta.dtype, lambda ix: builder.cast(builder.index(ix[0] * step + start), meta.dtype)
    )


_CREATORS = {
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.zeros.default": _full,
    "aten.zeros_like.default": _full,
    "aten.new_zeros.default": _full,
    "aten.new_full.default": _full,
    "aten.fill.Scalar": _full,
    "aten.fill.Tensor": _full,
    "aten.zero.default": _full,
    "aten.ones.default": _ones,
    "aten.ones_like.default": _ones,
    "aten.new_ones.default": _ones,
    "aten.scalar_tensor.default": _scalar_tensor,
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
}
