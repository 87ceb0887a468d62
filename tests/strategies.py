"""Hypothesis strategies: small valid graphs of real ATen operators with their real storages.

Every operator is run on small CPU tensors while the graph grows, so shapes, strides and aliases are what
PyTorch really does, not what someone wrote down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lowtide.analysis.facts import OperatorFacts, assumed_facts
from lowtide.ir import (
    Aten,
    Fission,
    Fused,
    Graph,
    Merge,
    Node,
    Origin,
    Part,
    Ref,
    Role,
    Slice,
    Storage,
    TensorMeta,
    Value,
)
from lowtide.ir.aten import call, tensors_of

__all__ = ["facts_of", "graphs", "nested_graphs", "orders", "relabel", "shuffled"]

Draw = Callable[[st.SearchStrategy[Any]], Any]

UNARY = ("relu", "exp", "neg", "gelu", "sigmoid", "sin")
BINARY = ("add.Tensor", "mul.Tensor", "sub.Tensor", "maximum.default")


@dataclass
class Builder:
    """Grows a graph by running operators."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[int, Value] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def record(self, tensor: Tensor, role: Role) -> int:
        """A Value for `tensor`, on a new storage of this role unless it is a view of a known one."""
        value = len(self.values)
        block = tensor.untyped_storage()
        storage = self.numbers.setdefault(block._cdata, value)
        self.storages.setdefault(storage, Storage(storage, block.nbytes(), role))
        meta = TensorMeta(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self.values[value] = Value(value, meta, storage, int(tensor.storage_offset()))
        self.tensors[value] = tensor
        return value

    @property
    def newest(self) -> int:
        return len(self.values) - 1

    def add_input(self, shape: Sequence[int], role: Role) -> int:
        value = self.record(torch.rand(*shape) + 0.5, role)
        self.inputs.append(value)
        return value

    def run(self, name: str, inputs: Sequence[int], *rest: object) -> None:
        """Call ``aten.<name>(*inputs, *rest)`` and record the results."""
        distinct = tuple(dict.fromkeys(inputs))
        op = Aten(f"aten.{name}", (*(Ref(distinct.index(v)) for v in inputs), *rest))  # type: ignore[arg-type]
        outputs = tuple(
            self.record(tensor, Role.TEMP)
            for tensor in tensors_of(call(op, [self.tensors[v] for v in distinct]))
        )
        self.nodes.append(Node(outputs[0], op, distinct, outputs))

    def overwrite(self, target: int, source: int) -> None:
        number = 1000 + len(self.nodes)
        op = Aten("aten.copy_.default", (Ref(0), Ref(1)))
        self.nodes.append(Node(number, op, (target, source), (), (target,), Origin("bn", phase="update")))

    def finish(self, outputs: Sequence[int]) -> Graph:
        for value in outputs:
            storage = self.storages[self.values[value].storage]
            if not storage.role.resident:
                self.storages[storage.id] = replace(storage, role=Role.OUTPUT)
        return Graph(tuple(self.nodes), self.values, self.storages, tuple(self.inputs), tuple(outputs))


class Grower:
    """Appends one random operator after the other."""

    def __init__(self, builder: Builder, draw: Draw) -> None:
        self.builder = builder
        self.draw = draw
        self.ways = (self.unary, self.binary, self.where, self.matmul, self.view, self.reduce, self.several)

    def grow(self) -> None:
        value = self.pick(self.floats(lambda tensor: tensor.numel() > 0))
        tensor = self.builder.tensors[value]
        self.pick(self.ways if tensor.dim() else self.ways[:3])(value, tensor)

    def pick(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def floats(self, fits: Callable[[Tensor], bool]) -> list[int]:
        return [v for v, t in self.builder.tensors.items() if t.dtype == torch.float32 and fits(t)]

    def like(self, tensor: Tensor) -> int:
        return int(self.pick(self.floats(lambda other: other.shape == tensor.shape)))

    def unary(self, value: int, tensor: Tensor) -> None:
        self.builder.run(f"{self.pick(UNARY)}.default", (value,))

    def binary(self, value: int, tensor: Tensor) -> None:
        other = self.pick(self.floats(lambda other: _broadcasts(other.shape, tensor.shape)))
        self.builder.run(self.pick(BINARY), (value, other))

    def where(self, value: int, tensor: Tensor) -> None:
        self.builder.run("gt.Scalar", (value,), 0.75)
        self.builder.run("where.self", (self.builder.newest, value, self.like(tensor)))

    def matmul(self, value: int, tensor: Tensor) -> None:
        columns = tensor.shape[-1]
        fits = self.floats(lambda other: other.dim() == 2 and len(other) == columns)
        if tensor.dim() == 2 and fits:
            self.builder.run("mm.default", (value, self.pick(fits)))
        else:
            self.builder.run("transpose.int", (value,), 0, -1)

    def view(self, value: int, tensor: Tensor) -> None:
        calls: list[tuple[Any, ...]] = [
            ("transpose.int", 0, tensor.dim() - 1),
            ("slice.Tensor", 0, len(tensor) // 2, len(tensor)),
            ("select.int", 0, len(tensor) - 1),
        ]
        if tensor.dim() < 3:
            calls.append(("expand.default", (2, *tensor.shape)))
        if tensor.is_contiguous():
            calls.append(("view.default", (tensor.numel(),)))
        name, *rest = self.pick(calls)
        self.builder.run(name, (value,), *rest)

    def reduce(self, value: int, tensor: Tensor) -> None:
        if self.pick((True, False)):
            return self.builder.run("_softmax.default", (value,), self.pick((0, -1)), False)
        self.builder.run("sum.dim_IntList", (value,), (0,), self.pick((True, False)))

    def several(self, value: int, tensor: Tensor) -> None:
        """Operators with several outputs, fresh ones and views."""
        way = self.pick(("norm", "pool", "split"))
        if way == "norm":
            self.builder.run("native_layer_norm.default", (value,), (tensor.shape[-1],), None, None, 1e-5)
        elif way == "pool" and tensor.dim() == 2:
            self.builder.run("unsqueeze.default", (value,), 0)
            self.builder.run("max_pool2d_with_indices.default", (self.builder.newest,), (1, 1), (1, 1))
        else:
            self.builder.run("split.Tensor", (value,), max(1, len(tensor) // 2))


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, target) == target
    except RuntimeError:
        return False


@st.composite
def graphs(draw: Draw, max_nodes: int = 12) -> Graph:
    """A valid program: inputs, a parameter, a buffer that may be overwritten, 1 to 3 results."""
    rows, columns = draw(st.sampled_from([(2, 3), (4, 6), (6, 6), (5, 1)]))
    builder = Builder()
    builder.add_input((rows, columns), Role.INPUT)
    builder.add_input((columns, rows), Role.PARAM)
    buffer = builder.add_input((columns,), Role.BUFFER)
    grower = Grower(builder, draw)
    for _ in range(draw(st.integers(1, max_nodes))):
        grower.grow()
    made = [value for value in builder.values if value not in builder.inputs]
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)) if made else [0]
    fits = [
        v
        for v in made
        if builder.tensors[v].shape == (columns,) and builder.values[v].meta.dtype.is_floating_point
    ]
    if fits and draw(st.booleans()):
        builder.overwrite(buffer, draw(st.sampled_from(fits)))
    return builder.finish(outputs)


@st.composite
def nested_graphs(draw: Draw) -> Graph:
    """A graph some of whose nodes became a Fused or a Fission, with random ids and origins."""
    graph = draw(graphs())
    nodes = []
    for node in graph.nodes:
        way = draw(st.sampled_from(("plain", "fused", "fission")))
        body = _body_of(graph, node)
        if way == "fused" and not node.writes and not graph.is_view(node):
            node = replace(node, op=Fused(body))
        elif way == "fission" and (op := _halves(graph, node)) is not None:
            node = replace(node, op=op)
        nodes.append(replace(node, origin=draw(_ORIGINS)))
    graph = Graph(tuple(nodes), graph.values, graph.storages, graph.inputs, graph.outputs)
    return relabel(graph, draw(st.integers(0, 2**16)), draw(st.booleans()))


_WORDS = st.one_of(
    st.just(""), st.text(max_size=6), st.sampled_from(("enc.0.act", "-", '"', "model.py:31", "a b"))
)
_ORIGINS = st.builds(Origin, _WORDS, _WORDS, st.sampled_from(("forward", "loss", "backward", "update", "")))


def _body_of(graph: Graph, node: Node) -> Graph:
    """The node as a graph of its own."""
    values = {v: graph.values[v] for v in (*node.inputs, *node.outputs)}
    storages = {value.storage: graph.storages[value.storage] for value in values.values()}
    return Graph((node,), values, storages, node.inputs, node.outputs)


def _halves(graph: Graph, node: Node) -> Fission | None:
    """The node split into two halves along axis 0, if it is elementwise on contiguous tensors."""
    values = [graph.values[v] for v in (*node.inputs, *node.outputs)]
    shape = values[0].meta.shape
    plain = all(value.meta.contiguous and value.meta.shape == shape for value in values)
    name = getattr(node.op, "overload", "..").split(".")[1]
    if not plain or name not in {*UNARY, "add", "mul", "sub", "maximum"} or not shape or shape[0] % 2:
        return None
    half = (shape[0] // 2, *shape[1:])
    small = [Value(v.id, replace(v.meta, shape=half), v.id) for v in values]
    storages = {v.id: Storage(v.id, v.meta.span_bytes, Role.TEMP) for v in small}
    body = Graph((node,), {v.id: v for v in small}, storages, node.inputs, node.outputs)
    parts = []
    for start in (0, half[0]):
        piece = Slice(0, start, start + half[0])
        parts.append(Part(0, (piece,) * len(node.inputs), (piece,) * len(node.outputs)))
    return Fission((body,), tuple(parts), (Merge.WRITE,) * len(node.outputs))


def relabel(graph: Graph, seed: int, separate: bool = True) -> Graph:
    """The same graph with other ids; `separate` numbers nodes, values and storages independently."""
    generator = torch.Generator().manual_seed(seed)

    def renumber(ids: Sequence[int]) -> dict[int, int]:
        fresh = torch.randperm(3 * len(ids) + 1, generator=generator).tolist()
        return dict(zip(ids, fresh, strict=False))

    values = renumber(list(graph.values))
    storages = (
        renumber(list(graph.storages)) if separate else {s: values.get(s, 9999 + s) for s in graph.storages}
    )
    nodes = renumber([node.id for node in graph.nodes])

    def move(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[v] for v in ids)

    return Graph(
        tuple(
            replace(
                node,
                id=nodes[node.id],
                inputs=move(node.inputs),
                outputs=move(node.outputs),
                writes=move(node.writes),
            )
            for node in graph.nodes
        ),
        {
            values[v.id]: replace(v, id=values[v.id], storage=storages[v.storage])
            for v in graph.values.values()
        },
        {storages[s.id]: replace(s, id=storages[s.id]) for s in graph.storages.values()},
        move(graph.inputs),
        move(graph.outputs),
    )


@st.composite
def orders(draw: Draw, graph: Graph) -> tuple[int, ...]:
    """A random order of all nodes that respects every dependency."""
    priority = draw(st.permutations([node.id for node in graph.nodes]))
    done: list[int] = []
    while len(done) < len(graph.nodes):
        done.append(next(n for n in priority if n not in done and set(graph.dependencies[n]) <= set(done)))
    return tuple(done)


def shuffled(graph: Graph, order: Sequence[int]) -> Graph:
    """The same program, written down in another order."""
    return Graph(
        tuple(graph.node[n] for n in order), graph.values, graph.storages, graph.inputs, graph.outputs
    )


@st.composite
def facts_of(draw: Draw, graph: Graph) -> dict[int, OperatorFacts]:
    """Facts with larger storages than needed and with workspace, as operators (not views) really have."""
    found = {}
    for node, facts in assumed_facts(graph).items():
        if graph.is_view(graph.node[node]):
            found[node] = facts  # a view runs nothing
            continue
        slack = draw(st.sampled_from((0, 0, 64)))
        sizes = tuple(nbytes + slack if nbytes else 0 for nbytes in facts.output_bytes)
        found[node] = OperatorFacts(sizes, sum(sizes) + draw(st.sampled_from((0, 0, 16, 100))))
    return found
