"""One way to run a step, beside eager, in a process of its own: what the worker process holds.

Problem.  Settings of Inductor are process-wide, compiled code stays loaded, an arena stays allocated: a
second variant in the same process is not the variant that a user would get.

Method.  A bench builds the same step twice from the same seed, one for eager and one for the variant, so
neither sees the other's weights.  First the gradients of both from the same weights, then two steps to warm
up, then the peak, then interleaved rounds.

Invariant.  Ours is measured by the same code as its peers; its arena is added to the peak, whole.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.gauge import Time, gradient_error, measure_above_bytes, measure_rounds, time_step
from benchmarks.training.record import Figures
from benchmarks.training.subjects import SUBJECTS
from benchmarks.training.variants import Variant, loss_of
from lowtide.run.native import run_step
from lowtide.workload import Workload

__all__ = ["Effort", "Ours", "OursBench", "PeerBench", "TurnBench"]

EAGER = Variant()


@dataclass(frozen=True)
class Effort:
    """How much to measure: threads (0: PyTorch's default), rounds and the seconds they may take."""

    threads: int = 0
    rounds: int = 31
    seconds: float = 60.0


@dataclass(frozen=True)
class Ours:
    """What to ask of `lowtide.optimize`: exactly one of both limits."""

    memory: str | None = None
    latency: str | None = None
    seconds: float = 30.0


class PeerBench:
    """A variant of PyTorch's own."""

    def __init__(self, key: str, variant: Variant, effort: Effort) -> None:
        _set_threads(effort.threads)
        self.effort = effort
        self.plain = variant == EAGER
        self.eager = SUBJECTS[key].make()
        self.workload = SUBJECTS[key].make()
        self.loss = loss_of(SUBJECTS[key], variant, self.workload)

    def measure(self) -> Figures:
        """All figures of the variant."""
        start = time.perf_counter()
        self.loss().backward()  # type: ignore[no-untyped-call]
        prepare_s = time.perf_counter() - start
        error = gradient_error(_gradients(self.workload), _eager_gradients(self.eager))
        equal = _buffers_equal(self.workload, self.eager)
        _finish(self.workload)
        _finish(self.eager)
        step = self._eager_step if self.plain else self._step
        return _figures(self._eager_step, step, 0, self.effort, error, equal, prepare_s)

    def _step(self) -> Tensor:
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        _finish(self.workload)
        return loss

    def _eager_step(self) -> object:
        return run_step(self.eager)


class OursBench:
    """A plan of Lowtide's, made by its public door."""

    def __init__(self, key: str, ours: Ours, effort: Effort) -> None:
        _set_threads(effort.threads)
        self.effort = effort
        self.ours = ours
        self.eager = SUBJECTS[key].make()
        self.workload = SUBJECTS[key].make()

    def measure(self) -> Figures:
        """All figures of the plan.  Raises LowtideError (no such plan), ImportError (not built yet)."""
        from lowtide.search.driver import optimize

        start = time.perf_counter()
        outcome = optimize(
            self.workload, memory=self.ours.memory, latency=self.ours.latency, seconds=self.ours.seconds
        )
        prepare_s = time.perf_counter() - start
        plan, workload = outcome.plan, self.workload
        plan.step(*workload.args, *workload.targets, keep_grads=True)
        error = gradient_error(_gradients(workload), _eager_gradients(self.eager))
        equal = _buffers_equal(workload, self.eager)
        workload.model.zero_grad(set_to_none=True)
        _finish(self.eager)
        figures = _figures(
            lambda: run_step(self.eager),
            lambda: plan.step(*workload.args, *workload.targets),
            plan.arena_bytes,
            self.effort,
            error,
            equal,
            prepare_s,
        )
        return replace(figures, detail=_moves(outcome.moves))


class TurnBench:
    """Eager alone, one step at a time: for comparing two processes in turns."""

    def __init__(self, key: str, effort: Effort) -> None:
        _set_threads(effort.threads)
        self.workload = SUBJECTS[key].make()
        for _ in range(2):
            run_step(self.workload)

    def turn(self) -> Time:
        """One step, the second of two: the first finds cold caches."""
        run_step(self.workload)
        return time_step(lambda: run_step(self.workload))


def _moves(moves: Sequence[Any]) -> str:
    """ "12 remat, 1 fission": the applied moves by kind."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(move.kind for move in moves).items())


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def _figures(
    eager: Callable[[], object],
    step: Callable[[], object],
    arena_bytes: int,
    effort: Effort,
    error: float,
    buffers_equal: bool,
    prepare_s: float,
) -> Figures:
    with _quiet_collector():
        for _ in range(2):
            step()
        above_bytes = arena_bytes + measure_above_bytes(step)
        rounds = measure_rounds(eager, step, rounds=effort.rounds, seconds=effort.seconds)
    return Figures(
        above_bytes=above_bytes,
        latency_s=rounds.latency_s,
        ratio=rounds.ratio,
        noise=rounds.noise,
        processor_ratio=rounds.processor_ratio,
        rounds=rounds.rounds,
        gradient_error=error,
        buffers_equal=buffers_equal,
        prepare_s=prepare_s,
        foreign_share=rounds.foreign_share,
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No garbage collection in the middle of a step, as its time belongs to nobody."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _finish(workload: Workload) -> None:
    """The rest of a training step after backward."""
    assert workload.optimizer is not None
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)


def _eager_gradients(workload: Workload) -> dict[str, Tensor]:
    assert workload.loss is not None
    workload.loss(workload.model(*workload.args), *workload.targets).backward()  # type: ignore[no-untyped-call]
    return _gradients(workload)


def _gradients(workload: Workload) -> dict[str, Tensor]:
    return {name: p.grad for name, p in workload.model.named_parameters() if p.grad is not None}


def _buffers_equal(one: Workload, other: Workload) -> bool:
    """Whether BatchNorm's statistics and the like agree to rounding."""
    theirs = dict(other.model.named_buffers())
    return all(
        torch.allclose(mine.double(), theirs[name].double(), rtol=1e-4, atol=1e-6)
        for name, mine in one.model.named_buffers()
    )
