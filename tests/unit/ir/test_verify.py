"""Each invariant is found when it is broken, and sound graphs pass."""

from __future__ import annotations

import re

import pytest
from tests.unit.ir.broken import BROKEN, FISSION, SOUND, SWAP, UPDATE, Build

import lowtide.ir.verify as module
from lowtide.ir.text import parse_graph
from lowtide.ir.verify import InvalidGraph, verify


@pytest.mark.parametrize("text", [SOUND, FISSION, UPDATE, SWAP])
def test_sound_graphs_pass(text: str) -> None:
    verify(parse_graph(text))


@pytest.mark.parametrize(
    ("invariant", "build", "word"), BROKEN, ids=lambda x: x if isinstance(x, int) else ""
)
def test_broken_graphs_are_refused(invariant: int, build: Build, word: str) -> None:
    with pytest.raises(InvalidGraph) as caught:
        verify(build())
    assert caught.value.invariant == invariant
    assert word in str(caught.value)


def test_every_invariant_has_a_broken_graph_and_a_line_in_the_docstring() -> None:
    numbered = {int(number) for number in re.findall(r"^ ?(\d+)\. ", module.__doc__ or "", re.MULTILINE)}
    assert numbered == {invariant for invariant, _, _ in BROKEN}
    assert numbered == set(range(1, len(numbered) + 1))


def test_a_fault_names_node_line_and_values() -> None:
    broken = SOUND.replace("%3: f32[8,4] =", "%3: f32[8,4] 100B =")
    with pytest.raises(InvalidGraph) as caught:
        verify(parse_graph(broken))
    assert caught.value.node == 3
    assert caught.value.values == (3,)
    assert "; node 3: `%3: f32[8,4]" in str(caught.value)
    assert "model.py:3" in str(caught.value)


def test_a_fault_in_a_body_says_where_the_body_is() -> None:
    broken = FISSION.replace("    %2: f32[4,4] =", "    %2: f32[4,4] 8B =")
    with pytest.raises(InvalidGraph, match="; in body 0 of Fission node 2"):
        verify(parse_graph(broken))
