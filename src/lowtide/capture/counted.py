"""The same step with draws by counter: ``rng="philox"``.

Problem.  A draw from PyTorch's generator happens once, whole and in program order, so that its result has to
be kept for whoever needs it later.

rewrite:    bernoulli(x, p), rand_like(x), randn_like(x), rand(shape), randn(shape), uniform(x, a, b),
            normal(x, mean, std)   ->   philox(key of the node, index tensors, ...)   (`lowtide.ir.philox`)
legal when: the result is dense, its dimensions in any order, and the parameters are numbers.  Other draws
            (``randint``, ``multinomial``, attention with dropout inside) stay PyTorch's, once and whole.
effect:     other random numbers of the same distribution.  What was a draw is an ordinary operator: it may
            be cut, computed again, moved.

The k-th draw of the step has offset k.  Its key follows from that and from the step's key, one number drawn
from PyTorch's generator when the step begins (`Program.scalars`).  So ``torch.manual_seed`` decides all of
them, two steps differ, and a generator state that was saved and restored brings the same bits again.

Invariants.  Value ids do not change; the generator advances by one draw a step (and by what stays).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from lowtide.capture.door import capture
from lowtide.capture.functional import arguments_of
from lowtide.capture.passes import eliminate_dead_code
from lowtide.capture.program import Program
from lowtide.capture.update import NUMBER
from lowtide.ir.graph import Graph, Node, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Arg, Aten, Ref
from lowtide.ir.philox import PHILOX
from lowtide.ir.spelling import contiguous_stride
from lowtide.workload import Workload

__all__ = ["captured", "draw_by_counter"]

LARGE_BYTES = 1 << 16
"""An index tensor above this size has to be small beside the result, else its dimension is never cut."""


def captured(workload: Workload, rng: str) -> Program:
    """The program of `workload`, which draws as `rng` ("eager" or "philox") says.  Raises CaptureError."""
    program = capture(workload)
    return draw_by_counter(program) if rng == "philox" else program


def draw_by_counter(program: Program) -> Program:
    """`program` with its dropout masks and uniform and normal fills drawn by counter."""
    rewriter = _Rewriter(program.graph)
    graph = rewriter.rewrite()
    wanted = {*program.names.values(), *program.gradients.values()} & graph.values.keys()
    return replace(
        program, graph=eliminate_dead_code(graph, wanted), rng="philox", draws=tuple(rewriter.keys)
    )


@dataclass(frozen=True)
class _Numbers:
    """What a draw's elements are."""

    kind: str
    first: float
    second: float


def _numbers_of(op: Aten) -> _Numbers | None:
    """The distribution of a draw that can be made by counter."""
    given = arguments_of(op)
    kind, names = _DRAWS.get(op.overload, ("", {}))
    first, second = (given.get(name, default) for name, default in names.items()) if names else (None, None)
    if not kind or given.get("generator") is not None:
        return None
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    return _Numbers(kind, float(first), float(second))


_STANDARD = {"-first": 0.0, "-second": 1.0}
_DRAWS: Mapping[str, tuple[str, Mapping[str, Arg]]] = {
    "aten.bernoulli.p": ("bernoulli", {"p": 0.5, "-second": 0.0}),
    "aten.rand.default": ("uniform", _STANDARD),
    "aten.rand_like.default": ("uniform", _STANDARD),
    "aten.uniform.default": ("uniform", {"from": 0.0, "to": 1.0}),
    "aten.randn.default": ("normal", _STANDARD),
    "aten.randn_like.default": ("normal", _STANDARD),
    "aten.normal_functional.default": ("normal", {"mean": 0.0, "std": 1.0}),
}
"""Overload -> kind, and the arguments that are its parameters with their defaults ("-": no argument)."""


@dataclass
class _Rewriter:
    """One pass over the graph; `keys` are the host numbers, by offset."""

    graph: Graph
    values: dict[int, Value] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    keys: list[int] = field(default_factory=list)
    indices: dict[tuple[int, int, str], int] = field(default_factory=dict)
    makers: list[Node] = field(default_factory=list)

    def rewrite(self) -> Graph:
        self.values.update(self.graph.values)
        self.storages.update(self.graph.storages)
        nodes = [self._rewritten(node) for node in self.graph.nodes]
        inputs = (*self.graph.inputs, *self.keys)
        return Graph((*self.makers, *nodes), self.values, self.storages, inputs, self.graph.outputs)

    def _rewritten(self, node: Node) -> Node:
        if not isinstance(node.op, Aten) or len(node.outputs) != 1:
            return node
        value = self.graph.values[node.outputs[0]]
        numbers = _numbers_of(node.op)
        if numbers is None or not value.meta.dtype.is_floating_point or not self._fills(value):
            return node
        return self._drawn(node, value.meta, numbers)

    def _fills(self, value: Value) -> bool:
        """Whether a value is dense and all of its storage."""
        meta, nbytes = value.meta, self.graph.storages[value.storage].nbytes
        return value.offset == 0 and meta.nbytes == meta.span_bytes == nbytes

    def _drawn(self, node: Node, meta: TensorMeta, numbers: _Numbers) -> Node:
        strides = contiguous_stride(meta.shape)
        cut = [
            dim
            for dim, size in enumerate(meta.shape)
            if size > 1 and (size * 8 <= LARGE_BYTES or 100 * size <= meta.numel)
        ]
        inputs = [self._key(), *(self._index(meta.shape[dim], strides[dim], meta.device) for dim in cut)]
        order = tuple(sorted(range(len(meta.shape)), key=lambda dim: (-meta.stride[dim], dim)))
        refs = tuple(Ref(position + 1) for position in range(len(cut)))
        place = (refs, tuple(cut), meta.shape, strides, order)
        drawn = Aten(PHILOX, (Ref(0), *place, numbers.kind, numbers.first, numbers.second, meta.dtype))
        return replace(node, op=drawn, inputs=tuple(inputs))

    def _key(self) -> int:
        self.keys.append(self._value(NUMBER, 0, Role.HOST))
        return self.keys[-1]

    def _index(self, size: int, stride: int, device: str) -> int:
        """The index tensor of `size` positions that are `stride` elements apart; made once."""
        if (size, stride, device) not in self.indices:
            where = (("device", torch.device(device)), ("dtype", torch.int64))
            op = Aten("aten.arange.start_step", (0, size * stride, stride), where)
            made = self._value(TensorMeta((size,), (1,), torch.int64, device), 8 * size, Role.TEMP)
            first = max((node.id for node in (*self.graph.nodes, *self.makers)), default=-1) + 1
            self.makers.append(Node(first, op, (), (made,)))
            self.indices[size, stride, device] = made
        return self.indices[size, stride, device]

    def _value(self, meta: TensorMeta, nbytes: int, role: Role) -> int:
        number, storage = max(self.values, default=-1) + 1, max(self.storages, default=-1) + 1
        self.storages[storage] = Storage(storage, nbytes, role)
        self.values[number] = Value(number, meta, storage)
        return number
