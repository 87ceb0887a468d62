"""Grouping by module."""

from __future__ import annotations

from lowtide.report.data import Holder
from lowtide.report.tree import Group, group_by_module


def holder(nbytes: int, module: str) -> Holder:
    return Holder(nbytes, "aten.relu.default", module)


def leaves(group: Group) -> list[Holder]:
    return [*group.holders, *(leaf for below in group.groups for leaf in leaves(below))]


def test_bytes_add_up_and_the_largest_comes_first() -> None:
    root = group_by_module([holder(1, "a.x"), holder(5, "b"), holder(2, "a.y"), holder(1, "a")])
    assert root.nbytes == 9 and root.count == 4
    assert [(group.path, group.nbytes) for group in root.groups] == [("b", 5), ("a", 4)]
    assert [group.path for group in root.groups[1].groups] == ["a.y", "a.x"]
    assert [found.nbytes for found in root.groups[1].holders] == [1]


def test_a_chain_of_single_modules_is_one_row() -> None:
    root = group_by_module([holder(1, "model.encoder.0"), holder(1, "model.encoder.1")])
    assert [group.path for group in root.groups] == ["model.encoder"]
    assert [group.path for group in root.groups[0].groups] == ["model.encoder.0", "model.encoder.1"]


def test_a_name_that_begins_like_another_is_not_inside_it() -> None:
    root = group_by_module([holder(1, "enc"), holder(2, "encoder.a"), holder(4, "enc.a")])
    assert {group.path: group.nbytes for group in root.groups} == {"enc": 5, "encoder.a": 2}


def test_nothing_is_lost() -> None:
    given = [holder(i, module) for i, module in enumerate(["", "a", "a.b", "a.b.c", "a.b", "z.y.x", ""])]
    root = group_by_module(given)
    assert sorted(leaves(root), key=lambda h: h.nbytes) == given
    assert "outside the modules" in {group.path for group in root.groups}
