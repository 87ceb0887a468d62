"""From rewritten cells back to a graph.

Method.  The nodes are walked in program order.  Nodes of partitions that did not change stay as they are.
In a partition that changed, the terms of a result are emitted where the result was made before: what a
term reads was read by the result's old term, so it is defined there.

Invariants.  A result that something reads keeps its id, shape, strides and storage, unless it turned out
to be another value, which then takes its place (`forward`).  A result that the graph returns is always
made anew.  Values that nobody needs are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.ir.edit import Edit
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Ref
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict
from lowtide.transforms.rewriting.sheet import Sheet
from lowtide.transforms.rewriting.spelling import spell_call

__all__ = ["Layouts", "emit"]


@dataclass
class Layouts:
    """Shape, strides and type of cells: those of the graph where it has them, else from a fake run."""

    graph: Graph
    sheet: Sheet
    known: dict[int, TensorMeta | None] = field(default_factory=dict)

    def of(self, cell: int) -> TensorMeta | None:
        """The layout of a cell; None if its operator refuses the layouts of its operands."""
        for number in self.sheet.live([cell]):
            if number not in self.known:
                home = self.sheet.home.get(number)
                self.known[number] = self.graph.values[home].meta if home is not None else self._run(number)
        return self.known[cell]

    def _run(self, cell: int) -> TensorMeta | None:
        found = self.sheet.cells[cell]
        if found.op == "number":
            return None
        op = spell_call(self.sheet.call(found))
        metas = [self.known[arg] for arg in dict.fromkeys(found.args) if self.sheet.cells[arg].op != "number"]
        given = tuple(meta for meta in metas if meta is not None)
        if op is None or len(given) < len(metas):
            return None
        try:
            (result,) = predict(op, given)
        except (RuntimeError, ValueError):
            return None
        return result.meta if result.alias is None else None


def emit(graph: Graph, sheet: Sheet, changed: Mapping[int, int], members: frozenset[int]) -> Edit:
    """`graph` with every result value of `changed` being the cell given there.

    `members`: nodes of the partitions that changed; they are made again only where something needs them.
    """
    work = _Emission(graph, sheet, members)
    for node in graph.nodes:
        if node.id not in members:
            work.keep(node)
        elif node.outputs[0] in changed:
            work.result(node, changed[node.outputs[0]])
    new = work.draft.graph(graph.inputs, graph.outputs)
    forward: dict[int, int | None] = {value: None for value in graph.values if value not in new.values}
    forward.update({old: here for old, here in work.renamed.items() if old != here})
    return Edit(new, forward)


@dataclass
class _Emission:
    graph: Graph
    sheet: Sheet
    members: frozenset[int]
    renamed: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft(self.graph)

    def keep(self, node: Node) -> None:
        """Append a node, reading what took the place of its inputs."""
        self._append(node, tuple(self.renamed.get(value, value) for value in node.inputs))

    def _append(self, node: Node, inputs: tuple[int, ...]) -> None:
        if inputs == node.inputs or not isinstance(node.op, Aten):
            writes = tuple(self.renamed.get(value, value) for value in node.writes)
            self.draft.nodes.append(Node(node.id, node.op, inputs, node.outputs, writes, node.origin))
        else:
            self.draft.emit(node.op, inputs, node.origin, node.outputs, node=node.id)

    def result(self, node: Node, cell: int) -> None:
        """Make `cell` the value that `node` made."""
        value = node.outputs[0]
        if cell in self.made or not self.sheet.cells[cell].args:
            self._alias(node, self._value(cell, node))
            return
        if self.sheet.of[value] == cell:
            self._append(node, self._inputs(cell, node))
        else:
            self._emit(cell, node, (value,), node.id)
        self.made[cell] = value

    def _alias(self, node: Node, same: int) -> None:
        """The result of `node` is `same`: readers read that, the caller gets a copy."""
        value = node.outputs[0]
        storage = self.graph.values[value].storage
        returned = any(each in self.graph.outputs for each in self.graph.views_of[storage])
        if returned or len(self.graph.views_of[storage]) > 1:
            copy = Aten("aten.clone.default", (Ref(0),))
            self.draft.emit(copy, (same,), node.origin, (value,), node=node.id)
        else:
            self.renamed[value] = same

    def _value(self, cell: int, near: Node) -> int:
        """The value of a cell, emitted now if it is not yet."""
        found = self.sheet.cells[cell]
        if found.op == "leaf":
            assert isinstance(found.attribute, int)
            return self.renamed.get(found.attribute, found.attribute)
        if cell not in self.made:
            home = self.sheet.home.get(cell)
            maker = self.graph.node[self.graph.producer[home]] if home is not None else None
            if maker is not None and maker.id in self.members and home is not None:
                self._append(maker, self._inputs(cell, maker))
                self.made[cell] = home
            elif home is not None:
                self.made[cell] = home
            else:
                self.made[cell] = self._emit(cell, near, None, None)
        return self.made[cell]

    def _inputs(self, cell: int, near: Node) -> tuple[int, ...]:
        """The node's inputs, by the cells that they are."""
        return tuple(self._value(self.sheet.of[value], near) for value in near.inputs)

    def _emit(self, cell: int, near: Node, outputs: tuple[int, ...] | None, node: int | None) -> int:
        found = self.sheet.cells[cell]
        op = spell_call(self.sheet.call(found))
        assert op is not None
        tensors = [arg for arg in dict.fromkeys(found.args) if self.sheet.cells[arg].op != "number"]
        inputs = tuple(self._value(arg, near) for arg in tensors)
        (made,) = self.draft.emit(op, inputs, near.origin, outputs, node=node)
        return made
