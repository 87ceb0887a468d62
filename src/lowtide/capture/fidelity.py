"""Operators whose fake results are not what the CPU gives, and how to get the truth.

Problem.  A fake kernel is a second implementation of an operator's shapes.  A few are wrong: oneDNN's
recurrent layer returns a workspace while gradients are enabled and none otherwise; its fake kernel always
returns an empty one.

Method.  These few run for real, once per call, on zeros; the fake results are made after the real ones.
Found by comparing every result of the tests' executor with its meta.

Not done: training through oneDNN's recurrent layer.  A graph runs without autograd, where the layer does not
make the workspace that its backward needs; so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.internals import FakeTensorMode, outside_modes, pytree
from lowtide.errors import CaptureError

__all__ = ["run_faithfully"]

_MEASURED = frozenset({"aten.mkldnn_rnn_layer.default"})


def run_faithfully(
    name: str, operator: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode
) -> Any:
    """The fake results of an operator, with the shapes, strides and storages of the real ones."""
    if name not in _MEASURED:
        return operator(*args, **kwargs)
    if torch.is_grad_enabled():
        raise CaptureError(
            "oneDNN's recurrent layer cannot be trained outside of autograd",
            remedy="set torch.backends.mkldnn.enabled = False, in eager too: it then runs step by step",
        )
    with outside_modes(), torch.no_grad():
        real = operator(*_mapped(_zeros_like, args), **_mapped(_zeros_like, kwargs))
        with mode:
            return _mapped(_empty_like, real)


def _mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _zeros_like(fake: Tensor) -> Tensor:
    zeros = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return zeros.zero_()


def _empty_like(real: Tensor) -> Tensor:
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
