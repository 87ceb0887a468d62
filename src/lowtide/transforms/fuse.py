"""Fusion: a group of nodes becomes one node that runs as a kernel.

rewrite:    the nodes of a group, and copies of the views between them, become the body of one
            ``Fused(body, "kernel")`` node; a view of a result that something outside reads stays outside.
legal when: no member is a view, draws random numbers, writes, or is itself a region (Fission, Fused);
            all groups contracted together leave no cycle (data edges and hazards on storages).
effect:     results that only members read are never stored: their bytes leave the timeline; inputs of
            the group live until the whole group ran; one call instead of many.

Not done here: choosing groups (`lowtide.fusion.planner`) and whether a kernel exists for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.analysis.region import before
from lowtide.errors import LowtideError
from lowtide.ir import Aten, Edit, Fused, Graph, Node, Origin
from lowtide.ir.extract import base_of, extract
from lowtide.ir.random import is_random

__all__ = ["FuseCandidate", "IllegalFusion", "apply", "check_members"]


class IllegalFusion(LowtideError):
    """A group that must not become one node."""


@dataclass(frozen=True)
class FuseCandidate:
    """Groups of node ids; each becomes one node."""

    groups: tuple[frozenset[int], ...]


def check_members(graph: Graph, members: Sequence[int]) -> str | None:
    """Why a node of `members` cannot be in a group; None if all can."""
    for number in members:
        node = graph.node[number]
        if not isinstance(node.op, Aten):
            return f"node {number} is {type(node.op).__name__}"
        if node.writes or not node.outputs:
            return f"node {number} ({node.op.overload}) writes in place"
        if graph.is_view(node):
            return f"node {number} ({node.op.overload}) is a view"
        if is_random(node.op):
            return f"node {number} ({node.op.overload}) draws random numbers"
    return None


def apply(graph: Graph, candidate: FuseCandidate) -> Edit:
    """Contract the groups; raises IllegalFusion if one is not legal or they form a cycle."""
    leader: dict[int, int] = {}
    made: dict[int, Node] = {}
    fresh = max((node.id for node in graph.nodes), default=-1) + 1
    for number, group in enumerate(candidate.groups):
        reason = check_members(graph, sorted(group))
        if reason is not None:
            raise IllegalFusion(f"a group of {len(group)} nodes is not fused: {reason}")
        made[fresh + number] = _fused(graph, fresh + number, group)
        for member in group:
            if member in leader:
                raise IllegalFusion(f"node {member} is in two groups")
            leader[member] = fresh + number
    nodes = _sorted(graph, leader, made)
    return _edit(graph, _without_dead_views(graph, nodes), made)


def _fused(graph: Graph, number: int, group: frozenset[int]) -> Node:
    parts = extract(graph, group)
    last = max((node for node in graph.nodes if node.id in group), key=lambda node: len(node.origin.module))
    phases = [node.origin.phase for node in graph.nodes if node.id in group]
    origin = Origin(last.origin.module, last.origin.source, phases[-1])
    return Node(number, Fused(parts.body, "kernel"), parts.inputs, parts.outputs, (), origin)


def _sorted(graph: Graph, leader: Mapping[int, int], made: Mapping[int, Node]) -> list[Node]:
    """Program order with groups contracted, as near to the old one as the groups allow."""
    position = {node.id: place for place, node in enumerate(graph.nodes)}
    place = {leader.get(number, number): at for number, at in position.items()}  # a group: its last member
    waits: dict[int, set[int]] = {name: set() for name in place}
    inner = _inner_views(graph, leader)
    for number, earlier in before(graph).items():
        own = leader.get(number, number)
        waits[own].update(leader.get(each, each) for each in earlier if (own, each) not in inner)
        waits[own].discard(own)
    for name, node in made.items():  # a view that became an input must be made before
        waits[name].update(_producers(graph, node, leader) - {name})
    return _kahn(graph, place, waits, made)


def _inner_views(graph: Graph, leader: Mapping[int, int]) -> set[tuple[int, int]]:
    """(group, view node) for views between members: the group makes its own copy, and waits for none."""
    found: set[tuple[int, int]] = set()
    for member, name in leader.items():
        for value in graph.node[member].inputs:
            base, views = base_of(graph, value)
            if leader.get(graph.producer.get(base, -1)) == name:
                found.update((name, view) for view in views)
    return found


def _producers(graph: Graph, node: Node, leader: Mapping[int, int]) -> set[int]:
    found = (graph.producer.get(value) for value in node.inputs)
    return {leader.get(each, each) for each in found if each is not None}


def _kahn(
    graph: Graph, place: Mapping[int, int], waits: Mapping[int, set[int]], made: Mapping[int, Node]
) -> list[Node]:
    after: dict[int, list[int]] = {}
    for name, earlier in waits.items():
        for each in earlier:
            after.setdefault(each, []).append(name)
    left = {name: len(earlier) for name, earlier in waits.items()}
    ready = [(place[name], name) for name, count in left.items() if count == 0]
    heapq.heapify(ready)
    result: list[Node] = []
    while ready:
        _, name = heapq.heappop(ready)
        result.append(made[name] if name in made else graph.node[name])
        for each in after.get(name, ()):
            left[each] -= 1
            if left[each] == 0:
                heapq.heappush(ready, (place[each], each))
    if len(result) != len(place):
        raise IllegalFusion("the groups, contracted, would have to run before each other")
    return result


def _without_dead_views(graph: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.id in graph.node and graph.is_view(node) and not live.intersection(node.outputs):
            continue
        kept.append(node)
        live.update(node.inputs)
    return tuple(reversed(kept))


def _edit(graph: Graph, nodes: tuple[Node, ...], made: Mapping[int, Node]) -> Edit:
    alive = set(graph.inputs).union(*(node.outputs for node in nodes))
    values = {number: value for number, value in graph.values.items() if number in alive}
    used = {value.storage for value in values.values()}
    storages = {number: storage for number, storage in graph.storages.items() if number in used}
    forward: dict[int, int | None] = {number: None for number in graph.values if number not in alive}
    return Edit(Graph(nodes, values, storages, graph.inputs, graph.outputs), forward)
