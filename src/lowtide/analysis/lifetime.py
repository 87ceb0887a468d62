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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowtide.analysis.facts import Facts, fresh_outputs
from lowtide.analysis.inplace import INPLACE, donors, private_storages
from lowtide.ir.graph import Graph, Role

__all__ = ["INPLACE", "Buffer", "Kind", "lifetimes"]

Kind = Literal["value", "workspace", "output"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are taken in the half-open steps ``[start, stop)`` of an order.

    `storages` share them one after the other (in-place reuse); a workspace has none.  `kind` is
    "output" for bytes that are handed to the caller: they are not in the arena.
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


@dataclass(frozen=True, slots=True)
class _Index:
    """What the lifetimes of a graph share in every order, by node id."""

    fresh: dict[int, tuple[_Fresh, ...]]
    donors: dict[int, tuple[int, ...]]


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
    index = _index(graph)
    drafts: list[_Draft] = []
    draft_of: dict[int, _Draft] = {}
    for k, node in enumerate(order):
        made = 0
        for fresh in index.fresh.get(node, ()):
            nbytes = _true_bytes(fresh, node, facts)
            made += nbytes
            stop = len(order) if fresh.is_output else max([step[user] for user in fresh.users]) + 1
            donor = _dying(index, node, k, nbytes, draft_of) if inplace else None
            if donor is None:
                donor = _Draft((), nbytes, k, stop, "output" if fresh.is_output else "value")
                drafts.append(donor)
            donor.storages = (*donor.storages, fresh.storage)
            donor.stop = stop
            draft_of[fresh.storage] = donor
        fact = facts.get(node)
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


def _dying(index: _Index, node: int, k: int, nbytes: int, draft_of: dict[int, _Draft]) -> _Draft | None:
    """The first Buffer of equal size that an input of `node` leaves behind at step k."""
    for storage in index.donors.get(node, ()):
        draft = draft_of.get(storage)
        if draft is not None and draft.stop == k + 1 and draft.nbytes == nbytes:
            return draft
    return None


def _index(graph: Graph) -> _Index:
    found = graph.memo.get(_Index)
    if not isinstance(found, _Index):
        found = graph.memo[_Index] = _build_index(graph)
    return found


def _build_index(graph: Graph) -> _Index:
    users: dict[int, dict[int, None]] = {storage: {} for storage in graph.storages}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            users[graph.values[value].storage][node.id] = None
    handed_out = {graph.values[value].storage for value in graph.outputs}
    private = private_storages(graph)
    fresh: dict[int, tuple[_Fresh, ...]] = {}
    takes: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        made = []
        for storage, positions in fresh_outputs(graph, node).items():
            is_output = storage in handed_out or graph.storages[storage].role is Role.OUTPUT
            made.append(_Fresh(storage, positions, tuple(users[storage]), is_output))
        if made:
            fresh[node.id] = tuple(made)
        if found := donors(graph, node, private):
            takes[node.id] = found
    return _Index(fresh, takes)
