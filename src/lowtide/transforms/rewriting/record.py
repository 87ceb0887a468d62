"""What rewriting did: `Applied` per rewrite, and the Edit that lists them."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.ir.edit import Edit

__all__ = ["Applied", "Rewritten", "then"]


@dataclass(frozen=True)
class Applied:
    """One rewrite: the rule's name, the value where, FLOPs and bytes moved that it saves."""

    rule: str
    value: int
    flops: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True)
class Rewritten(Edit):
    """An Edit that says what was applied, in order."""

    applied: tuple[Applied, ...] = ()


def then(first: Rewritten, second: Rewritten) -> Rewritten:
    """Two edits, one after the other."""
    forward = {value: None if new is None else second.resolve(new) for value, new in first.forward.items()}
    forward.update({value: new for value, new in second.forward.items() if value not in forward})
    return Rewritten(second.graph, forward, (*first.applied, *second.applied))
