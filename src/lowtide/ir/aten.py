"""From an `Aten` operation to the operator itself, and how to call it.

Problem.  Graphs hold operators as plain data (``aten.add.Tensor`` and arguments with `Ref`s); executors,
measurements and fake re-runs all have to turn that back into one call, in the same way.

Method.  `resolve` finds the overload once; `call` puts tensors (or Python numbers, for host scalars) in
place of the Refs; `tensors_of` flattens what came back, so that entry j belongs to `node.outputs[j]`.

Not done here: which arguments an operator writes (`lowtide.capture.functional`), devices, `out=` forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import lowtide.ir.philox  # noqa: F401  (an operator of ours, which PyTorch then knows)
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = ["bound", "call", "overload_name", "renumber", "resolve", "substitute", "tensors_of"]


@cache
def resolve(overload: str) -> torch._ops.OpOverload:
    """The operator that ``namespace.name.overload`` names; raises ValueError if there is none."""
    namespace, _, rest = overload.partition(".")
    name, _, variant = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), name), variant)
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"no operator is named {overload!r}") from error
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{overload!r} names no operator overload")
    return found


def overload_name(operator: torch._ops.OpOverload) -> str:
    """``namespace.name.overload``, the inverse of `resolve`."""
    return str(operator)


def substitute(arg: Arg, operands: Sequence[Any]) -> Any:
    """`arg` with every Ref replaced by its operand; tuples become lists, as operators expect them."""
    if isinstance(arg, Ref):
        return operands[arg.index]
    if isinstance(arg, tuple):
        return [substitute(item, operands) for item in arg]
    return arg


def call(op: Aten, operands: Sequence[Any]) -> Any:
    """Run one operator; `operands[i]` stands for the node's i-th input (a tensor, or a number if HOST)."""
    args, kwargs = bound(op, operands)
    return resolve(op.overload)(*args, **kwargs)


def bound(op: Aten, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the call that `op` stands for."""
    args = tuple(substitute(arg, operands) for arg in op.args)
    return args, {name: substitute(arg, operands) for name, arg in op.kwargs}


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors in what an operator returned, in order; None and numbers are left out."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, list | tuple):
        return tuple(tensor for item in result for tensor in tensors_of(item))
    return ()


def renumber(op: Aten, indices: Sequence[int]) -> Aten:
    """`op` with Ref(i) replaced by Ref(indices[i])."""

    def one(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(indices[arg.index])
        return tuple(one(item) for item in arg) if isinstance(arg, tuple) else arg

    return Aten(
        op.overload, tuple(one(arg) for arg in op.args), tuple((name, one(arg)) for name, arg in op.kwargs)
    )
