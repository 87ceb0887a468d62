"""Orders of a graph's nodes, and the problem of finding one with the least peak.

Problem.  Among all orders that respect the graph's dependencies, find one whose largest live bytes
are least.  The caller's storages cost nothing here, but writes to them order their readers; random
nodes draw from one generator, so they keep their program order.

Method.  `order_problem` contracts views: they cost nothing, so a problem has only tasks (nodes that
do work), and `OrderProblem.schedule` puts every view back directly before the first node that needs
it.  A storage lives until its last reader through any view.

Invariants.  Every order of the tasks that respects `tables.before` expands to a valid order of the
graph (`lowtide.schedule.judge`), and its peak is the maximum of `usage_curve`.

Not done.  Offsets (`lowtide.place`), time, copies that overlap with work.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lowtide.analysis.facts import Facts, fresh_outputs
from lowtide.analysis.inplace import donors
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.random import is_random
from lowtide.schedule.tables import (
    DONOR,
    NBYTES,
    WORKSPACE,
    Ints,
    Tables,
    as_order,
    peak_bytes,
    tables_of,
)

__all__ = ["OrderProblem", "Schedule", "order_problem"]


@dataclass(frozen=True)
class Schedule:
    """An order of all nodes of a graph, by id; `name` says which scheduler found it."""

    order: tuple[int, ...]
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class _Views:
    """Where views go in an order of tasks.

    `of[i]` are the views that task i needs, in program order.  A *loose* view is needed by no task:
    `chain[v]` are the views before it and itself, `waits[v]` how many tasks must precede it, and
    `after[i]` the loose views that wait for task i.
    """

    of: tuple[tuple[int, ...], ...]
    chain: Mapping[int, tuple[int, ...]]
    waits: Mapping[int, int]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """Tasks and storages as arrays, with the way back to the graph.

    `node_ids` and `storage_ids` name task i and storage s in the graph.
    """

    tables: Tables
    node_ids: tuple[int, ...]
    storage_ids: tuple[int, ...]
    views: _Views

    def __len__(self) -> int:
        return len(self.node_ids)

    def peak_bytes(self, order: Sequence[int] | Ints) -> int:
        """Most live bytes above the resident ones when the tasks run in `order`."""
        return int(peak_bytes(self.tables, as_order(order)))

    def tasks(self, node_ids: Iterable[int]) -> Ints:
        """Task numbers of an order of nodes; views and nodes that are not in the graph drop out."""
        number = {node: task for task, node in enumerate(self.node_ids)}
        return as_order([number[node] for node in node_ids if node in number])

    def schedule(self, order: Sequence[int] | Ints, name: str = "") -> Schedule:
        """Task numbers to node ids, each view directly before the first node that needs it."""
        views = self.views
        waits = dict(views.waits)
        emitted: dict[int, None] = {}
        for view, count in views.waits.items():
            if count == 0:
                emitted.update(dict.fromkeys(views.chain[view]))
        for task in as_order(order).tolist():
            emitted.update(dict.fromkeys(views.of[task]))
            emitted[self.node_ids[task]] = None
            for view in views.after[task]:
                waits[view] -= 1
                if waits[view] == 0:
                    emitted.update(dict.fromkeys(views.chain[view]))
        return Schedule(tuple(emitted), name)


@dataclass(frozen=True)
class _Skeleton:
    """What does not depend on facts: a problem without sizes, and what each task makes.

    `fresh[i]` is the node of task i, and per storage that it makes the output positions on it.
    """

    problem: OrderProblem
    fresh: tuple[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], ...]
    donorless: Tables


def order_problem(graph: Graph, facts: Facts, inplace: bool = True) -> OrderProblem:
    """The problem of ordering `graph`; with `inplace`, outputs may take the room of dying inputs.

    Raises KeyError if `facts` lacks a node that allocates.
    """
    found = graph.memo.get(_Skeleton)
    if not isinstance(found, _Skeleton):
        found = graph.memo[_Skeleton] = _contract(graph)
    blank = found.problem.tables if inplace else found.donorless
    task, storage = blank.task.copy(), blank.storage.copy()
    for number, (node, made) in enumerate(found.fresh):
        fact = facts.get(node)
        if fact is None:
            if made:
                raise KeyError(f"no facts for node {node}, which allocates: probe it first")
            continue
        total = 0
        for index, where in made:
            nbytes = max([fact.output_bytes[position] for position in where])
            storage[NBYTES, index] = nbytes
            total += nbytes
        task[WORKSPACE, number] = max(0, fact.transient_bytes - total)
    return replace(found.problem, tables=blank._replace(task=task, storage=storage))


def _contract(graph: Graph) -> _Skeleton:
    """Tasks, storages and relations of `graph`, without sizes."""
    view_ids = {node.id for node in graph.nodes if graph.is_view(node)}
    nodes = [node for node in graph.nodes if node.id not in view_ids]
    number = {node.id: task for task, node in enumerate(nodes)}
    fresh = [fresh_outputs(graph, node) for node in nodes]
    storage_ids = tuple(storage for made in fresh for storage in made)
    local = {storage: index for index, storage in enumerate(storage_ids)}
    before, views_of = _precedence(graph, view_ids, number)
    for first, second in pairwise(number[node.id] for node in nodes if is_random(node.op)):
        if first not in before[second]:
            before[second].append(first)
    takes = donors(graph)
    handed_out = {graph.values[value].storage for value in graph.outputs}
    tables = tables_of(
        before=before,
        reads=[_reads(graph, node, made, local) for node, made in zip(nodes, fresh, strict=True)],
        makes=[[local[s] for s in made] for made in fresh],
        nbytes=[0] * len(storage_ids),
        kept=[s in handed_out or graph.storages[s].role is Role.OUTPUT for s in storage_ids],
        donors=[[local[s] for s in takes.get(node.id, ()) if s in local] for node in nodes],
    )
    donorless = tables.task.copy()
    donorless[DONOR] = 0
    views = _place_views(graph, view_ids, number, views_of)
    rows = (tuple((local[s], where) for s, where in made.items()) for made in fresh)
    return _Skeleton(
        problem=OrderProblem(tables, tuple(number), storage_ids, views),
        fresh=tuple(zip(number, rows, strict=True)),
        donorless=tables._replace(task=donorless),
    )


def _reads(graph: Graph, node: Node, made: Container[int], local: Mapping[int, int]) -> list[int]:
    """Local numbers of the storages that `node` touches and did not make."""
    touched = dict.fromkeys(graph.values[value].storage for value in (*node.inputs, *node.outputs))
    return [local[s] for s in touched if s in local and s not in made]


def _precedence(
    graph: Graph, view_ids: set[int], number: dict[int, int]
) -> tuple[list[list[int]], dict[int, list[int]]]:
    """Tasks before each task, and per node the views that it needs, both through chains of views."""
    before: list[list[int]] = []
    tasks_of: dict[int, dict[int, None]] = {}  # view -> tasks before it
    views_of: dict[int, list[int]] = {}
    for node in graph.nodes:
        tasks: dict[int, None] = {}
        needed: dict[int, None] = {}
        for earlier in graph.dependencies[node.id]:
            if earlier in view_ids:
                tasks.update(tasks_of[earlier])
                needed.update(dict.fromkeys(views_of[earlier]))
                needed[earlier] = None
            else:
                tasks[number[earlier]] = None
        views_of[node.id] = list(needed)
        if node.id in view_ids:
            tasks_of[node.id] = tasks
        else:
            before.append(list(tasks))
    return before, views_of


def _place_views(
    graph: Graph, view_ids: set[int], number: dict[int, int], views_of: dict[int, list[int]]
) -> _Views:
    """Which views each task needs, and what the others wait for."""
    needed = {view for node in number for view in views_of[node]}
    after: list[list[int]] = [[] for _ in number]
    chain: dict[int, tuple[int, ...]] = {}
    waits: dict[int, int] = {}
    for node in graph.nodes:
        if node.id not in view_ids or node.id in needed:
            continue
        chain[node.id] = (*views_of[node.id], node.id)
        tasks = {
            number[earlier]
            for view in chain[node.id]
            for earlier in graph.dependencies[view]
            if earlier in number
        }
        waits[node.id] = len(tasks)
        for task in tasks:
            after[task].append(node.id)
    return _Views(
        tuple(tuple(views_of[node]) for node in number), chain, waits, tuple(tuple(row) for row in after)
    )
