"""What a user types as WORKLOAD: right answers, and one clear line for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import lowtide as lt
from lowtide.workloads import load_workload

GOOD = """
import torch
import lowtide as lt
import {sibling}

PLAIN = 3

def make():
    return lt.Workload(torch.nn.Linear(2, {sibling}.WIDTH), args=(torch.zeros(1, 2),))

def optional(width=2, *rest, **more):
    return lt.Workload(torch.nn.Linear(2, width), args=(torch.zeros(1, 2),))

def needs(width, depth):
    pass

def forgets():
    make()

def refuses():
    return lt.Workload(torch.nn.Linear(2, 2), accumulate=2)

def breaks():
    return torch.zeros(2) @ torch.zeros(3)

def leaves():
    raise SystemExit("no data")
"""


def line_of(fragment: str) -> int:
    """The line of the user's file that holds a fragment."""
    return next(line for line, text in enumerate(GOOD.splitlines(), 1) if fragment in text)


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file beside a module that it imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "widths_of_mine.py").write_text("WIDTH = 5\n")
    file = tmp_path / "mine.py"
    file.write_text(GOOD.format(sibling="widths_of_mine"))
    return file


def message(text: str) -> str:
    """The one line that a wrong WORKLOAD gets."""
    with pytest.raises(lt.UsageError) as caught:
        load_workload(text)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_bundled_with_options() -> None:
    workload = load_workload(" mlp : batch=3 , dim = 8,layers=1,mode=infer")
    assert workload.args[0].shape == (3, 8)
    assert workload.name == " mlp : batch=3 , dim = 8,layers=1,mode=infer"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("unett", ["'unett'", "did you mean unet"]),
        ("zzz", ["use file.py:function, or one of mlp, unet"]),
        ("", ["''", "use file.py:function"]),
        ("mlp:widht=3", ["mlp has no option 'widht'", "mode=train|infer", "batch=4096"]),
        ("mlp:batch", ["'batch'", "not of the form name=value"]),
        ("mlp:batch=", ["'batch='", "not of the form name=value"]),
        ("mlp:batch=2.5", ["batch=2.5 is not a whole number", "batch=4096"]),
        ("mlp:batch=0", ["batch=0 is not more than zero"]),
        ("mlp:dropout=1", ["dropout=1.0 is out of range"]),
        ("mlp:dropout=much", ["dropout=much is not a number"]),
        ("mlp:mode=both", ["mode=both is unknown", "use train or infer"]),
        ("mlp:batch=2,batch=3", ["'batch'", "given twice"]),
        ("mobilenetv2:width=inf", ["width=inf is not more than zero"]),
        ("unet:size=20", ["size=20 is not a multiple of 2**depth, depth=3", "use a multiple of 8"]),
        ("gpt2:dim=10,heads=3", ["dim=10 is not a multiple of heads=3"]),
        ("vit-base:size=100", ["size=100 is not a multiple of the 16 pixel patches"]),
        ("resnet50:stages=5", ["stages=5"]),
        ("resnet50:dropout=0.1", ["resnet50 has no dropout layer"]),
        ("nowhere.py:make", ["there is no file nowhere.py"]),
        ("nowhere/train:make", ["there is no file nowhere/train"]),
        ("train.py", ["'train.py' names no function", "write train.py:function"]),
        ("train.py:", ["names no function", "write train.py:function"]),
    ],
)
def test_mistakes_are_named(text: str, fragments: list[str]) -> None:
    line = message(text)
    assert [fragment for fragment in fragments if fragment not in line] == []


def test_user_function(user_file: Path) -> None:
    workload = load_workload(f"{user_file}:make")
    assert workload.model.get_parameter("weight").shape == (5, 2)
    assert workload.name == f"{user_file}:make"


def test_user_function_with_defaults(user_file: Path) -> None:
    assert not load_workload(f"{user_file}:optional").training


@pytest.mark.parametrize(
    ("function", "fragments"),
    [
        ("mkae", ["has no function 'mkae'", "did you mean make"]),
        ("zzz", ["the functions there: make, optional, needs"]),
        ("PLAIN", ["is a int, not a function"]),
        ("needs", ["needs the arguments width, depth"]),
        ("forgets", ["returned a NoneType", "return a lowtide.Workload"]),
        ("refuses", ["accumulate is 2"]),
        ("breaks", ["breaks() of", "RuntimeError", f"mine.py:{line_of('zeros(3)')}"]),
        ("leaves", ["SystemExit: no data", f"mine.py:{line_of('SystemExit')}"]),
    ],
)
def test_user_mistakes_are_named(user_file: Path, function: str, fragments: list[str]) -> None:
    line = message(f"{user_file}:{function}")
    assert [fragment for fragment in fragments if fragment not in line] == []


@pytest.mark.parametrize(
    ("source", "fragments"),
    [
        ("def make(:\n", ["SyntaxError", "broken.py:1"]),
        ("import torch\nimport no_such_module\n", ["ModuleNotFoundError", "no_such_module", "broken.py:2"]),
    ],
)
def test_file_that_does_not_import(user_file: Path, source: str, fragments: list[str]) -> None:
    broken = user_file.with_name("broken.py")
    broken.write_text(source)
    line = message(f"{broken}:make")
    assert [fragment for fragment in fragments if fragment not in line] == []


def test_missing_transformers_is_a_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'lowtide[hf]'" in message("bert-base")
