"""The result of a transformation: the new graph, and where each old value went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.ir.graph import Graph

__all__ = ["Edit"]


@dataclass(frozen=True)
class Edit:
    """A new graph and the forwarding from old value ids to new ones.

    Ids that are absent from `forward` kept their meaning.  A value that no longer exists maps to
    None (it became interior to a region or dead).
    """

    graph: Graph
    forward: Mapping[int, int | None] = field(default_factory=dict)

    def resolve(self, value: int) -> int | None:
        """Where old value `value` lives now; None if it no longer exists."""
        return self.forward.get(value, value)
