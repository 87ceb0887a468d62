"""From what a user types to a Workload.

Two spellings: a bundled name with options (``unet:batch=8,size=128,mode=train``), and a function of the
user's own (``file.py:function``).  Every mistake becomes one UsageError that names it and says what would
have been right; an exception in the user's file is reported with its own line there.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from lowtide.errors import LowtideError, UsageError
from lowtide.workload import Workload
from lowtide.workloads.catalog import BUNDLED, Option, options_of

__all__ = ["load_workload"]

MOST_LISTED = 8
SEE = "see `lowtide workloads`"


def load_workload(text: str) -> Workload:
    """The Workload that `text` names, built; its `name` is `text`.

    Raises UsageError for an unknown name, file, function or option, for a value of the wrong type, and for a
    user's function that fails or returns something else.
    """
    head, _, tail = text.partition(":")
    if ".py:" in text or head.endswith(".py") or "/" in head:
        workload = _from_file(text)
    else:
        workload = _bundled(head.strip(), tail)
    return dataclasses.replace(workload, name=text)


def _bundled(name: str, options: str) -> Workload:
    if name not in BUNDLED:
        near = _nearest(name, BUNDLED)
        hint = f"did you mean {near}?" if near else f"use file.py:function, or one of {', '.join(BUNDLED)}"
        raise UsageError(f"no bundled workload is called {name!r}", remedy=hint)
    known = {option.name: option for option in options_of(BUNDLED[name])}
    given: dict[str, int | float | str] = {}
    for item in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise UsageError(f"option {item!r} of {name} is not of the form name=value", remedy=SEE)
        if key not in known:
            raise UsageError(
                f"{name} has no option {key!r}", remedy=f"it has {', '.join(map(str, known.values()))}"
            )
        if key in given:
            raise UsageError(f"option {key!r} of {name} is given twice", remedy="give it once")
        given[key] = _convert(name, known[key], value)
    return BUNDLED[name](**given)


def _convert(name: str, option: Option, text: str) -> int | float | str:
    if option.kind is str:
        if text not in option.choices:
            raise UsageError(
                f"{name}: {option.name}={text} is unknown", remedy=f"use {' or '.join(option.choices)}"
            )
        return text
    what = "a whole number" if option.kind is int else "a number"
    try:
        number = int(text) if option.kind is int else float(text)
    except ValueError:
        raise UsageError(
            f"{name}: {option.name}={text} is not {what}",
            remedy=f"for example {option.name}={option.default}",
        ) from None
    _check_range(name, option, number)
    return number


def _check_range(name: str, option: Option, number: float) -> None:
    if option.name == "dropout":
        if not 0 <= number < 1:
            raise UsageError(
                f"{name}: dropout={number} is out of range", remedy="use 0 or more, and less than 1"
            )
    elif not (math.isfinite(number) and number > 0):
        raise UsageError(
            f"{name}: {option.name}={number} is not more than zero", remedy="use a positive number"
        )


def _from_file(text: str) -> Workload:
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise UsageError(f"{text!r} names no function", remedy=f"write {text.rstrip(':')}:function")
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file {path}", remedy="give the path from the current folder")
    module = _import(file)
    function = _find(module, file, name)
    workload = _guard(function, file, f"{name}()")
    if not isinstance(workload, Workload):
        raise UsageError(
            f"{path}:{name} returned a {type(workload).__name__}", remedy="return a lowtide.Workload"
        )
    return workload


def _import(file: Path) -> ModuleType:
    """Run the user's file as a module; its folder is put on the path, as Python does for a script."""
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_name = f"lowtide_workload_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file", remedy="its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    loader = spec.loader
    _guard(lambda: loader.exec_module(module), file, "import")
    return module


def _find(module: ModuleType, file: Path, name: str) -> Callable[[], object]:
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    if not hasattr(module, name):
        near = _nearest(name, functions)
        listed = ", ".join(functions[:MOST_LISTED]) or "none"
        hint = f"did you mean {near}?" if near else f"the functions there: {listed}"
        raise UsageError(f"{file} has no function {name!r}", remedy=hint)
    found = getattr(module, name)
    if not callable(found):
        raise UsageError(
            f"{file}:{name} is a {type(found).__name__}, not a function",
            remedy="name a function without required arguments that returns a lowtide.Workload",
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(found).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if needed:
        raise UsageError(
            f"{file}:{name} needs the arguments {', '.join(needed)}",
            remedy="give them defaults: Lowtide calls the function without arguments",
        )
    return found  # type: ignore[no-any-return]


def _guard(call: Callable[[], object], file: Path, doing: str) -> object:
    """Run the user's code; what it raises becomes a UsageError with the line in the user's file."""
    try:
        return call()
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        source = _line_in(file, error)
        raise UsageError(
            f"{doing} of {file} failed with {type(error).__name__}: {_one_line(error)}", source=source
        ) from error


def _line_in(file: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if Path(frame.filename) == file or Path(frame.filename) == file.resolve()
    ]
    return f"{file}:{ours[-1].lineno}" if ours else str(file)


def _one_line(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return " ".join(text.split())


def _nearest(name: str, known: Iterable[str]) -> str:
    """The most similar known names, "" if none is similar."""
    return " or ".join(difflib.get_close_matches(name, list(known), n=2, cutoff=0.5))
