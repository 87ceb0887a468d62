"""The message is one line that says what, where and what to do; the status is the command line's."""

from __future__ import annotations

import pytest

import lowtide as lt


def test_message_has_what_where_and_remedy() -> None:
    error = lt.CaptureError("the model prints", source="net.py:7", remedy="remove the print")
    assert str(error) == "the model prints (at net.py:7): remove the print"


def test_message_without_where_and_remedy() -> None:
    assert str(lt.Stale("lr changed")) == "lr changed"


def test_infeasible_carries_the_floor() -> None:
    error = lt.Infeasible("memory 1 B is under the floor", floor_bytes=9, node="head", remedy="raise it")
    assert (error.floor_bytes, error.node, error.remedy, error.exit_status) == (9, "head", "raise it", 3)


@pytest.mark.parametrize(
    "kind", [lt.CaptureError, lt.PlanFileError, lt.ShapeMismatch, lt.Stale, lt.UsageError]
)
def test_other_errors_are_the_users(kind: type[lt.LowtideError]) -> None:
    assert kind.exit_status == 2
