"""From a graph with regions to the arrays that decisions are judged on, and back.

Problem.  The search judges `lowtide.search.residence` programs; a file holds nested graphs.

Method.  Depth first: a region is an enter, its body's steps and an exit.  `rebuild` replays the events of an
outcome: clones, stores and loads become nodes with fresh ids, and late readers read them.

Invariants.  The peak and the latency of an outcome are those of the accounting on the rebuilt graph (tests).
What nobody reads lives to the end of its graph.  Seconds here are the format's milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lowtide.search.residence import ENTER, EXIT, LOAD, OP, RUN, STORE, Ints, Outcome, Program, program_of

from .model import SCALAR_TIME, Graph, Node
from .prices import node_bytes, node_time, op_time

__all__ = ["Flat", "flatten", "rebuild"]

Path = tuple[int, ...]
Place = tuple[Path, int]
"""Ids of the regions around it, and a node's id."""
_FIXED = frozenset({"placeholder", "fission", "fission_out"})


@dataclass(frozen=True)
class Flat:
    """A program with its names.

    steps[s] and values[v] say which node; `early` holds the values for which there is a choice, and
    `default` their decisions to start with: what only early nodes read is computed again if a clone needs it.
    """

    graph: Graph
    program: Program
    steps: tuple[Place | None, ...]
    values: tuple[Place, ...]
    can_remat: Ints
    can_swap: Ints
    read_late: Ints
    default: Ints


@dataclass
class _Rows:
    hw: Mapping[str, Any]
    late: Collection[int]
    types: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    pinned: list[bool] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    steps: list[Place | None] = field(default_factory=list)
    values: list[Place] = field(default_factory=list)
    number: dict[Place, int] = field(default_factory=dict)

    def step(
        self, place: Place | None, kind: int, reads: list[int], made: int, *, late: bool, pinned: bool = False
    ) -> None:
        self.steps.append(place)
        self.types.append(kind)
        self.reads.append(reads)
        self.makes.append(made)
        self.behind.append(late)
        self.pinned.append(pinned)
        self.parts.append(1)
        self.seconds.append(0.0)

    def value(self, place: Place, nbytes: int, transfer: float) -> int:
        self.number[place] = len(self.values)
        self.values.append(place)
        self.nbytes.append(nbytes)
        self.transfer.append(transfer)
        return self.number[place]

    def level(self, graph: Graph, path: Path) -> list[int]:
        """Append the steps of one graph; the values that nobody reads there."""
        for node in graph.nodes:
            reads = [self.number[path, value] for value in dict.fromkeys(node.inputs)]
            nbytes = node_bytes(graph, node, self.hw["dsize"])
            if node.split is not None:
                self.region(node, node.split.body, reads, nbytes, path)
                continue
            movable = node.op not in _FIXED | {"layer_norm"} or node.op == "fission_out"
            copy = op_time("load", [], node.shape, {}, self.hw) if movable and node.shape else 0.0
            made = self.value((path, node.id), nbytes, copy)
            unread = not graph.readers[node.id]
            pinned = node.kind in ("weight", "input", "inplace") or unread
            self.step((path, node.id), OP, reads, made, late=node.id in self.late, pinned=pinned)
            self.seconds[-1] = SCALAR_TIME if node.op in _FIXED else node_time(graph, node, self.hw)
        return [self.number[path, node.id] for node in graph.nodes if not graph.readers[node.id]]

    def region(self, node: Node, body: Graph, reads: list[int], nbytes: int, path: Path) -> None:
        inner = [each for each in body.nodes if each.op != "placeholder"]
        late = all(each.id in self.late for each in inner)
        made = self.value((path, node.id), nbytes, 0.0)
        self.step((path, node.id), ENTER, reads, made, late=late)
        unread = self.level(body, (*path, node.id))
        self.step((path, node.id), EXIT, [*reads, *unread], -1, late=late)
        assert node.split is not None
        self.parts[-1] = node.split.parts


def flatten(graph: Graph, late: Collection[int], hw: Mapping[str, Any]) -> Flat:
    """The program of `graph`, whose nodes in `late` read copies where there are any."""
    rows = _Rows(hw, late)
    rows.step(None, OP, rows.level(graph, ()), -1, late=True, pinned=True)
    program = program_of(
        rows.types, rows.makes, rows.behind, rows.pinned, rows.parts, rows.reads, rows.seconds, rows.nbytes,
        rows.transfer,
    )  # fmt: skip
    choice = _choices(rows)
    return Flat(graph, program, tuple(rows.steps), tuple(rows.values), *choice)


def _choices(rows: _Rows) -> tuple[Ints, Ints, Ints, Ints]:
    """What may be computed again, what may be swapped, what late nodes read; the decisions to start with."""
    total = len(rows.values)
    early_made, fixed, late_read = (
        np.zeros(total, np.int64),
        np.zeros(total, np.int64),
        np.zeros(total, np.int64),
    )
    for s, made in enumerate(rows.makes):
        if made >= 0:
            early_made[made] = not rows.behind[s]
            fixed[made] = rows.types[s] != OP or rows.pinned[s] or rows.transfer[made] == 0.0
        if rows.behind[s] and rows.types[s] != EXIT and rows.steps[s] is not None:
            late_read[rows.reads[s]] = 1
    tuples = np.array([kind == OP and not p for kind, p in zip(rows.types, rows.pinned, strict=True)])
    remat = early_made.copy()
    for s, made in enumerate(rows.makes):
        if made >= 0:
            place = rows.steps[s]
            remat[made] &= (
                bool(tuples[s]) and place is not None and rows.seconds[s] >= 0 and bool(rows.reads[s])
            )
    return remat, early_made & (1 - fixed) & late_read, late_read, remat * (1 - late_read)


@dataclass
class _Level:
    graph: Graph
    nodes: list[Node] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    late: bool = False


@dataclass
class _Rebuilder:
    flat: Flat
    late: Collection[int]
    fresh: int
    levels: list[_Level]

    def new_id(self) -> int:
        self.fresh += 1
        return self.fresh - 1

    def run(self, place: Place, clone: bool) -> None:
        level = self.levels[-1]
        node = level.graph.node[place[1]]
        copies = level.copies if clone or node.id in self.late else {}
        made = replace(node, inputs=tuple(copies.get(value, value) for value in node.inputs))
        if clone:
            made = replace(made, id=self.new_id(), again=True)
            level.copies[node.id] = made.id
        level.nodes.append(made)

    def enter(self, place: Place) -> None:
        node = self.levels[-1].graph.node[place[1]]
        assert node.split is not None
        self.levels.append(_Level(node.split.body))

    def leave(self, place: Place, late: bool) -> None:
        body = self.levels.pop()
        level = self.levels[-1]
        node = level.graph.node[place[1]]
        assert node.split is not None
        copies = level.copies if late else {}
        inner = Graph(tuple(body.nodes), body.graph.inputs, body.graph.outputs)
        inputs = tuple(copies.get(value, value) for value in node.inputs)
        level.nodes.append(replace(node, inputs=inputs, split=replace(node.split, body=inner)))

    def transfer(self, place: Place, kind: int) -> None:
        level = self.levels[-1]
        node = level.graph.node[place[1]]
        links = (tuple((dim, dim) for dim in range(len(node.shape))),)
        name, source = ("store", node.id) if kind == STORE else ("load", level.stores[node.id])
        made = Node(self.new_id(), name, name, (source,), node.shape, {}, links)
        (level.stores if kind == STORE else level.copies)[node.id] = made.id
        level.nodes.append(made)


def rebuild(flat: Flat, outcome: Outcome, late: Collection[int]) -> Graph:
    """The graph that does what `outcome` says."""
    rebuilder = _Rebuilder(flat, late, flat.graph.next_id, [_Level(flat.graph)])
    types = flat.program.step[0]
    for kind, number in outcome.events.T.tolist():
        if kind in (STORE, LOAD):
            rebuilder.transfer(flat.values[number], kind)
            continue
        place = flat.steps[number]
        if place is None:
            continue
        if types[number] == ENTER:
            rebuilder.enter(place)
        elif types[number] == EXIT:
            rebuilder.leave(place, bool(flat.program.step[2, number]))
        else:
            rebuilder.run(place, kind != RUN)
    return Graph(tuple(rebuilder.levels[0].nodes))
