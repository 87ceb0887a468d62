"""What an operator would return: shapes, strides and storages, from a fake run.

Problem.  A rewrite that changes sizes (a part of a Fission) or adds operators must know the layout of
each new value, and which of them are views.

Method.  The operator runs once on fake tensors with the given windows, by capture's rules where a fake
is not what the CPU gives (statistics in mixed precision); the storages of its results are compared with
those of its arguments.  Equal calls are answered from a cache, so that repeated layers cost one run.

Not done.  Storages that real kernels make bigger than their result (`lowtide.run.probe` measures those).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from lowtide.capture.fidelity import run_faithfully
from lowtide.capture.internals import FakeTensorMode, outside_modes, storage_key
from lowtide.capture.recorder import meta_of
from lowtide.ir.aten import bound, resolve, tensors_of
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Aten

__all__ = ["Result", "predict"]


@dataclass(frozen=True, slots=True)
class Result:
    """One result: its window, and where it lives.

    alias: the input whose storage it views, None if fresh; offset: elements from that input's start,
    or from the start of the fresh storage; fresh: number of the fresh storage among the call's;
    nbytes: bytes of a fresh storage.
    """

    meta: TensorMeta
    alias: int | None
    offset: int
    fresh: int
    nbytes: int


@lru_cache(maxsize=1 << 15)
def predict(op: Aten, inputs: tuple[TensorMeta, ...]) -> tuple[Result, ...]:
    """The results of `op` on tensors of these metas; numbers on the host are passed as 1.0.

    Raises what the operator raises (RuntimeError, ValueError) if it refuses these shapes or strides.
    """
    with outside_modes(), torch.no_grad(), FakeTensorMode() as mode:
        operands = [
            1.0
            if meta.device == "host"
            else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
            for meta in inputs
        ]
        taken = {storage_key(each): k for k, each in enumerate(operands) if isinstance(each, torch.Tensor)}
        fresh: dict[int, int] = {}
        results = []
        args, kwargs = bound(op, operands)
        for tensor in tensors_of(run_faithfully(resolve(op.overload), args, kwargs, mode)):
            key = storage_key(tensor)
            alias = taken.get(key)
            number = -1 if alias is not None else fresh.setdefault(key, len(fresh))
            nbytes = int(tensor.untyped_storage().nbytes())
            results.append(Result(meta_of(tensor), alias, int(tensor.storage_offset()), number, nbytes))
        return tuple(results)
