"""The algebraic part of a graph as shared terms with shapes: what rules match and what it costs.

Problem.  Rules speak of operators on values; at a site it matters which values are shared, how large they
are, and who else reads them.

Method.  Every value of the graph is a cell: a leaf (made by an operator that is no term's), a number, or an
operator on cells.  Cells are interned, so equal terms are one cell: common sub-expressions are found by
construction, and replacing a term counts exactly the work that nobody needs any more.

Invariants.  Cells are numbered operands first.  All tensors below an operator have its type; values on
storages that the graph writes are leaves, so no read moves across a write.

Not done here: rules, and making a graph of cells again (`emission.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Aten, Ref
from lowtide.transforms.rewriting.spelling import Axes, Call, read_call, spell_call
from lowtide.transforms.rewriting.term import REDUCTIONS

__all__ = ["Cell", "Impossible", "Sheet", "read_sheet"]


class Impossible(Exception):
    """A term that cannot be built on these cells: shapes that do not broadcast, a call without spelling."""


@dataclass(frozen=True, slots=True)
class Cell:
    """op: ``leaf`` (attribute: value id), ``number`` (attribute: its value), or an operator on cells."""

    op: str
    args: tuple[int, ...] = ()
    attribute: Axes | int | float | None = None


@dataclass
class Sheet:
    """Interned cells with shape and type; `home` is the first value of the graph that a cell is."""

    cells: list[Cell] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    known: dict[Cell, int] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)
    of: dict[int, int] = field(default_factory=dict)

    def leaf(self, value: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """The cell of a value about which nothing is known."""
        return self._intern(Cell("leaf", (), value), shape, dtype)

    def number(self, value: float) -> int:
        """The cell of a constant."""
        return self._intern(Cell("number", (), value), (), None)

    def apply(self, op: str, args: tuple[int, ...], attribute: Axes | int | None = None) -> int:
        """The cell of an operator on cells; raises Impossible."""
        cell = Cell(op, args, attribute)
        if cell in self.known:
            return self.known[cell]
        if all(self.cells[arg].op == "number" for arg in args):
            return self.number(_folded(op, [float(self.cells[a].attribute or 0.0) for a in args]))  # type: ignore[arg-type]
        dtypes = {self.dtypes[arg] for arg in args} - {None}
        if len(dtypes) != 1 or not self._spells(cell):
            raise Impossible
        return self._intern(cell, self._shape(op, args, attribute), dtypes.pop())

    def _intern(self, cell: Cell, shape: tuple[int, ...], dtype: torch.dtype | None) -> int:
        number = self.known.get(cell)
        if number is None:
            number = self.known[cell] = len(self.cells)
            self.cells.append(cell)
            self.shapes.append(shape)
            self.dtypes.append(dtype)
        return number

    def call(self, cell: Cell) -> Call:
        """The cell as a call on its tensor operands, in order, numbers in place."""
        tensors = [arg for arg in dict.fromkeys(cell.args) if self.cells[arg].op != "number"]
        operands = tuple(
            Ref(tensors.index(arg)) if arg in tensors else float(self.cells[arg].attribute or 0.0)  # type: ignore[arg-type]
            for arg in cell.args
        )
        attribute = cell.attribute
        assert not isinstance(attribute, float)
        return Call(cell.op, operands, attribute)

    def _spells(self, cell: Cell) -> bool:
        return spell_call(self.call(cell)) is not None

    def _shape(self, op: str, args: tuple[int, ...], attribute: Axes | int | None) -> tuple[int, ...]:
        if op in REDUCTIONS:
            assert isinstance(attribute, Axes)
            return self._reduced(self.shapes[args[0]], attribute)
        try:
            return tuple(np.broadcast_shapes(*(self.shapes[arg] for arg in args)))
        except ValueError as error:
            raise Impossible from error

    @staticmethod
    def _reduced(shape: tuple[int, ...], over: Axes) -> tuple[int, ...]:
        if len(shape) != over.rank or tuple(shape[axis] for axis in over.axes) != over.sizes:
            raise Impossible  # a broadcast operand would be counted once
        if over.keepdim:
            return tuple(1 if k in over.axes else size for k, size in enumerate(shape))
        return tuple(size for k, size in enumerate(shape) if k not in over.axes)

    def live(self, roots: Iterable[int]) -> list[int]:
        """Cells that `roots` need, operands first."""
        done: dict[int, None] = {}
        for root in roots:
            stack = [root]
            while stack:
                top = stack[-1]
                missing = [arg for arg in self.cells[top].args if arg not in done]
                if missing:
                    stack.extend(reversed(missing))
                else:
                    done[stack.pop()] = None
        return list(done)

    def cost(self, live: Iterable[int]) -> tuple[int, int]:
        """(floating point operations by the paper's count, bytes read and written) of cells."""
        flops = moved = 0
        for number in live:
            cell = self.cells[number]
            if not cell.args:
                continue
            reads = [prod(self.shapes[a]) for a in dict.fromkeys(cell.args) if self.cells[a].op != "number"]
            size = prod(self.shapes[number])
            flops += reads[0] if cell.op in REDUCTIONS else size
            dtype = self.dtypes[number]
            moved += (sum(reads) + size) * (dtype.itemsize if dtype is not None else 0)
        return flops, moved

    def replaced(self, root: int, old: int, new: int) -> int:
        """`root` with every occurrence of cell `old` being `new`; raises Impossible."""
        memo = {old: new}
        for number in self.live([root]):
            cell = self.cells[number]
            if number not in memo and cell.args:
                args = tuple(memo.get(arg, arg) for arg in cell.args)
                attribute = cell.attribute
                assert not isinstance(attribute, float)
                memo[number] = number if args == cell.args else self.apply(cell.op, args, attribute)
        return memo.get(root, root)


def _folded(op: str, args: Sequence[float]) -> float:
    """The number that an operator gives on numbers."""
    try:
        return _FOLDS[op](*args)
    except (KeyError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise Impossible from error


_FOLDS: Mapping[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "recip": lambda a: 1 / a,
    "sqrt": math.sqrt,
    "square": lambda a: a * a,
    "exp": math.exp,
}


def read_sheet(graph: Graph) -> Sheet:
    """Every value of the graph as a cell of one sheet."""
    sheet = Sheet()
    written = {graph.values[value].storage for node in graph.nodes for value in node.writes}
    for value in graph.inputs:
        _enter_leaf(sheet, graph, value)
    for node in graph.nodes:
        if not _enter_call(sheet, graph, node, written):
            for out in node.outputs:
                _enter_leaf(sheet, graph, out)
    return sheet


def _enter_leaf(sheet: Sheet, graph: Graph, value: int) -> None:
    meta = graph.values[value].meta
    number = sheet.of[value] = sheet.leaf(value, meta.shape, meta.dtype)
    sheet.home.setdefault(number, value)


def _same_phase(sheet: Sheet, graph: Graph, number: int, node: Node) -> bool:
    """Whether a cell was first made in the node's phase: what the backward computes again stays apart."""
    home = sheet.home.get(number)
    made = graph.producer.get(home) if home is not None else None
    return made is None or graph.node[made].origin.phase == node.origin.phase


def _enter_call(sheet: Sheet, graph: Graph, node: Node, written: set[int]) -> bool:
    """Enter a node that is a term's operator; False if it is none."""
    if not isinstance(node.op, Aten) or node.writes or len(node.outputs) != 1 or graph.is_view(node):
        return False
    metas = [graph.values[value].meta for value in node.inputs]
    out = graph.values[node.outputs[0]].meta
    if any(meta.dtype != out.dtype or meta.device != out.device for meta in metas):
        return False
    used = [graph.values[value].storage for value in node.inputs]
    if any(each in written or graph.storages[each].role is Role.HOST for each in used):
        return False
    call = read_call(node.op, metas)
    if call is None:
        return False
    args = [sheet.of[node.inputs[o.index]] if isinstance(o, Ref) else sheet.number(o) for o in call.operands]
    try:
        number = sheet.apply(call.op, tuple(args), call.attribute)
    except Impossible:
        return False
    if sheet.shapes[number] != out.shape or not _same_phase(sheet, graph, number, node):
        return False
    sheet.of[node.outputs[0]] = number
    sheet.home.setdefault(number, node.outputs[0])
    return True
