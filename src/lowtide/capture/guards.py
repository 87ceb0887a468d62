"""What a plan took from Python at capture, and whether it is still so.

Problem.  A graph holds numbers, not attributes: after ``model.dropout.p = 0.5`` a plan that was captured at
0.1 would go on drawing with 0.1, silently.

Method.  `Fingerprint` has walked everything that the model and the loss can reach by their own code.  Of its
containers a guard keeps the entries that this code *names*: attributes of modules, closures, globals, class
attributes, and what lies in containers behind such a name.  Numbers and strings count by content, everything
else by identity: another activation, another mask.  (What is written *into* a tensor, the plan reads anyway.)
The children and the hooks of modules are always kept.

Invariants.  A check runs none of the user's code and copies no tensor.

Not done.  Attributes that are only reached by computed names (`getattr(self, f"layer{k}")`), contents of
NumPy arrays, containers of more than `MOST_ENTRIES` entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from lowtide.capture.fingerprint import MISSING, Change, Fingerprint, Place, same, show
from lowtide.capture.recording import modules_of
from lowtide.capture.twins import walk_modules
from lowtide.workload import Workload

__all__ = ["MOST_ENTRIES", "Guards", "attributes_of"]

MOST_ENTRIES = 1000
"""Entries of a container that is guarded."""

_ALWAYS = frozenset(
    {"_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
)
_INNER = frozenset(vars(nn.Module()))
"""Attributes of every module: flags and tables, which are compared elsewhere or say nothing."""

_CONSTRUCTION = frozenset({"__init__", "__repr__", "extra_repr", "reset_parameters"})
"""Methods that no step calls."""

_DEFAULT = "torch.get_default_dtype()"

_PLAIN = frozenset({int, float, complex, bool, str, type(None)})


@dataclass(frozen=True, eq=False)
class _Guard:
    """Entries of one container; `size`: how many it has."""

    place: Place
    kept: tuple[tuple[Any, Any], ...]
    size: int

    def change(self, names: frozenset[str]) -> Change | None:
        """The first entry that is another now, or new under one of `names`."""
        now = self.place.live()
        for key, content in self.kept:
            found = now.get(key, MISSING)
            if found is not content and not same(content, found):
                return Change(self.place.entry(key), show(content), show(found))
        if len(now) == self.size:
            return None
        new = (key for key in now if key not in self.place.entries)
        for key in new if self.place.brackets else (key for key in new if key in names):
            return Change(self.place.entry(key), show(MISSING), show(now[key]))
        return None


@dataclass(frozen=True, eq=False)
class Guards:
    """The entries that a recording depended on; none by default."""

    guards: tuple[_Guard, ...] = ()
    names: frozenset[str] = frozenset()
    default_dtype: torch.dtype = torch.float32

    @staticmethod
    def of(fingerprint: Fingerprint, workload: Workload) -> Guards:
        """Guards for what was found of `workload` before the recording."""
        functions = [each for each in fingerprint.functions if each.__name__ not in _CONSTRUCTION]
        kinds = {type(module) for _, module in walk_modules(modules_of(workload))}
        names = frozenset({"forward", *_names(function.__code__ for function in functions)})
        names = names.union(*map(_names_of_class, kinds))
        found = ((place, _kept(place, names)) for place in fingerprint.places)
        guards = tuple(_Guard(place, kept, len(place.live())) for place, kept in found if kept is not None)
        return Guards(guards, names, torch.get_default_dtype())

    def first_change(self) -> Change | None:
        """The first entry that is no longer what it was."""
        if torch.get_default_dtype() != self.default_dtype:  # of tensors that the step makes of nothing
            return Change(_DEFAULT, str(self.default_dtype), str(torch.get_default_dtype()))
        for guard in self.guards:
            change = guard.change(self.names)
            if change is not None:
                return change
        return None


def _kept(place: Place, names: frozenset[str]) -> tuple[tuple[Any, Any], ...] | None:
    """The entries of a container that are guarded; None if the container says nothing."""
    if len(place.entries) > MOST_ENTRIES or place.digest:
        return None
    entries = [(key, content) for key, content in place.entries.items() if content is not MISSING]
    if place.path.startswith(("closure of ", "globals of ", "defaults of ")):
        return tuple(entries)
    if not place.brackets:
        return tuple((key, content) for key, content in entries if key in names and key not in _INNER)
    owner = re.sub(r"\[[^\]]*\]", "", place.path).rpartition(".")[2]
    wanted = owner in _ALWAYS or (owner in names and owner not in _INNER)
    return tuple(entries) if wanted else None


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Class names, and plain attributes that some forward names, by path: what a saved plan compares."""
    found: dict[str, Any] = {_DEFAULT: str(torch.get_default_dtype())}
    modules = walk_modules({"": model})
    named = {kind: _names_of_class(kind) for kind in {type(module) for _, module in modules}}
    for path, module in modules:
        found[path] = type(module).__qualname__
        for key, content in vars(module).items():
            if key in named[type(module)] and key not in _INNER and type(content) in _PLAIN:
                found[f"{path}.{key}" if path else key] = content
    return found


# -- names ----------------------------------------------------------------------------------------------


def _names_of_class(kind: type) -> frozenset[str]:
    """Names that the methods of a module's class use, `nn.Module`'s own and construction left out."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        functions = (each for name, each in vars(base).items() if name not in _CONSTRUCTION)
        found.update(_names(f.__code__ for f in map(_function, functions) if isinstance(f, FunctionType)))
    return frozenset(found)


def _function(entry: Any) -> Any:
    if isinstance(entry, staticmethod | classmethod):
        return entry.__func__
    return entry.fget if isinstance(entry, property) else entry


def _names(codes: Iterable[CodeType]) -> Iterator[str]:
    """Attributes, globals and closure variables that code names, functions inside it included."""
    for code in codes:
        yield from code.co_names
        yield from code.co_freevars
        yield from _names(each for each in code.co_consts if isinstance(each, CodeType))
