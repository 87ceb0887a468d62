"""What an operator writes, and the operator that computes the same without writing.

Problem.  Traces contain ``add_``, ``maximum.out`` and operators that change an argument without saying so in
their schema; the graph knows values that are computed once.

Method.  The schema says which arguments are written; a small table adds the hidden ones.  PyTorch has, for
nearly every such operator, an overload that returns the new contents instead; it is found by name and checked
by signature:

    aten.add_.Tensor(self!, other)          ->  aten.add.Tensor(self, other)
    aten.maximum.out(a, b, out!)            ->  aten.maximum.default(a, b)
    aten._native_batch_norm_legit(.., rm!)  ->  aten._native_batch_norm_legit_functional(..)
    aten.native_batch_norm(.., rm, rv, ..)  ->  the same, its arguments being in the same order

Not done: operators that mutate lists of tensors, or have no such overload (`find` returns None).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowtide.ir.aten import resolve
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = ["Functional", "changes_only_metadata", "find", "ignores_contents", "written"]


@dataclass(frozen=True)
class Functional:
    """`op` returns the original's own results first (`kept` of them), then one per written argument."""

    op: Aten
    kept: int


_RENAMED = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.native_batch_norm.default": "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.default": "aten._native_batch_norm_legit_functional.default",
    "aten._batch_norm_with_update.default": "aten._batch_norm_with_update_functional.default",
}

_HIDDEN = {
    "aten.native_batch_norm.default": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm.default": ("running_mean", "running_var"),
    "aten.miopen_batch_norm.default": ("running_mean", "running_var"),
}
"""Arguments that are written when the operator's ``training`` is true, without a word in the schema."""

_OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_"}
    | {"geometric_", "cauchy_", "log_normal_"}
)


def ignores_contents(overload: str) -> bool:
    """Whether an in-place operator sets every element without reading what was there."""
    return overload.split(".")[1] in _OVERWRITES


def changes_only_metadata(overload: str) -> bool:
    """Whether an in-place operator only changes shape and strides (``t_``, ``squeeze_``)."""
    return torch.Tag.inplace_view in resolve(overload).tags


def written(op: Aten) -> tuple[int, ...]:
    """Positions (as in `Ref`) of the inputs that `op` overwrites, in schema order."""
    arguments = arguments_of(op)
    names = _written_names(op.overload)
    if op.overload in _HIDDEN and arguments.get("training") is True:
        names = _HIDDEN[op.overload]
    found = (arguments.get(name) for name in names)
    return tuple(index for argument in found for index in _refs(argument))


def arguments_of(op: Aten) -> dict[str, Arg]:
    """The arguments that are given, by schema name."""
    schema = resolve(op.overload)._schema.arguments
    positional = {argument.name: value for argument, value in zip(schema, op.args, strict=False)}
    return {**positional, **dict(op.kwargs)}


@cache
def _written_names(overload: str) -> tuple[str, ...]:
    schema = resolve(overload)._schema
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _refs(argument: Arg) -> tuple[int, ...]:
    if isinstance(argument, Ref):
        return (argument.index,)
    if isinstance(argument, tuple):
        return tuple(index for item in argument for index in _refs(item))
    return ()


def find(op: Aten) -> Functional | None:
    """The functional form of a writing operator; None if PyTorch has none."""
    overload = _find_overload(op.overload)
    if overload is None:
        return None
    schema = resolve(op.overload)._schema
    out_names = {a.name for a in schema.arguments if _is_out(a)}
    kwargs = tuple((name, value) for name, value in op.kwargs if name not in out_names)
    args = op.args + _missing_defaults(op, overload)
    aliased = sum(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    return Functional(Aten(overload, args, kwargs), len(schema.returns) - aliased)


def _missing_defaults(op: Aten, overload: str) -> tuple[Arg, ...]:
    """Arguments that were left at a default which the functional form does not have (``bernoulli_()``)."""
    given = len(op.args)
    ours, theirs = (resolve(name)._schema.arguments[given:] for name in (op.overload, overload))
    return tuple(
        our.default_value
        for our, their in zip(ours, theirs, strict=False)
        if our.has_default_value() and not their.has_default_value() and not their.kwarg_only
    )


@cache
def _find_overload(overload: str) -> str | None:
    namespace, name, variant = overload.rsplit(".", 2) if overload.count(".") == 2 else ("", "", "")
    operator = resolve(overload)
    if overload in _RENAMED:
        return _RENAMED[overload]
    if not namespace or overload in _HIDDEN:
        return None
    if any(_is_out(argument) for argument in operator._schema.arguments):
        return _match(operator, f"{namespace}.{name}")
    for plain in _plain_names(name):
        exact = _lookup(f"{namespace}.{plain}.{variant}")
        if exact is not None and not exact._schema.is_mutable and _same_arguments(operator, exact):
            return str(exact)
        matched = _match(operator, f"{namespace}.{plain}")
        if matched is not None:
            return matched
    return None


def _plain_names(name: str) -> tuple[str, ...]:
    """The names under which the functional form of `name` may be known."""
    if name.startswith("__i") and name.endswith("__"):
        return (f"__{name[3:]}",)
    if name.endswith("_"):
        return (name[:-1], f"{name[:-1]}_functional")
    return (f"{name}_functional",)


def _is_out(argument: Any) -> bool:
    return bool(argument.is_out)


def _lookup(overload: str) -> torch._ops.OpOverload | None:
    try:
        return resolve(overload)
    except ValueError:
        return None


def _match(operator: torch._ops.OpOverload, packet: str) -> str | None:
    """The overload of `packet` that takes the same arguments (without ``out=``) and writes none."""
    namespace, name = packet.split(".")
    found = getattr(getattr(torch.ops, namespace), name, None)
    for variant in found.overloads() if found is not None else ():
        candidate = getattr(found, variant)
        if not candidate._schema.is_mutable and _same_arguments(operator, candidate):
            return str(candidate)
    return None


def _same_arguments(operator: torch._ops.OpOverload, candidate: torch._ops.OpOverload) -> bool:
    ours = [(a.name, str(a.type)) for a in operator._schema.arguments if not _is_out(a)]
    theirs = [(a.name, str(a.type)) for a in candidate._schema.arguments]
    return ours == theirs
