"""The tour prints what it says: its blocks run in order, in one program.

Blocks that are marked ``measured`` hold times of one machine: they only run, and are only written, with
``--update-golden``.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"
BLOCK = re.compile(r"^```(?P<kind>python|text)(?P<measured> measured)?\n(?P<body>.*?)^```\n", re.M | re.S)


@dataclass(frozen=True)
class Example:
    """A block of code, and the span of the output block that follows it (none: it prints nothing)."""

    code: str
    measured: bool
    shown: str
    span: tuple[int, int] | None


def examples(text: str) -> Iterator[Example]:
    blocks = list(BLOCK.finditer(text))
    for number, block in enumerate(blocks):
        if block["kind"] == "python":
            follower = blocks[number + 1] if number + 1 < len(blocks) else None
            output = follower if follower is not None and follower["kind"] == "text" else None
            span = None if output is None else output.span("body")
            shown = "" if output is None else output["body"]
            yield Example(block["body"], bool(block["measured"]), shown, span)


def run(example: Example, names: dict[str, object], line: int) -> str:
    """What the block prints; its lines are numbered as in one file ``tour.py``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + example.code, "tour.py", "exec"), names)
    return printed.getvalue()


def test_the_tour_prints_what_it_shows(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden")
    text = TOUR.read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "tour"}
    line, new = 0, []
    for example in examples(text):
        if example.measured and not update:
            continue
        printed = run(example, names, line)
        line += example.code.count("\n")
        if update and example.span is not None:
            new.append((example.span, printed))
        else:
            assert printed == example.shown, f"after:\n{example.code}"
    for (start, stop), printed in reversed(new):
        text = text[:start] + printed + text[stop:]
    if update:
        TOUR.write_text(text, encoding="utf-8")
