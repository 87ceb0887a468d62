"""The house: imports point downward only, files and functions stay small, names say what is inside."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lowtide"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = [pytest.param(file, id=str(file.relative_to(SOURCE))) for file in FILES]

# From the bottom up.  A package may import from lower floors and from itself; two packages on one floor
# do not know each other, except on the ground floor.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "units", "kernel", "ir"}),
    frozenset({"workload"}),
    frozenset({"workloads"}),
    frozenset({"capture", "analysis"}),
    frozenset({"schedule", "place"}),
    frozenset({"run"}),
    frozenset({"cost"}),
    frozenset({"transforms", "fusion"}),
    frozenset({"search"}),
    frozenset({"report"}),
    frozenset({"terminal", "door"}),
    frozenset({"__init__"}),  # the door
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

MOST_LINES = 450
MOST_FUNCTION_LINES = 60
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}


def part_of(file: Path) -> str:
    """The package or top-level module that a file belongs to."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a file imports, type-checking and lazy imports included."""
    package = ("lowtide", *file.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            target = ".".join((*start, *((node.module,) if node.module else ())))
            # `from lowtide import units` names a part, `from lowtide.units import x` does not.
            yield from ((node.lineno, f"{target}.{name.name}") for name in node.names)


def test_every_part_has_a_floor() -> None:
    assert {part_of(file) for file in FILES} <= set(FLOOR_OF)


def floor_faults(file: Path, imports: Iterator[tuple[int, str]]) -> list[str]:
    """Imports that point upward or sideways, as ``line: name``."""
    ours = part_of(file)
    faults = []
    for line, name in imports:
        words = name.split(".")
        if words[0] != "lowtide":
            continue
        theirs = words[1] if len(words) > 1 and words[1] in FLOOR_OF else "__init__"
        ground = FLOOR_OF[ours] == FLOOR_OF[theirs] == 0
        if theirs != ours and not ground and FLOOR_OF[theirs] >= FLOOR_OF[ours]:
            faults.append(f"{line}: {name}")
    return faults


@pytest.mark.parametrize("file", MODULES)
def test_imports_point_downward(file: Path) -> None:
    assert floor_faults(file, imported_modules(file)) == []


@pytest.mark.parametrize(
    ("part", "name", "allowed"),
    [
        ("ir", "lowtide.capture.program", False),
        ("capture", "lowtide.analysis.facts", False),
        ("transforms", "lowtide.fusion.mapping", False),
        ("schedule", "lowtide.place.problem", False),
        ("run", "lowtide.capture.program", True),
        ("ir", "lowtide.errors.UsageError", True),
        ("search", "lowtide.optimize", False),
        ("run", "torch.nn", True),
    ],
)
def test_the_check_itself(part: str, name: str, allowed: bool) -> None:
    assert (floor_faults(SOURCE / part / "x.py", iter([(1, name)])) == []) is allowed


@pytest.mark.parametrize("file", MODULES)
def test_file_is_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < MOST_LINES


@pytest.mark.parametrize("file", MODULES)
def test_functions_are_short(file: Path) -> None:
    functions = (
        node
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES} == {}


@pytest.mark.parametrize("file", MODULES)
def test_module_name_says_what_is_inside(file: Path) -> None:
    words = {word for part in file.relative_to(SOURCE).parts for word in part.removesuffix(".py").split("_")}
    assert not words & EMPTY_NAMES


@pytest.mark.parametrize("file", MODULES)
def test_module_has_a_docstring(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    declared = {requirement.split(">")[0].split("=")[0].lower() for requirement in requirements}
    imported = {name.split(".")[0] for file in FILES for _, name in imported_modules(file)}
    foreign = {name for name in imported if name not in sys.stdlib_module_names and name != "lowtide"}
    assert {name.lower().replace("_", "-") for name in foreign} <= declared
