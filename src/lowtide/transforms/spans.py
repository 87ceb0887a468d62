"""Which rows each node of a region makes and is given in one part, where parts overlap.

Problem.  A part hands out its own rows of every result.  What it needs for that grows backwards through
windows (`lowtide.analysis.windows`), differs from reader to reader, and ends at the borders of the image.

Method.  Backwards: the rows that are needed of each value are the hull of what its readers need and, if
the value leaves the region, of what this part owns.  Forwards: each node takes the rows that are there
and makes what it can; it is given fewer (a view) where far more is there than it needs.

    own rows of the result      4..8
    needed of x, two 3x3        2..10          there and taken: 2..10, made 3..9, then 4..8

Invariants.  A sum takes exactly its own rows, so that nothing is added twice.  What is needed is exact,
whatever else is carried along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.analysis.axis import Axis, at_part
from lowtide.analysis.windows import Span, Taken, WindowAxis, with_arguments
from lowtide.ir import Graph, Node
from lowtide.ir.ops import Aten, Merge
from lowtide.transforms.body import Border

__all__ = ["Cut", "Given", "NodeSpans", "PartSpans", "part_spans"]

Cut = tuple[int, int | None]
"""A value and the dimension that is cut; None: the whole."""

_SPARE = 1.2
"""With more than this times the rows that it needs, a node is given a view of those only."""


@dataclass(frozen=True, slots=True)
class Given:
    """What one input of a node is in a part: the rows `used` of the rows `there`, zeros put around."""

    dim: int
    there: Span
    used: Span
    zeros: Span = (0, 0)

    @property
    def narrowed(self) -> bool:
        """Whether a view is needed."""
        return self.used != self.there

    @property
    def padded(self) -> bool:
        """Whether zeros have to be put on."""
        return any(self.zeros)


@dataclass(frozen=True, slots=True)
class NodeSpans:
    """One node in a part: its operator there, its inputs that are cut, and the units that it makes."""

    op: Aten
    inputs: tuple[Given | None, ...]
    made: Span


@dataclass(frozen=True)
class PartSpans:
    """One part: its nodes, the rows of the region's inputs, and per output (owned, made); None: whole."""

    nodes: Mapping[int, NodeSpans]
    inputs: tuple[Span | None, ...]
    outputs: tuple[tuple[Span, Span] | None, ...]

    @property
    def rows(self) -> int:
        """Units that all nodes make together."""
        return sum(spans.made[1] - spans.made[0] for spans in self.nodes.values())

    def pattern(self) -> tuple[object, ...]:
        """What the body depends on: parts of equal pattern run one body."""
        nodes = tuple(
            (number, spans.op, tuple(given and _relative(given) for given in spans.inputs))
            for number, spans in self.nodes.items()
        )
        inputs = tuple(span and span[1] - span[0] for span in self.inputs)
        outputs = tuple(pair and (pair[0][0] - pair[1][0], pair[0][1] - pair[1][0]) for pair in self.outputs)
        return nodes, inputs, outputs


def _relative(given: Given) -> tuple[Span, Span]:
    start, stop = given.there
    return (given.used[0] - start, given.used[1] - stop), given.zeros


def rows_of(graph: Graph, value: int, dim: int, units: Span, extent: int) -> Span:
    """Rows of `value` along `dim` that units of a loop of `extent` are."""
    unit = graph.values[value].meta.shape[dim] // extent
    return units[0] * unit, units[1] * unit


def _units_of(graph: Graph, value: int, dim: int, rows: Span, extent: int) -> Span:
    """The units that cover `rows`."""
    unit = graph.values[value].meta.shape[dim] // extent
    return rows[0] // unit, -(-rows[1] // unit)


def _hull(one: Span | None, other: Span) -> Span:
    return other if one is None else (min(one[0], other[0]), max(one[1], other[1]))


def _common(spans: Sequence[Span]) -> Span:
    return max(span[0] for span in spans), min(span[1] for span in spans)


def own_span(extent: int, cut: Span, units: int) -> Span:
    """The part ``[cut[0] / units, cut[1] / units)`` of `extent` rows."""
    return extent * cut[0] // units, extent * cut[1] // units


@dataclass
class _Needs:
    """Rows that are needed of each cut value, and units of each node."""

    graph: Graph
    assignment: Mapping[int, Axis]
    cut: Span
    units: int

    def __post_init__(self) -> None:
        self.rows: dict[Cut, Span] = {}
        self.units_of: dict[int, Span] = {}

    def own(self, value: int, dim: int) -> None:
        """`value` leaves the region: this part owns some of it."""
        rows = own_span(self.graph.values[value].meta.shape[dim], self.cut, self.units)
        self.rows[value, dim] = _hull(self.rows.get((value, dim)), rows)

    def visit(self, node: Node, sums: bool) -> str:
        """Pass what is needed of `node` on to its inputs; says why it cannot be had, or nothing."""
        axis = self.assignment[node.id]
        wanted: Span | None = None
        for value, dim in zip(node.outputs, axis.outputs, strict=True):
            if dim is not None and (value, dim) in self.rows:
                found = _units_of(self.graph, value, dim, self.rows[value, dim], axis.extent)
                wanted = _hull(wanted, found)
        if sums:
            own = own_span(axis.extent, self.cut, self.units)
            if wanted not in (None, own):
                return "makes a sum of its own rows and is needed with others"
            wanted = own
        if wanted is None or wanted[0] == wanted[1]:
            return "has no rows in a part"
        self.units_of[node.id] = wanted
        for position, (value, dim) in enumerate(zip(node.inputs, axis.inputs, strict=True)):
            if dim is not None:
                found = self._needed(axis, position, value, dim, wanted)
                self.rows[value, dim] = _hull(self.rows.get((value, dim)), found)
        return ""

    def _needed(self, axis: Axis, position: int, value: int, dim: int, wanted: Span) -> Span:
        window = axis.windows[position] if isinstance(axis, WindowAxis) else None
        if window is not None:
            return window.need(wanted)
        return rows_of(self.graph, value, dim, wanted, axis.extent)


def part_spans(
    graph: Graph, assignment: Mapping[int, Axis], border: Border, cut: Span, units: int
) -> PartSpans | str:
    """The rows of one part, ``[cut[0], cut[1])`` of `units`; a sentence where there is no such part."""
    needs = _Needs(graph, assignment, cut, units)
    for value, dim in border.outputs:
        if dim is not None:
            needs.own(value, dim)
    added = {
        value for (value, _), merge in zip(border.outputs, border.merges, strict=True) if merge is Merge.ADD
    }
    for number in reversed(border.nodes):
        node = graph.node[number]
        if fault := needs.visit(node, not added.isdisjoint(node.outputs)):
            return f"node {number} {fault}"
    there: dict[Cut, Span] = {(v, d): needs.rows[v, d] for v, d in border.inputs if d is not None}
    nodes: dict[int, NodeSpans] = {}
    for number in border.nodes:
        node = graph.node[number]
        nodes[number] = _take(graph, node, assignment[number], needs, there)
    return PartSpans(
        nodes,
        tuple(None if dim is None else there[value, dim] for value, dim in border.inputs),
        tuple(
            None
            if dim is None
            else (own_span(graph.values[value].meta.shape[dim], cut, units), there[value, dim])
            for value, dim in border.outputs
        ),
    )


def _take(graph: Graph, node: Node, axis: Axis, needs: _Needs, there: dict[Cut, Span]) -> NodeSpans:
    """What `node` is given and makes; notes the rows of its results in `there`."""
    assert isinstance(node.op, Aten)
    wanted = needs.units_of[node.id]
    if isinstance(axis, WindowAxis):
        spans = _take_window(node, node.op, axis, needs, there, wanted)
    else:
        spans = _take_rows(graph, node, node.op, axis, there, wanted)
    for value, dim in zip(node.outputs, axis.outputs, strict=True):
        if dim is not None:
            there[value, dim] = rows_of(graph, value, dim, spans.made, axis.extent)
    return spans


def _take_window(
    node: Node, op: Aten, axis: WindowAxis, needs: _Needs, there: Mapping[Cut, Span], wanted: Span
) -> NodeSpans:
    given: list[Given | None] = []
    made = wanted
    for value, dim, window in zip(node.inputs, axis.inputs, axis.windows, strict=True):
        if dim is None:
            given.append(None)
            continue
        rows = there[value, dim]
        if window is None:
            given.append(Given(dim, rows, wanted))
            continue
        need = window.need(wanted)
        kept = need if _length(rows) > _SPARE * _length(need) else rows
        taken: Taken = window.take(wanted, kept)
        op, made = with_arguments(op, taken.arguments), taken.made
        given.append(Given(dim, rows, taken.used, taken.zeros))
    return NodeSpans(op, tuple(given), made)


def _take_rows(
    graph: Graph, node: Node, op: Aten, axis: Axis, there: Mapping[Cut, Span], wanted: Span
) -> NodeSpans:
    """Rows without a halo: as many units as all inputs have, unless that is far more than needed."""
    cuts = [(v, d) for v, d in zip(node.inputs, axis.inputs, strict=True) if d is not None]
    made = wanted
    summed = Merge.ADD in axis.merges
    if cuts and not summed and op.overload not in _COPIES:
        common = _common(
            [_inner_units(graph, value, dim, there[value, dim], axis.extent) for value, dim in cuts]
        )
        made = common if _length(common) <= _SPARE * _length(wanted) else wanted
    given = tuple(
        None if dim is None else Given(dim, there[value, dim], rows_of(graph, value, dim, made, axis.extent))
        for value, dim in zip(node.inputs, axis.inputs, strict=True)
    )
    return NodeSpans(at_part(op, axis, _length(made), axis.extent), given, made)


_COPIES = ("aten.cat.default", "aten.clone.default")
"""Operators that copy anyway: a view costs them nothing, and what is not needed is dropped there."""


def _inner_units(graph: Graph, value: int, dim: int, rows: Span, extent: int) -> Span:
    """The units that lie within `rows`."""
    unit = graph.values[value].meta.shape[dim] // extent
    return -(-rows[0] // unit), rows[1] // unit


def _length(span: Span) -> int:
    return span[1] - span[0]
