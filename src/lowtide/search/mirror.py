"""An array mirror of a graph, for judging thousands of recomputation sets per second.

Problem.  The search asks for peak and latency of one graph under many sets R of recomputed storages.
Building a Graph for each would cost milliseconds.

Method.  Views are contracted: a node reads and makes *storages*.  Storage s has two instances, the
original (s) and the copy (S + s).  `evaluate` replays what `transforms.remat.apply` would emit, drops
what nobody reads any more, and sweeps the live bytes once, in-place reuse included.  It must agree to
the byte with `analysis.timeline` on the built graph; tests compare the two on every workload.

Not done here: choosing R (`recompute.py`), placement, fission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt

from lowtide.analysis.facts import Facts, fresh_bytes, workspace_bytes
from lowtide.analysis.inplace import donors
from lowtide.ir import Graph, Node
from lowtide.ir.random import is_random
from lowtide.transforms.remat import clone_reads

__all__ = ["ILLEGAL", "Evaluation", "Mirror", "build_mirror"]

ILLEGAL = 2**62
"""The peak of a set that no program can have."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Evaluation:
    """What one recomputation set gives.

    `live_bytes[k]` is what is live above the resident bytes at step k of `steps` (mirror node numbers;
    `is_copy[k]` marks clones).  `last_early[s]` and `first_late[s]` are the steps between which storage
    s is alive only for its late readers (first_late = -1: it has none).
    """

    peak_bytes: int
    latency_s: float
    live_bytes: Ints
    steps: Ints
    is_copy: Bools
    last_early: Ints
    first_late: Ints


@dataclass(frozen=True)
class Mirror:
    """The arrays; node and storage numbers are positions in `node_ids` and `storage_ids`."""

    node_ids: tuple[int, ...]
    storage_ids: tuple[int, ...]
    nbytes: Ints
    owner: Ints  # storage -> node, -1 for none
    read_start: Ints
    reads: Ints
    made_start: Ints
    made: Ints
    reuse_start: Ints  # node -> storages whose buffer its one output may take over
    reuse_in: Ints
    workspace: Ints
    cost: Floats
    late: Bools
    pinned: Bools  # runs even if nobody reads its outputs
    old_start: Ints  # node -> resident storages that its clone reads and some node overwrites
    old: Ints
    write_start: Ints  # node -> resident storages that it overwrites, same numbering as `old`
    writes: Ints
    kept: Bools  # storage is a graph output

    def evaluate(
        self, chosen: Bools, workspace: Ints | None = None, cost: Floats | None = None
    ) -> Evaluation:
        """Peak and latency when the storages in `chosen` are recomputed for the late nodes.

        `workspace` and `cost` replace the mirror's own: what a split node needs depends on how it is split.
        A set whose clones would read a weight after its update has the peak `ILLEGAL`.
        """
        workspace = self.workspace if workspace is None else workspace
        cost = self.cost if cost is None else cost
        peak, latency, live, steps, copy, last, first = _evaluate(
            chosen, self.nbytes, self.owner, self.read_start, self.reads, self.made_start, self.made,
            self.reuse_start, self.reuse_in, workspace, cost, self.late, self.pinned, self.kept,
            self.old_start, self.old, self.write_start, self.writes,
        )  # fmt: skip
        return Evaluation(int(peak), float(latency), live, steps, copy, last, first)

    def reads_of(self, node: int) -> Ints:
        """Storages that a node reads, in input order."""
        return self.reads[self.read_start[node] : self.read_start[node + 1]]


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    start = np.zeros(len(rows) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in rows])
    return start, np.array([item for row in rows for item in row], np.int64)


def build_mirror(
    graph: Graph,
    order: Sequence[int],
    facts: Facts,
    costs: Mapping[int, float],
    late: frozenset[int],
    delivered: frozenset[int] | None = None,
) -> Mirror:
    """Mirror `graph` in `order`; `costs` are seconds by node id, `late` as in `transforms.remat`.

    `delivered`, for the body of a Fission as it runs: the storages of its results.  Those that are outputs of
    `graph` take no memory here; the others are copied once made, whether or not anybody reads them.
    """
    nodes = [graph.node[i] for i in order if not graph.is_view(graph.node[i])]
    storages = [s.id for s in graph.storages.values() if not s.role.resident and s.nbytes >= 0]
    number = {storage: index for index, storage in enumerate(storages)}
    made = [_fresh(graph, node, number) for node in nodes]
    owner = np.full(len(storages), -1, np.int64)
    for index, row in enumerate(made):
        owner[row] = index
    reads = [[number[s] for s in _storages(graph, node) if s in number] for node in nodes]
    takes = donors(graph)
    reuse = [[number[s] for s in takes.get(node.id, ())] for node in nodes]
    read_start, read_flat = _ragged(reads)
    made_start, made_flat = _ragged(made)
    reuse_start, reuse_in = _ragged(reuse)
    kept = {graph.values[value].storage for value in graph.outputs}
    sizes = _sizes(graph, facts, storages)
    if delivered is not None:
        sizes[[number[storage] for storage in kept if storage in number]] = 0
    old_start, old, write_start, writes = _hazards(graph, nodes)
    return Mirror(
        node_ids=tuple(node.id for node in nodes),
        storage_ids=tuple(storages),
        nbytes=sizes,
        owner=owner,
        read_start=read_start,
        reads=read_flat,
        made_start=made_start,
        made=made_flat,
        reuse_in=reuse_in,
        reuse_start=reuse_start,
        workspace=np.array([workspace_bytes(graph, node, facts) for node in nodes], np.int64),
        cost=np.array([costs.get(node.id, 0.0) for node in nodes], np.float64),
        late=np.array([node.id in late for node in nodes], np.bool_),
        pinned=np.array([_is_pinned(graph, node, delivered or frozenset()) for node in nodes], np.bool_),
        old_start=old_start,
        old=old,
        write_start=write_start,
        writes=writes,
        kept=np.array([storage in kept for storage in storages], np.bool_),
    )


def _hazards(graph: Graph, nodes: Sequence[Node]) -> tuple[Ints, Ints, Ints, Ints]:
    """Reads of clones and writes, on the storages that some node overwrites."""
    written = dict.fromkeys(graph.values[value].storage for node in nodes for value in node.writes)
    number = {storage: index for index, storage in enumerate(written)}
    reads = [[number[s] for s in sorted(clone_reads(graph, node)) if s in number] for node in nodes]
    writes = [[number[graph.values[value].storage] for value in node.writes] for node in nodes]
    return *_ragged(reads), *_ragged(writes)


def _is_pinned(graph: Graph, node: Node, delivered: frozenset[int]) -> bool:
    handed_out = any(graph.values[out].storage in delivered for out in node.outputs)
    return handed_out or bool(node.writes) or is_random(node.op) or not node.outputs


def _storages(graph: Graph, node: Node) -> list[int]:
    return [graph.values[value].storage for value in node.inputs]


def _fresh(graph: Graph, node: Node, number: Mapping[int, int]) -> list[int]:
    read = set(_storages(graph, node))
    made = dict.fromkeys(graph.values[out].storage for out in node.outputs)
    return [number[storage] for storage in made if storage not in read and storage in number]


def _sizes(graph: Graph, facts: Facts, storages: Sequence[int]) -> Ints:
    size = {storage: graph.storages[storage].nbytes for storage in storages}
    for node in graph.nodes:
        size.update({s: n for s, n in fresh_bytes(graph, node, facts).items() if s in size})
    return np.array([size[storage] for storage in storages], np.int64)


@numba.njit(cache=True)  # type: ignore[misc, unused-ignore]
def _emit(chosen, owner, read_start, reads, made_start, made, late, old_start, old, write_start, writes):  # type: ignore[no-untyped-def]
    """The program with clones before their first late reader, as `remat.apply` emits it."""
    count = late.size
    steps = np.empty(2 * count, np.int64)
    copy = np.zeros(2 * count, np.bool_)
    have = np.zeros(owner.size, np.bool_)
    stack = np.empty(reads.size + owner.size + 1, np.int64)
    gone = np.zeros(writes.size + 1, np.bool_)
    legal = True
    length = 0
    for node in range(count):
        for w in range(write_start[node], write_start[node + 1]):
            gone[writes[w]] = True
        if late[node]:
            for r in range(read_start[node], read_start[node + 1]):
                top = 0
                if chosen[reads[r]] and not have[reads[r]]:
                    stack[0] = reads[r]
                    top = 1
                while top > 0:
                    storage = stack[top - 1]
                    if have[storage]:
                        top -= 1
                        continue
                    maker = owner[storage]
                    before = top
                    for q in range(read_start[maker], read_start[maker + 1]):
                        if chosen[reads[q]] and not have[reads[q]]:
                            stack[top] = reads[q]
                            top += 1
                    if top > before:
                        continue
                    for h in range(old_start[maker], old_start[maker + 1]):
                        legal = legal and not gone[old[h]]
                    steps[length] = maker
                    copy[length] = True
                    length += 1
                    for m in range(made_start[maker], made_start[maker + 1]):
                        if chosen[made[m]]:
                            have[made[m]] = True
                    top -= 1
        steps[length] = node
        length += 1
    return steps[:length], copy[:length], legal


@numba.njit(cache=True)  # type: ignore[misc, unused-ignore]
def _drop_dead(steps, copy, chosen, read_start, reads, made_start, made, late, pinned, kept):  # type: ignore[no-untyped-def]
    """Which steps still run: pinned ones, and those with a live output."""
    total = kept.size
    live = np.zeros(2 * total, np.bool_)
    live[:total] = kept
    runs = np.zeros(steps.size, np.bool_)
    for k in range(steps.size - 1, -1, -1):
        node = steps[k]
        shift = total if copy[k] else 0
        needed = pinned[node] and not copy[k]
        for m in range(made_start[node], made_start[node + 1]):
            needed = needed or live[made[m] + shift]
        if not needed:
            continue
        runs[k] = True
        for r in range(read_start[node], read_start[node + 1]):
            storage = reads[r]
            from_copy = chosen[storage] and (copy[k] or late[node])
            live[storage + (total if from_copy else 0)] = True
    return runs


@numba.njit(cache=True)  # type: ignore[misc, unused-ignore]
def _evaluate(  # type: ignore[no-untyped-def]
    chosen, nbytes, owner, read_start, reads, made_start, made, reuse_start, reuse_in, workspace,
    cost, late, pinned, kept, old_start, old, write_start, writes,
):  # fmt: skip
    steps, copy, legal = _emit(
        chosen, owner, read_start, reads, made_start, made, late, old_start, old, write_start, writes
    )
    runs = _drop_dead(steps, copy, chosen, read_start, reads, made_start, made, late, pinned, kept)
    steps, copy = steps[runs], copy[runs]
    total = nbytes.size
    first = np.full(2 * total, -1, np.int64)
    last = np.full(2 * total, -1, np.int64)
    last_early = np.full(total, -1, np.int64)
    first_late = np.full(total, -1, np.int64)
    latency = 0.0
    for k in range(steps.size):
        node = steps[k]
        latency += cost[node]
        behind = copy[k] or late[node]
        for m in range(made_start[node], made_start[node + 1]):
            inst = made[m] + (total if copy[k] else 0)
            first[inst] = k
            last[inst] = k
            if not copy[k]:
                last_early[made[m]] = k
        for r in range(read_start[node], read_start[node + 1]):
            storage = reads[r]
            last[storage + (total if chosen[storage] and behind else 0)] = k
            if not behind:
                last_early[storage] = k
            elif first_late[storage] < 0:
                first_late[storage] = k
    change = np.zeros(steps.size + 1, np.int64)
    for inst in range(2 * total):
        if first[inst] < 0:
            continue
        storage = inst % total
        change[first[inst]] += nbytes[storage]
        if not (inst < total and kept[storage]):
            change[last[inst] + 1] -= nbytes[storage]
    live = np.cumsum(change[:-1])
    for k in range(steps.size):
        node = steps[k]
        live[k] += workspace[node]
        behind = copy[k] or late[node]
        for p in range(reuse_start[node], reuse_start[node + 1]):
            storage = reuse_in[p]
            inst = storage + (total if chosen[storage] and behind else 0)
            size = nbytes[made[made_start[node]]]
            if last[inst] == k and 0 <= first[inst] < k and nbytes[storage] == size:
                live[k] -= size
                break
    peak = live.max() if live.size > 0 else 0
    if not legal:
        peak = ILLEGAL
        live[:] = ILLEGAL // max(live.size, 1)
    return peak, latency, live, steps, copy, last_early, first_late


def warm_up() -> None:
    """Compile (or load from numba's cache) before a timed search starts."""
    empty = cast(Any, np.zeros(0, np.int64))
    none = np.zeros(0, np.bool_)
    zero = np.zeros(1, np.int64)
    _evaluate(
        none, empty, empty, zero, empty, zero, empty, zero, empty, empty, np.zeros(0), none, none, none,
        zero, empty, zero, empty,
    )  # fmt: skip
