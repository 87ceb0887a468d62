"""The search for one file and one limit: structures compete, the best are annealed longest.

Method.  Every number of parts that divides the batch gets a short annealing; the best few are tried with
regions of late layers inside, at places where few bytes cross; then what is left of the time goes to the
best, halving the field.  What keeps the limit beats what does not; then the objective decides.

Invariants.  Anytime; never worse than the recorded order if that keeps the limit.  One core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtide.search.residence import evaluate
from lowtide.search.residence_search import Choice, Found, Limit, anneal, descend

from .axes import Uncuttable
from .flatten import Flat, rebuild
from .model import Graph, Node
from .nested import places
from .structure import Structure, batch_size, build, choice, program

_WARM, _HOT = 0.02, 0.3
"""Temperatures that annealing starts from: near what it has, or far."""
_STARTERS = 5

__all__ = ["Best", "Goal", "optimise", "warm_up"]


@dataclass(frozen=True)
class Goal:
    """A limit relative to the recorded order: one of the two is given."""

    base_ms: float
    base_bytes: int
    latency: float | None = None
    memory: float | None = None

    @property
    def limit(self) -> Limit:
        """In milliseconds and bytes."""
        if self.latency is not None:
            return Limit(self.latency * self.base_ms, 0, True)
        assert self.memory is not None
        return Limit(0.0, int(self.memory * self.base_bytes), False)

    def score(self, found: Found) -> tuple[bool, float, float]:
        """Less is better."""
        pair = (found.peak_bytes / self.base_bytes, found.latency_s / self.base_ms)
        if self.latency is not None:
            return (not found.feasible, *(pair if found.feasible else pair[::-1]))
        return (not found.feasible, *(pair[::-1] if found.feasible else pair))


@dataclass(frozen=True)
class Entry:
    """A structure with its arrays and its best decisions so far."""

    structure: Structure
    flat: Flat
    choice: Choice
    late: frozenset[int]
    found: Found


@dataclass(frozen=True)
class Best:
    """The result: a graph, what it costs, how it was made, how much was judged."""

    graph: Graph
    structure: Structure
    latency_ms: float
    peak_bytes: int
    states: int
    seconds: float
    met: bool
    decisions: Mapping[str, int]


class _Search:
    def __init__(self, graph: Graph, hw: Mapping[str, Any], goal: Goal, seed: int) -> None:
        self.graph, self.hw, self.goal, self.seed = graph, hw, goal, seed
        self.states = 0
        self.known: dict[Structure, Entry] = {}

    def entry(self, structure: Structure) -> Entry | None:
        """The structure with its start decisions; None if the graph cannot be split so."""
        if structure in self.known:
            return self.known[structure]
        try:
            built, late = build(self.graph, structure, self.hw)
        except Uncuttable:
            return None
        flat = program(built, late, self.hw)
        outcome = evaluate(flat.program, flat.default)
        limit = self.goal.limit
        feasible = outcome.latency_s <= limit.seconds if limit.on_time else outcome.peak_bytes <= limit.nbytes
        found = Found(flat.default, outcome.peak_bytes, outcome.latency_s, feasible, 1)
        self.states += 1
        self.known[structure] = Entry(structure, flat, choice(flat), late, found)
        return self.known[structure]

    def descend(self, entry: Entry) -> Entry:
        """Greedy decisions from the start."""
        found = descend(entry.flat.program, entry.choice, entry.flat.default, self.goal.limit)
        return self.keep(entry, found)

    def keep(self, entry: Entry, found: Found) -> Entry:
        """The better of both."""
        self.states += found.states
        if self.goal.score(found) < self.goal.score(entry.found):
            entry = replace(entry, found=found)
        self.known[entry.structure] = entry
        return entry

    def improve(self, entry: Entry, seconds: float, heat: float) -> Entry:
        """Anneal from its best decisions for some time."""
        self.seed += 1
        found = anneal(
            entry.flat.program,
            entry.choice,
            entry.found.mode,
            self.goal.limit,
            deadline=time.perf_counter() + seconds,
            seed=self.seed,
            heat=heat,
        )
        return self.keep(entry, found)

    def starters(self) -> list[Entry]:
        """What to descend from: decisions lower bytes and add time, so the fastest if bytes are the limit."""
        if self.goal.limit.on_time:
            return self.ranked()[:_STARTERS]
        return sorted(self.known.values(), key=lambda entry: entry.found.latency_s)[:_STARTERS]

    def ranked(self) -> list[Entry]:
        """All structures, best first."""
        return sorted(self.known.values(), key=lambda entry: self.goal.score(entry.found))


def optimise(
    graph: Graph, hw: Mapping[str, Any], goal: Goal, seconds: float, seed: int = 0, fuse: bool = False
) -> Best:
    """The best result within `seconds`."""
    began = time.perf_counter()
    search = _Search(graph, hw, goal, seed)
    plain = search.entry(Structure(fuse=fuse))
    assert plain is not None, "a graph that is not split is always legal"
    batch = batch_size(graph)
    sizes = [parts for parts in range(2, min(batch, 64) + 1) if batch % parts == 0]
    plans = [Structure(parts, waves=waves, fuse=fuse) for parts in (1, *sizes) for waves in (False, True)]
    for plan in plans:
        search.entry(plan)
    for entry in search.starters():
        search.descend(entry)
        if time.perf_counter() - began > 0.2 * seconds:
            break
    for entry in search.ranked()[:8]:
        search.improve(entry, 0.1 * seconds / 8, _WARM)
    for structure in _nested(search, fuse):
        if time.perf_counter() - began > 0.5 * seconds:
            break
        if entry := search.entry(structure):
            search.improve(search.descend(entry), 0.01 * seconds, _WARM)
    for keep, heat in ((6, _WARM), (4, _HOT), (2, _WARM), (1, _HOT), (1, _WARM)):
        left = seconds - (time.perf_counter() - began)
        share = 0.95 * left if heat == _WARM and keep == 1 else 0.3 * left
        for entry in search.ranked()[:keep]:
            search.improve(entry, max(0.0, share) / keep, heat)
    best = search.ranked()[0]
    outcome = evaluate(best.flat.program, best.found.mode)
    return Best(
        rebuild(best.flat, outcome, best.late),
        best.structure,
        outcome.latency_s,
        int(outcome.peak_bytes),
        search.states,
        time.perf_counter() - began,
        best.found.feasible,
        _decisions(best, outcome.swapped.size),
    )


def _nested(search: _Search, fuse: bool) -> Iterator[Structure]:
    """Regions inside the best few, alternating between them."""
    ranked = [entry.structure for entry in search.ranked()[:3]]
    waiting = []
    for structure in ranked:
        entry = search.known[replace(structure, waves=False)]
        found = places(entry.flat.graph, entry.late)
        picks = [found[int(k)] for k in np.linspace(0, len(found) - 1, min(6, len(found)))] if found else []
        waiting.append([replace(structure, inner=((place, parts),)) for place in picks for parts in (2, 4)])
    for row in range(max(map(len, waiting), default=0)):
        yield from (column[row] for column in waiting if row < len(column))


def _decisions(best: Entry, swaps: int) -> Mapping[str, int]:
    again = int(((best.found.mode == 1) & (best.flat.read_late == 1)).sum())
    return {
        "parts": best.structure.parts,
        "regions": len(best.structure.inner),
        "remat": again,
        "swap": int(swaps),
    }


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache, before a clock starts."""
    x, w = Node(0, "placeholder", "input", (), (2, 2)), Node(1, "placeholder", "weight", (), (2, 2))
    square = Node(2, "ewise.uni.relu", "compute", (0,), (2, 2), {}, (((0, 0), (1, 1)),))
    loss = Node(3, "ewise.bin.add", "compute", (2, 1), (2, 2), {}, (((0, 0), (1, 1)), ()))
    back = Node(4, "ewise.bin.mul", "compute", (2, 2), (2, 2), {}, (((0, 0), (1, 1)),) * 2)
    update = Node(5, "ewise.bin.add_", "inplace", (1, 4), (2, 2), {}, ((), ()))
    hw = {"flops": 1e12, "bw": 1e12, "pcie": 1e10, "launch": 1e-6, "swap_lat": 1e-6, "sms": 8, "dsize": 4}
    flat = program(*build(Graph((x, w, square, loss, back, update)), Structure(), hw), hw)
    for limit in (Limit(1.0, 0, True), Limit(0.0, 1, False)):
        anneal(flat.program, choice(flat), flat.default, limit, states=1)
        descend(flat.program, choice(flat), flat.default, limit)
