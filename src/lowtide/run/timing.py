"""Seconds per node, measured as the arena executor would run it.

Problem.  Search weighs bytes against seconds; an operator's time depends on its shapes, strides, threads and
on whether its output's memory is warm.

Method.  Each distinct node (`node_key`) becomes a program of its own: made-up operands, outputs and
temporaries in a small arena that is used again for every run, steps as `lowtide.run.lower` prepares them.
Two runs warm up, then the least of several is taken: other processes only ever add.  Kept on disk, unless the
machine was overloaded: then only for this process.

Invariant.  Never more than one node's operands exist; the random generator is left as it was.

Not done.  Cold caches: operands of consecutive runs are the same, so what fits a cache is found in it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

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
        measured = self._measure(alone(graph, node), node)
        if _is_overloaded():
            self.store.remember(key, repr(measured))
        else:
            self.store.write(key, repr(measured))
        return measured

    def _measure(self, graph: Graph, node: Node) -> float:
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
                return self._least(executor, tensors, scalars)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                warnings.warn(
                    f"node {node.id} fails on made-up operands: {error}", RuntimeWarning, stacklevel=2
                )
                return 0.0

    def _least(
        self, executor: ArenaExecutor, tensors: dict[int, torch.Tensor], scalars: dict[int, float]
    ) -> float:
        executor.time_runs(tensors, scalars, 1 if time.perf_counter() > self.stop else _WARM_UPS)
        best, spent, runs = float("inf"), 0.0, 0
        while runs < _MOST_RUNS and (runs < _LEAST_RUNS or spent < _NODE_LIMIT_S):
            taken = executor.time_runs(tensors, scalars, 1)[0]
            best, spent, runs = min(best, taken), spent + taken, runs + 1
            if time.perf_counter() > self.stop:
                break
        return best
