"""When each byte is taken and given back, for one order of the nodes.

Problem.  The search asks for the lifetimes of thousands of orders and edited graphs; the answer has
to be the one that the executors live by, to the byte.

Method.  A storage lives from its producer's step to the step after the last node that touches it
through any of its views; results of the graph live to the end; workspace lives for its node's step
alone.  What does not depend on the order (who makes and who touches a storage, which inputs an
output may take over) is indexed once per graph.

    step    0     1     2     3
    %1     [===========)                    relu(%0), read at step 1
    %2           [===========)              gelu(%1); with inplace=True it joins %1's Buffer
    work         [=====)                    workspace of step 1

Invariants.  Intervals are half-open.  At step k the outputs of k and the inputs of k are both alive.
Storages of the caller (resident ones, and all inputs of a body) have no Buffer; nor do HOST numbers
or copies on another tier.

Not done.  Offsets (`lowtide.place`), tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from lowtide.analysis.facts import Facts, fresh_outputs
from lowtide.analysis.inplace import INPLACE, donors, kernel_donors
from lowtide.ir.graph import Graph, Role

__all__ = ["INPLACE", "Buffer", "Kind", "lifetimes"]

Kind = Literal["value", "workspace", "output"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are taken in the half-open steps ``[start, stop)`` of an order.

    `storages` share them one after the other (in-place reuse); a workspace has none.  `kind` is
    "output" for bytes that are handed to the caller in the end: they are not in the arena.
    """

    id: int
    storages: tuple[int, ...]
    nbytes: int
    start: int
    stop: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A storage as its producer makes it: `positions` of the outputs on it, `users` touch it."""

    storage: int
    positions: tuple[int, ...]
    users: tuple[int, ...]
    is_output: bool


class _Draft:
    """A Buffer that may still be taken over."""

    __slots__ = ("kind", "nbytes", "start", "stop", "storages")

    def __init__(self, storages: tuple[int, ...], nbytes: int, start: int, stop: int, kind: Kind) -> None:
        self.storages = storages
        self.nbytes = nbytes
        self.start = start
        self.stop = stop
        self.kind: Kind = kind


def lifetimes(graph: Graph, order: Sequence[int], facts: Facts, inplace: bool = False) -> tuple[Buffer, ...]:
    """The Buffers of `graph` when its nodes run in `order` (ids of all nodes, views included).

    Buffers come in order of `start`, with ids 0, 1, ...  With `inplace`, the output of an operator
    in `INPLACE` takes over the Buffer of an input that dies there.  The order is not judged here
    (`lowtide.schedule` does).

    Raises ValueError if `order` does not name every node once, KeyError if `facts` lacks a node
    that allocates.
    """
    step = {node: k for k, node in enumerate(order)}
    if len(order) != len(graph.nodes) or step.keys() != graph.node.keys():
        raise ValueError(f"the order names {len(order)} nodes, the graph has {len(graph)}: name each once")
    fresh_of = _fresh_of(graph)
    donors_of = _donors_of(graph) if inplace else {}
    drafts: list[_Draft] = []
    draft_of: dict[int, _Draft] = {}
    for k, node in enumerate(order):
        made = 0
        fact = facts.get(node)
        pairs = fact.inplace if fact is not None and inplace else ()
        own = kernel_donors(graph, graph.node[node], pairs) if pairs else {}
        for fresh in fresh_of.get(node, ()):
            nbytes = _true_bytes(fresh, node, facts)
            made += nbytes
            stop = len(order) if fresh.is_output else max([step[user] for user in fresh.users]) + 1
            takes = own.get(fresh.storage, ()) if pairs else donors_of.get(node, ())
            donor = _dying(takes, k, nbytes, draft_of)
            if donor is None:
                donor = _Draft((), nbytes, k, stop, "output" if fresh.is_output else "value")
                drafts.append(donor)
            if fresh.is_output:
                donor.kind = "output"
            donor.storages = (*donor.storages, fresh.storage)
            donor.stop = stop
            draft_of[fresh.storage] = donor
        if fact is not None and fact.transient_bytes > made:
            drafts.append(_Draft((), fact.transient_bytes - made, k, k + 1, "workspace"))
    return tuple(
        Buffer(number, draft.storages, draft.nbytes, draft.start, draft.stop, draft.kind)
        for number, draft in enumerate(drafts)
    )


def _true_bytes(fresh: _Fresh, node: int, facts: Facts) -> int:
    fact = facts.get(node)
    if fact is None:
        raise KeyError(f"no facts for node {node}, which allocates storage {fresh.storage}: probe it first")
    sizes = fact.output_bytes
    return max([sizes[position] for position in fresh.positions])


def _dying(takes: Iterable[int], k: int, nbytes: int, draft_of: Mapping[int, _Draft]) -> _Draft | None:
    """The first Buffer of equal size among the storages `takes` that dies at step k."""
    for storage in takes:
        draft = draft_of.get(storage)
        if draft is not None and draft.stop == k + 1 and draft.nbytes == nbytes:
            return draft
    return None


def _fresh_of(graph: Graph) -> dict[int, tuple[_Fresh, ...]]:
    """Node id -> the storages it makes; indexed once per graph."""
    found = graph.memo.get(_fresh_of)
    if found is None:
        found = graph.memo[_fresh_of] = _index_fresh(graph)
    return cast("dict[int, tuple[_Fresh, ...]]", found)


def _donors_of(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Node id -> the storages its output may take over; indexed once per graph."""
    found = graph.memo.get(_donors_of)
    if found is None:
        found = graph.memo[_donors_of] = donors(graph)
    return cast("dict[int, tuple[int, ...]]", found)


def _index_fresh(graph: Graph) -> dict[int, tuple[_Fresh, ...]]:
    values = graph.values
    users: dict[int, dict[int, None]] = {storage: {} for storage in graph.storages}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            users[values[value].storage][node.id] = None
    handed_out = {values[value].storage for value in graph.outputs}
    found = {}
    for node in graph.nodes:
        if made := fresh_outputs(graph, node):
            found[node.id] = tuple(
                _Fresh(
                    storage,
                    positions,
                    tuple(users[storage]),
                    storage in handed_out or graph.storages[storage].role is Role.OUTPUT,
                )
                for storage, positions in made.items()
            )
    return found
