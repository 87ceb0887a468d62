"""Buffers grouped by module path, largest first.

Method.  Every holder goes down the tree along the dots of its module path; a group with a single
sub-group and nothing of its own is joined with it, so that ``encoder.layers.3`` is one row when nothing
else lives under ``encoder``.  Bytes of a group are the sum over everything below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.report.data import Holder

__all__ = ["Group", "group_by_module"]

OUTSIDE = "outside the modules"


@dataclass(frozen=True)
class Group:
    """A module and what it holds: its own holders, and those of the modules inside it."""

    path: str
    nbytes: int
    groups: tuple[Group, ...] = ()
    holders: tuple[Holder, ...] = ()

    @property
    def count(self) -> int:
        """How many holders there are in this group and below."""
        return len(self.holders) + sum(group.count for group in self.groups)


def group_by_module(holders: Iterable[Holder]) -> Group:
    """The tree of all `holders`; its root has the empty path."""
    return _grow("", tuple(holders))


def _grow(path: str, holders: tuple[Holder, ...]) -> Group:
    below: dict[str, list[Holder]] = {}
    own: list[Holder] = []
    for holder in holders:
        place = holder.module or OUTSIDE
        if place == path:
            own.append(holder)
        else:
            below.setdefault(_child(path, place), []).append(holder)
    groups = [_joined(_grow(child, tuple(found))) for child, found in below.items()]
    groups.sort(key=lambda group: (-group.nbytes, group.path))
    own.sort(key=lambda holder: (-holder.nbytes, holder.label, holder.source))
    return Group(path, sum(holder.nbytes for holder in holders), tuple(groups), tuple(own))


def _child(path: str, module: str) -> str:
    """The module one level below `path` on the way to `module`."""
    rest = module[len(path) + 1 :] if path else module
    head = rest.split(".", 1)[0]
    return f"{path}.{head}" if path else head


def _joined(group: Group) -> Group:
    while len(group.groups) == 1 and not group.holders:
        group = group.groups[0]
    return group
