"""Seconds per node, measured as the arena executor would run it.

Problem.  Search weighs bytes against seconds; an operator's time depends on its shapes, strides, threads and
on what it finds in the caches.

Method.  Each distinct node (`node_key`) becomes a program of its own: made-up operands, outputs and
temporaries in a small arena that is used again for every run, steps as `lowtide.run.lower` prepares them.
Two runs warm up, then the *warm* time is the least of several: other processes only ever add.  A run in which
the kernel often took a processor away counts only if there is no other.  Run after run an operator finds in
the caches what fits them; in a step others ran meanwhile, and it finds what was made just before, but no
weight and nothing that was saved.  So for operands above `SMALL_BYTES` the *cold* time is the median of runs
before each of which the caches are swept, and the node's time is the mean of both.  (MobileNetV2's training
step: 155 ms warm, 236 ms cold, 193 ms when run.)  Kept on disk, unless the machine was overloaded or no run
was left alone: then only for this process.

Invariant.  Never more than one node's operands exist, beside what sweeps the caches; the random generator is
left as it was.

Not done.  Which operands a node finds warm where it stands.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lowtide.analysis.key import node_key
from lowtide.ir.graph import Graph, Node, Role, Storage
from lowtide.ir.ops import Aten, Fused
from lowtide.run.allocator import Hook, load_hook
from lowtide.run.arena import ArenaExecutor
from lowtide.run.derived import only_packed
from lowtide.run.kernels import NO_KERNELS, Kernels, kernel_of
from lowtide.run.layout import lay_out
from lowtide.run.operands import make_operands
from lowtide.run.probe import probe_tree
from lowtide.run.store import ProfileStore, machine_key

__all__ = ["Guess", "alone", "time_nodes"]

Guess = Callable[[Graph, Node], float | None]
"""Seconds of a node that nobody measured, or None."""

_WARM_UPS = 2
_LEAST_RUNS = 3
_MOST_RUNS = 25
_NODE_LIMIT_S = 0.1
_MOST_INTERRUPTIONS = 50  # a second; two busy processes to a processor take turns ten times as often
_COLD_RUNS = 3
SMALL_BYTES = 1 << 18
"""Nodes that touch no more than this are timed warm."""
_SWEEP_BYTES = 40 << 20  # more than the caches that one socket's processes get
_MOST_LOAD = 1.5  # runnable processes per processor, ourselves included


def time_nodes(
    graph: Graph,
    *,
    seconds: float = 60.0,
    store: ProfileStore | None = None,
    hook: Hook | None = None,
    kernels: Kernels = NO_KERNELS,
    guess: Guess | None = None,
) -> dict[int, float]:
    """Seconds by node id; views and host numbers take none.

    Fused nodes run as `kernels` where there is one.  Nodes that are not known yet are measured within about
    `seconds`; once these are over, the rest gets one run each.  Before a node is measured, `guess` is asked.
    """
    stop = time.perf_counter() + seconds
    timer = _Timer(store or ProfileStore.default(), hook or load_hook(), stop, kernels, guess)
    return {node.id: timer.seconds_of(graph, node) for node in graph.nodes}


def alone(graph: Graph, node: Node) -> Graph:
    """`node` as a graph of its own: its inputs are the caller's, its outputs nobody's."""
    kept = dict.fromkeys((*node.inputs, *node.outputs))
    values = {value: graph.values[value] for value in kept}
    given = {values[value].storage for value in node.inputs}
    storages = {}
    for value in values.values():
        found = graph.storages[value.storage]
        role = found.role
        if found.id not in given:
            role = Role.TEMP
        elif not role.resident and role is not Role.HOST:
            role = Role.INPUT
        storages[found.id] = Storage(found.id, found.nbytes, role)
    return Graph((node,), values, storages, tuple(dict.fromkeys(node.inputs)), ())


def _is_overloaded() -> bool:
    """Whether so much else runs here that a time says little about the operator."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return False
    return load > _MOST_LOAD * (os.cpu_count() or 1)


@dataclass(frozen=True)
class _Timer:
    store: ProfileStore
    hook: Hook | None
    stop: float
    kernels: Kernels
    guess: Guess | None

    def seconds_of(self, graph: Graph, node: Node) -> float:
        if graph.is_view(node) or not isinstance(node.op, Aten | Fused):
            return 0.0
        kernel = kernel_of(node.op, self.kernels)
        code = "" if kernel is None else kernel.key
        key = machine_key("seconds", str(self.hook is not None), node_key(graph, node), code)
        known = self.store.read(key)
        if known is not None:
            return float(known)
        guessed = self.guess(graph, node) if self.guess is not None else None
        if guessed is not None:
            return guessed
        measured, undisturbed = self._measure(alone(graph, node), node)
        if _is_overloaded() or not undisturbed:
            self.store.remember(key, repr(measured))
        else:
            self.store.write(key, repr(measured))
        return measured

    def _measure(self, graph: Graph, node: Node) -> tuple[float, bool]:
        """Seconds, and whether all of the runs that count were left alone."""
        tree = probe_tree(graph, "arena", store=self.store, hook=self.hook, kernels=self.kernels)
        layout = lay_out(graph, [node.id], tree[()])
        kept = only_packed(graph, self.kernels)
        executor = ArenaExecutor(
            graph, [node.id], tree, layout, self.hook, kernels=self.kernels, derivation=kept
        )
        operands = dict(zip(node.inputs, make_operands(graph, node), strict=True))
        scalars = {value: operand for value, operand in operands.items() if isinstance(operand, float)}
        tensors = {value: operand for value, operand in operands.items() if value not in scalars}
        with torch.random.fork_rng(devices=[]):
            try:
                warm, calm = self._least(executor, tensors, scalars)
                if _touched_bytes(graph) <= SMALL_BYTES or time.perf_counter() > self.stop:
                    return warm, calm
                cold, still_calm = self._cold(executor, tensors, scalars)
                return (warm + max(warm, cold)) / 2, calm and still_calm
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                warnings.warn(
                    f"node {node.id} fails on made-up operands: {error}", RuntimeWarning, stacklevel=2
                )
                return 0.0, True

    def _least(
        self, executor: ArenaExecutor, tensors: dict[int, torch.Tensor], scalars: dict[int, float]
    ) -> tuple[float, bool]:
        executor.time_runs(tensors, scalars, 1 if time.perf_counter() > self.stop else _WARM_UPS)
        runs: list[_Run] = []
        spent = 0.0
        while len(runs) < _MOST_RUNS and (len(runs) < _LEAST_RUNS or spent < _NODE_LIMIT_S):
            runs.append(_timed_run(executor, tensors, scalars))
            spent += runs[-1].seconds
            if time.perf_counter() > self.stop:
                break
        counted, calm = _left_alone(runs)
        return min(run.seconds for run in counted), calm

    def _cold(
        self, executor: ArenaExecutor, tensors: dict[int, torch.Tensor], scalars: dict[int, float]
    ) -> tuple[float, bool]:
        runs = []
        for _ in range(_COLD_RUNS):
            self.sweep.add_(1)
            runs.append(_timed_run(executor, tensors, scalars))
        counted, calm = _left_alone(runs)
        return statistics.median(run.seconds for run in counted), calm

    @cached_property
    def sweep(self) -> torch.Tensor:
        """What is written to sweep the caches."""
        return torch.zeros(_SWEEP_BYTES, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _Run:
    """One timed run; `interrupted`: how often the kernel took a processor away from this process."""

    seconds: float
    interrupted: int


def _timed_run(executor: ArenaExecutor, tensors: dict[int, torch.Tensor], scalars: dict[int, float]) -> _Run:
    before = _interruptions()
    seconds = executor.time_runs(tensors, scalars, 1)[0]
    return _Run(seconds, _interruptions() - before)


def _interruptions() -> int:
    """Involuntary context switches of all threads of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _left_alone(runs: Sequence[_Run]) -> tuple[Sequence[_Run], bool]:
    """The runs that went on with hardly an interruption, if there are any; and whether there are."""
    calm = [run for run in runs if run.interrupted <= _MOST_INTERRUPTIONS * run.seconds]
    return (calm, True) if calm else (runs, False)


def _touched_bytes(graph: Graph) -> int:
    """Bytes of the storages of a node on its own, those whose windows are small counted as the window."""
    return sum(value.meta.span_bytes for value in graph.values.values() if value.meta.device != "host")
