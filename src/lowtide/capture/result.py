"""What a step returns, in the user's own types.

Leaves of the returned tree are tensors of the graph or constants; the tree's spec (PyTorch's pytree) rebuilds
dictionaries, tuples, named tuples and `ModelOutput`s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.internals import flatten, pytree
from lowtide.errors import CaptureError

__all__ = ["CONSTANT_TYPES", "Constant", "Result", "Returned", "leaves_of"]

CONSTANT_TYPES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""What may stand beside tensors in arguments and results, as part of the program."""


@dataclass(frozen=True)
class Constant:
    """A leaf that is no tensor: a number, a string, None."""

    content: Any


@dataclass(frozen=True)
class Returned:
    """What a recording returned: names of the trace's results, or Constants, in the order of `spec`."""

    leaves: tuple[str | Constant, ...]
    spec: Any


def leaves_of(output: Any) -> tuple[list[tuple[str, Tensor]], Returned]:
    """The tensors in a returned object, named ``out:<position>``, and the rest.

    Raises CaptureError for leaves that are neither tensors nor constants.
    """
    found, spec = flatten(output)
    tensors: list[tuple[str, Tensor]] = []
    leaves: list[str | Constant] = []
    for position, (path, leaf) in enumerate(found):
        if isinstance(leaf, Tensor):
            leaves.append(f"out:{position}")
            tensors.append((f"out:{position}", leaf))
        elif isinstance(leaf, CONSTANT_TYPES):
            leaves.append(Constant(leaf))
        else:
            where = f" at {path}" if path else ""
            raise CaptureError(
                f"the model returns a {type(leaf).__name__}{where}",
                remedy="return tensors, numbers, None in tuples, dicts or ModelOutputs (use_cache=False)",
            )
    return tensors, Returned(tuple(leaves), spec)


@dataclass(frozen=True, eq=False)
class Result:
    """`leaves` are value ids or Constants, in the order of `spec`."""

    leaves: tuple[int | Constant, ...]
    spec: Any

    @classmethod
    def of(cls, returned: Returned, values: Mapping[str, int]) -> Result:
        """The result whose named leaves are these values."""
        leaves = tuple(leaf if isinstance(leaf, Constant) else values[leaf] for leaf in returned.leaves)
        return cls(leaves, returned.spec)

    def rebuild(self, tensors: Mapping[int, Tensor]) -> Any:
        """The user's object, with `tensors[value]` at each tensor leaf."""
        leaves = [leaf.content if isinstance(leaf, Constant) else tensors[leaf] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)
