"""What a step returns, in the user's own types.

Leaves of the returned tree are tensors of the graph or constants; the tree's spec (PyTorch's pytree) rebuilds
dictionaries, tuples, named tuples and `ModelOutput`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.capture.internals import pytree

__all__ = ["Constant", "Result"]


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor: a number, a string, None."""

    content: Any


@dataclass(frozen=True, eq=False)
class Result:
    """`leaves` are value ids or Constants, in the order of `spec`."""

    leaves: tuple[int | Constant, ...]
    spec: Any

    def rebuild(self, tensors: Mapping[int, Tensor]) -> Any:
        """The user's object, with `tensors[value]` at each tensor leaf."""
        leaves = [leaf.content if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)
