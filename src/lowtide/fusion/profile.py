"""Measured profit: what the paper's profile database is, for the cells that Table 3 leaves open.

Problem.  Prediction ranks most merges right; where it decides between yes and no, a measurement is better,
and it has to be paid only once.

Method.  `Profiled` is a Pricing that compiles a block, runs it on made-up operands and keeps the least of a
few rounds in the profile store, under the block's canonical form (operators, shapes, types, strides),
threads, processor, compiler and torch's version.  At most `budget` blocks are measured; after that, and
where nothing can be compiled, the prediction stands.

Invariants.  A stored block is never measured again, whatever its ids.  Measured and predicted seconds are
compared only if nothing else is known: `probes` says how many were measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from lowtide.analysis.key import graph_key
from lowtide.fusion.codegen.compiler import digest_of
from lowtide.fusion.codegen.library import Kernel, compile_bodies
from lowtide.fusion.profit import Pricing
from lowtide.ir.graph import Graph, Role, TensorMeta
from lowtide.run.store import ProfileStore, machine_key

__all__ = ["Profiled"]

_ROUNDS = 5


@dataclass
class Profiled(Pricing):
    """Pricing by measurement, within a budget of blocks."""

    store: ProfileStore = field(default_factory=lambda: ProfileStore(None))
    budget: int = 64
    probes: int = 0

    def seconds(self, body: Graph) -> float | None:
        """Seconds of `body` as one kernel: measured if known or affordable, else predicted; None: none."""
        predicted = super().seconds(body)
        if predicted is None:
            return None
        key = machine_key("block", digest_of(graph_key(body)))
        known = self.store.read(key)
        if known is None and self.probes < self.budget:
            measured = self._measure(body)
            if measured is not None:
                self.probes += 1
                known = repr(measured)
                self.store.write(key, known)
        return predicted if known is None else float(known)

    def _measure(self, body: Graph) -> float | None:
        """The least time of a few rounds, one warm-up before; None if it does not compile."""
        library = compile_bodies([body], keep=self.keep)
        if library is None:
            return None
        operands = [
            1.0 if body.storage_of(value).role is Role.HOST else _made_up(body.values[value].meta)
            for value in body.inputs
        ]
        return _timed(library.kernel(0), operands)


def _timed(kernel: Kernel, operands: list[torch.Tensor | float]) -> float:
    """The least of a few calls on fixed addresses, after one warm-up."""
    outputs = [_made_up(kernel.body.values[out].meta) for out in kernel.body.outputs]
    threads = torch.get_num_threads()
    used = [each for each in operands if isinstance(each, torch.Tensor)] + outputs
    numbers = [each for each in operands if not isinstance(each, torch.Tensor)]
    room = torch.empty(
        kernel.signature.scratch_bytes(threads) + kernel.signature.prepared_bytes + 192, dtype=torch.uint8
    )
    start = (room.data_ptr() + 63) // 64 * 64
    pointers = [tensor.data_ptr() for tensor in used]
    if kernel.signature.prepared_bytes:
        pointers.append(start + (kernel.signature.scratch_bytes(threads) + 63) // 64 * 64)
        kernel.prepare(pointers, start)
    call = kernel.bind(pointers, numbers, start, threads)
    taken = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _made_up(meta: TensorMeta) -> torch.Tensor:
    """A tensor laid out as `meta` says; indices are zero, so that every table has them."""
    whole = torch.zeros(max(meta.span_bytes // meta.dtype.itemsize, 1), dtype=meta.dtype)
    if meta.dtype.is_floating_point:
        whole.normal_()
    return whole.as_strided(meta.shape, meta.stride)
