"""A graph under rewriting: nodes are emitted one by one, new values get their layout from a fake run.

Invariants.  Ids of kept nodes, values and storages do not change; new ones count up from the largest.
A node never lists an input twice, except where a Fission binds it in two ways.

Not done.  Legality: whoever emits knows why it may.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.ir.aten import renumber
from lowtide.ir.graph import Graph, Node, Origin, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Aten
from lowtide.transforms.prediction import predict

__all__ = ["Draft"]


class Draft:
    """Nodes, values and storages of the graph to be; starts with the values of `graph` and no node."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = dict(graph.values)
        self.storages: dict[int, Storage] = dict(graph.storages)
        self._next_node = max((node.id for node in graph.nodes), default=-1) + 1
        self._next_value = max(self.values, default=-1) + 1
        self._next_storage = max(self.storages, default=-1) + 1

    def node_id(self) -> int:
        """A new node's id."""
        self._next_node += 1
        return self._next_node - 1

    def storage(self, nbytes: int, role: Role) -> int:
        """A new storage's id."""
        number = self._next_storage
        self._next_storage += 1
        self.storages[number] = Storage(number, nbytes, role)
        return number

    def value(self, meta: TensorMeta, storage: int, offset: int = 0) -> int:
        """A new value's id."""
        number = self._next_value
        self._next_value += 1
        self.values[number] = Value(number, meta, storage, offset)
        return number

    def emit(
        self,
        op: Aten,
        inputs: Sequence[int],
        origin: Origin,
        outputs: Sequence[int] | None = None,
        role: Role = Role.TEMP,
        node: int | None = None,
    ) -> tuple[int, ...]:
        """Append `op` on `inputs`; gives the ids of its results.

        `outputs`: existing values to define, which keep their meta and storage; without it, new values
        are made as a fake run says, fresh storages in `role`.
        """
        unique = tuple(dict.fromkeys(inputs))
        if len(unique) < len(inputs):
            op = renumber(op, [unique.index(value) for value in inputs])
        made = tuple(outputs) if outputs is not None else self._results(op, unique, role)
        number = self.node_id() if node is None else node
        self.nodes.append(Node(number, op, unique, made, origin=origin))
        return made

    def _results(self, op: Aten, inputs: Sequence[int], role: Role) -> tuple[int, ...]:
        fresh: dict[int, int] = {}
        made = []
        for result in predict(op, tuple(self.values[value].meta for value in inputs)):
            if result.alias is not None:
                source = self.values[inputs[result.alias]]
                made.append(self.value(result.meta, source.storage, source.offset + result.offset))
                continue
            if result.fresh not in fresh:
                fresh[result.fresh] = self.storage(result.nbytes, role)
            made.append(self.value(result.meta, fresh[result.fresh], result.offset))
        return tuple(made)

    def graph(self, inputs: Iterable[int], outputs: Iterable[int]) -> Graph:
        """The finished graph, without values and storages that nothing mentions."""
        inputs, outputs = tuple(inputs), tuple(outputs)
        used = {value for node in self.nodes for value in (*node.inputs, *node.outputs)}
        used.update(inputs, outputs)
        values = {key: value for key, value in self.values.items() if key in used}
        kept = {value.storage for value in values.values()}
        storages = {key: storage for key, storage in self.storages.items() if key in kept}
        return Graph(tuple(self.nodes), values, storages, inputs, outputs)
