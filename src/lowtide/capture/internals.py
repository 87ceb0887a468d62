"""The private parts of PyTorch that capture stands on, probed once, wrapped here and nowhere else.

Needed without substitute: fake tensors and the dispatch mode.  Where only comfort is lost there is a
fallback: without the autograd node of a running backward operator, backward nodes carry no module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "building_without_data",
    "current_autograd_node",
    "flatten",
    "outside_modes",
    "pytree",
    "sequence_number",
    "storage_key",
    "without_addresses",
]


def _nothing() -> None:
    return None


def _zero() -> int:
    return 0


current_autograd_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _nothing)
"""The autograd node whose backward is running in this thread, or None."""

sequence_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", _zero)
"""One more than the sequence number of the autograd node that was made last in this thread."""

_TRUNCATED = "_no_grad_trunc_normal_"

outside_modes = _disable_current_modes
"""Context manager: real tensors behave as if no dispatch mode were active."""


def without_addresses() -> FakeTensorMode:
    """A mode whose tensors raise where a program asks for their addresses (they would be zero)."""
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False
    return mode


@contextmanager
def building_without_data() -> Iterator[None]:
    """Inside, tensors are fake: a model of any size can be built, and has no contents.

    Initialisers that draw until their values please look at data; the one that common models use, the
    truncated normal, leaves a fake tensor as it is.
    """
    drawing = getattr(nn.init, _TRUNCATED, None)

    def skip_fake(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(tensor, FakeTensor) or drawing is None:
            return tensor
        return drawing(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    with FakeTensorMode():
        if drawing is not None:
            setattr(nn.init, _TRUNCATED, skip_fake)
        try:
            yield
        finally:
            if drawing is not None:
                setattr(nn.init, _TRUNCATED, drawing)


def storage_key(tensor: Tensor) -> int:
    """The address of a tensor's storage record: equal for two tensors exactly if they share it."""
    return int(tensor.untyped_storage()._cdata)


def flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves with their paths (``0.ids``, empty for a bare leaf), and the spec that rebuilds the tree."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return [(_path_name(path), leaf) for path, leaf in leaves], spec


def _path_name(path: tuple[Any, ...]) -> str:
    return ".".join(_key_name(key) for key in path)


def _key_name(key: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
