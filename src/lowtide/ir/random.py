"""Which operations draw from a random generator: the one place that knows.

A random node runs once, in program order, and is never recomputed.  PyTorch tags its own random operators;
an operator that takes a dropout probability of zero, or that is not training, draws nothing.  Operators of
other libraries carry the tag or do not: all of them are taken for random.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lowtide.ir.aten import resolve
from lowtide.ir.ops import Aten, Fission, Fused, Op

__all__ = ["is_random"]

_SILENT = {"dropout_p": 0.0, "train": False, "training": False}
"""Argument values with which a tagged operator draws nothing."""

_TAGGED = frozenset({"aten", "prims", "lowtide"})
"""Namespaces whose operators carry the tag if they draw."""


def is_random(op: Op) -> bool:
    """Whether running `op` advances a random generator."""
    if isinstance(op, Aten):
        return _is_tagged(op.overload) and not _is_silent(op)
    if isinstance(op, Fused):
        return any(is_random(node.op) for node in op.body)
    if isinstance(op, Fission):
        return any(is_random(node.op) for body in op.bodies for node in body)
    return False


@cache
def _is_tagged(overload: str) -> bool:
    foreign = overload.partition(".")[0] not in _TAGGED
    return foreign or torch.Tag.nondeterministic_seeded in resolve(overload).tags


def _is_silent(op: Aten) -> bool:
    given: dict[str, Any] = dict(op.kwargs)
    for position, argument in enumerate(resolve(op.overload)._schema.arguments):
        if argument.name not in _SILENT:
            continue
        value = op.args[position] if position < len(op.args) else argument.default_value
        if given.get(argument.name, value) == _SILENT[argument.name]:
            return True
    return False
