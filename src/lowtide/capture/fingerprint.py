"""What a call changes in Python: counters, lists, attributes, closures, globals.

Problem.  A graph has no room for ``self.calls += 1``; a plan that replays the graph would silently leave it
out.

Method.  Before the recording, walk everything that the model and the loss can reach by their own code:
attributes, containers in them, closures, default arguments, the globals that their functions name, class
attributes.  Keep a shallow copy of each container.  Afterwards compare entry by entry; what differs is put
back and named.  Tensors count by identity (changes of their contents are operators, which the recorder sees).

A library's functions and classes (site-packages, the standard library, PyTorch) are not searched; the
attributes of its objects are.

Not done: state inside C objects (iterators, generators); there the comparison of two recordings has to do.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.capture.internals import FakeTensor
from lowtide.capture.origins import user_file

__all__ = ["MISSING", "Change", "Fingerprint", "Place", "same", "show"]

_MOST_CONTAINERS = 200_000
_ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Tensor, ModuleType)
_CLOSED = (*_ATOMS, BuiltinFunctionType, CodeType, torch.Generator, torch._C._TensorMeta)
MISSING = object()
"""The content of an entry that is not there."""

_GLOBAL = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"})


@dataclass(frozen=True)
class Change:
    """One entry that a call changed, with its path (``model.encoder.calls``) and both contents."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        path = re.sub(r"\._modules\['([^']*)'\]", r".\1", self.path)
        return f"{path} ({self.before} became {self.after})"


@dataclass(frozen=True, eq=False)
class Place:
    """A container: how to read its entries now, what they were, how to put one back.

    `table`: where reading is work, the table that the entries are a part of.  `digest`: the entries are one,
    of contents that are not compared one by one.
    """

    path: str
    read: Callable[[], Mapping[Any, Any]]
    entries: dict[Any, Any]
    restore: Callable[[dict[Any, Any]], None]
    brackets: bool
    table: Mapping[Any, Any] | None = None
    digest: bool = False

    def live(self) -> Mapping[Any, Any]:
        """The entries as they are now, and perhaps others."""
        return self.read() if self.table is None else self.table

    def entry(self, key: Any) -> str:
        """How an entry is called in messages."""
        return f"{self.path}[{key!r}]" if self.brackets else f"{self.path}.{key}"


class Fingerprint:
    """Everything reachable from named roots, as it is now.

    `places` are the containers, `functions` the user's own functions.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.places: list[Place] = []
        self.functions: list[FunctionType] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        pending: deque[tuple[str, Any]] = deque(roots.items())
        while pending and len(self.places) < _MOST_CONTAINERS:
            path, found = pending.popleft()
            if isinstance(found, _CLOSED) or id(found) in self._seen:
                continue
            self._seen.add(id(found))
            self._alive.append(found)
            if isinstance(found, FunctionType) and _is_users(found):
                self.functions.append(found)
            for place in _places(path, found):
                self.places.append(place)
                pending.extend(
                    (place.entry(key), entry)
                    for key, entry in place.entries.items()
                    if not isinstance(entry, _CLOSED)
                )
            pending.extend(_parts(path, found))

    def settle(self) -> list[Change]:
        """What has changed since; everything is put back.

        A module's note of tensors that stood in for its own (`nn.LSTM` makes one) counts as no change.
        """
        changes: list[Change] = []
        for place in self.places:
            now = dict(place.read())
            differing = [
                key
                for key in {**place.entries, **now}
                if not same(place.entries.get(key, MISSING), now.get(key, MISSING))
            ]
            for key in differing:
                before, after = place.entries.get(key, MISSING), now.get(key, MISSING)
                if not _is_twin(before, after):
                    changes.append(Change(place.entry(key), show(before), show(after)))
            if differing:
                place.restore(place.entries)
        return changes


def same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, weakref.ref):
        return before() is after()
    if isinstance(before, Tensor):
        return False
    if isinstance(before, MethodType):
        return bool(before == after)
    if isinstance(before, int | float | complex | str | bytes):
        return before == after or before != before
    if isinstance(before, tuple):
        return len(before) == len(after) and all(map(same, before, after))
    return False


def _is_twin(before: Any, after: Any) -> bool:
    """Whether a parameter was replaced by a fake one of the same shape."""
    if isinstance(before, weakref.ref) and isinstance(after, weakref.ref):
        return after() is None or _is_twin(before(), after())
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(same(one, other) or _is_twin(one, other) for one, other in zip(before, after, strict=True))
    return isinstance(before, nn.Parameter) and isinstance(after, FakeTensor) and before.shape == after.shape


def show(entry: Any) -> str:
    if entry is MISSING:
        return "nothing"
    if isinstance(entry, Tensor):
        return f"a tensor of shape {list(entry.shape)}"
    if isinstance(entry, int | float | bool | str | type(None)):
        text = repr(entry)
        return text if len(text) < 40 else text[:37] + "..."
    return f"another {type(entry).__name__}"


# -- containers -----------------------------------------------------------------------------------------


def _places(path: str, found: Any) -> Iterator[Place]:
    """The containers that an object is or has."""
    if isinstance(found, dict):
        yield Place(path, lambda: found, dict(found), lambda old: _restore_dict(found, old), True)
    elif isinstance(found, list | deque):
        yield _sequence(path, found)
    elif isinstance(found, set):
        entries = dict.fromkeys(found, True)
        yield Place(
            path, lambda: dict.fromkeys(found, True), entries, lambda old: _restore_set(found, old), True
        )
    elif isinstance(found, np.ndarray):
        yield _array(path, found)
    elif isinstance(found, FunctionType):
        yield from _function_places(path, found)
    elif isinstance(found, type):
        if _is_users(found):
            yield _class_place(path, found)
    elif _has_open_attributes(found):
        table = vars(found)
        yield Place(path, lambda: table, dict(table), lambda old: _restore_dict(table, old), False)


def _has_open_attributes(found: Any) -> bool:
    """Whether an object's attributes belong to the user's state (a logger's, a lock's do not)."""
    if isinstance(found, nn.Module | SimpleNamespace):
        return True
    kind = type(found)
    library = kind.__module__.partition(".")[0]
    closed = library in sys.stdlib_module_names or library in {"torch", "numpy"} or isinstance(found, Enum)
    # Proxies answer any name, `__dict__` included, with another proxy.
    return isinstance(getattr(found, "__dict__", None), dict) and not closed


def _sequence(path: str, found: Any) -> Place:
    def restore(old: dict[Any, Any]) -> None:
        found.clear()
        found.extend(old.values())

    return Place(path, lambda: dict(enumerate(found)), dict(enumerate(found)), restore, True)


def _array(path: str, found: Any) -> Place:
    def digest() -> dict[str, bytes]:
        return {"contents": hashlib.blake2b(np.ascontiguousarray(found).tobytes()).digest()}

    kept = found.copy()

    def restore(_: dict[Any, Any]) -> None:
        found[...] = kept

    return Place(path, digest, digest(), restore, False, digest=True)


def _restore_dict(table: dict[Any, Any], old: dict[Any, Any]) -> None:
    for key in [key for key in table if key not in old]:
        del table[key]
    table.update(old)


def _restore_set(found: set[Any], old: dict[Any, Any]) -> None:
    found.clear()
    found.update(old)


def _class_place(path: str, found: type) -> Place:
    """Attributes of a user's class that are plain data."""

    def read() -> dict[str, Any]:
        return {
            name: entry
            for name, entry in vars(found).items()
            if not name.startswith("__") and not callable(entry) and not inspect.isdatadescriptor(entry)
        }

    def restore(old: dict[Any, Any]) -> None:
        for name in read():
            if name not in old:
                delattr(found, name)
        for name, entry in old.items():
            setattr(found, name, entry)

    return Place(found.__qualname__, read, read(), restore, False, vars(found))


# -- code -----------------------------------------------------------------------------------------------


def _function_places(path: str, found: FunctionType) -> Iterator[Place]:
    """The attributes and the closure of a user's function, and the globals that it names."""
    if not _is_users(found):
        return
    cells = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))

    def read_cells() -> dict[str, Any]:
        return {name: _contents(cell) for name, cell in cells.items()}

    def restore_cells(old: dict[Any, Any]) -> None:
        for name, entry in old.items():
            if entry is not MISSING:
                cells[name].cell_contents = entry

    table = vars(found)
    yield Place(found.__qualname__, lambda: table, dict(table), lambda old: _restore_dict(table, old), False)
    if cells:
        yield Place(f"closure of {found.__qualname__}", read_cells, read_cells(), restore_cells, False)
    names = tuple(_global_names(found.__code__))

    def read_globals() -> dict[str, Any]:
        return {name: found.__globals__[name] for name in names if name in found.__globals__}

    def restore_globals(old: dict[Any, Any]) -> None:
        for name in names:
            if name not in old:
                found.__globals__.pop(name, None)
        found.__globals__.update(old)

    yield Place(f"globals of {found.__module__}", read_globals, read_globals(), restore_globals, False)


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that the code looks up as globals (`co_names` holds attribute names as well)."""
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


def _parts(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    """Further objects to look at, which are no entries of a container of `found`."""
    if isinstance(found, tuple | frozenset):
        yield from ((f"{path}[{index}]", entry) for index, entry in enumerate(found))
    elif isinstance(found, MethodType):
        yield path.rpartition(".")[0] or path, found.__self__
        yield path, found.__func__
    elif isinstance(found, functools.partial):
        yield path, found.func
        yield path, (found.args, found.keywords)
    elif isinstance(found, FunctionType) and _is_users(found):
        yield f"defaults of {found.__qualname__}", found.__defaults__
        yield f"defaults of {found.__qualname__}", found.__kwdefaults__
    elif isinstance(found, type):
        if _is_users(found):
            yield from (
                (f"{found.__qualname__}.{name}", _plain(entry)) for name, entry in vars(found).items()
            )
            yield from ((base.__qualname__, base) for base in found.__bases__)
    elif not isinstance(found, FunctionType | dict | list | set | deque | weakref.ref):
        yield type(found).__qualname__, type(found)


def _plain(entry: Any) -> Any:
    """The function behind a static method, class method or property."""
    if isinstance(entry, staticmethod | classmethod):
        return entry.__func__
    return entry.fget if isinstance(entry, property) else entry


def _is_users(found: Any) -> bool:
    """Whether a function or class is written in the user's own files, not in a library."""
    code = getattr(found, "__code__", None)
    if code is not None:
        return _is_users_file(code.co_filename)
    module = sys.modules.get(found.__module__)
    return _is_users_file(getattr(module, "__file__", None) or "<unknown>")


@functools.cache
def _is_users_file(path: str) -> bool:
    name = user_file(path)
    return name is not None and "site-packages" not in path
