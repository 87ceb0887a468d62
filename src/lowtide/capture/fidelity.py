"""Operators whose fake results are not what the CPU gives, and how to get the truth.

Problem.  A fake kernel is a second implementation of an operator's shapes and types, and a few are wrong.
Normalisations of bfloat16 with float32 weights return float32 statistics on the CPU, bfloat16 ones as fakes.
oneDNN's recurrent layer returns a workspace while gradients are enabled and none otherwise; its fake kernel
always returns an empty one.  The embedding bag keeps more or fewer offsets than its fake.  And whether the
backward of a convolution with a frozen weight and a trained bias returns the weight's gradient depends on the
library that runs it.

Method.  A table of rules for element types and absent results, a list of operators that run for real, on
zeros, and arguments that are changed so that the answer is the same everywhere.  All were found by comparing
every result of a real run with its fake, over PyTorch's own operator samples.

Not done: training through oneDNN's recurrent layer.  A graph runs without autograd, where the layer does not
make the workspace that its backward needs; so it is refused.  Devices other than the CPU: fakes are believed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.internals import FakeTensorMode, outside_modes, pytree
from lowtide.errors import CaptureError

__all__ = ["run_faithfully", "settle_arguments"]

Arguments = Mapping[str, Any]
Types = Mapping[int, torch.dtype | None]
"""Position of a result -> its element type, None for a result that does not exist."""

_RECURRENT = "aten.mkldnn_rnn_layer.default"
_MEASURED = frozenset({_RECURRENT, "aten._embedding_bag.default"})


def run_faithfully(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> Any:
    """The fake results of an operator, with the shapes, strides and types of the real ones.

    Runs under `mode`, on fake tensors.  Raises CaptureError for an operator that a graph cannot run.
    """
    name = str(operator)
    if name == _RECURRENT and torch.is_grad_enabled():
        raise CaptureError(
            "oneDNN's recurrent layer cannot be trained outside of autograd",
            remedy="set torch.backends.mkldnn.enabled = False, in eager too: it then runs step by step",
        )
    if name in _MEASURED:
        return _measure(operator, args, kwargs, mode)
    result = operator(*args, **kwargs)
    rule = _TYPES.get(name)
    if rule is None:
        return result
    schema = operator._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)} | dict(kwargs)
    types = rule(given)
    return tuple(
        _retyped(one, types[position]) if position in types else one for position, one in enumerate(result)
    )


def settle_arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with which the kinds of results do not depend on the backend; their bits stay the same."""
    if name == "aten.convolution_backward.default":
        of_input, of_weight, of_bias = args[-1]
        return (*args[:-1], [of_input, of_weight or of_bias, of_bias])
    return args


def _measure(operator: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
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


def _retyped(fake: Any, dtype: torch.dtype | None) -> Any:
    if fake is None or fake.device.type != "cpu" or dtype == fake.dtype:
        return fake
    if dtype is None:
        return None
    return torch.empty_strided(fake.shape, fake.stride(), dtype=dtype, device=fake.device)


def _statistics(given: Arguments) -> Types:
    """Mean and reciprocal deviation have the type of the parameters, if there are any."""
    names = ("weight", "bias", "running_mean", "running_var", "input")
    dtype: torch.dtype = next(given[name].dtype for name in names if given.get(name) is not None)
    return {1: dtype, 2: dtype}


def _functional_statistics(given: Arguments) -> Types:
    """The new running statistics have the type of the old ones."""
    return {**_statistics(given), 3: given["running_mean"].dtype, 4: given["running_var"].dtype}


def _input_gradient(given: Arguments) -> Types:
    return {0: given["input"].dtype}


def _masked_gradient(given: Arguments) -> Types:
    return {} if given["output_mask"][0] else {0: None}


_TYPES: Mapping[str, Callable[[Arguments], Types]] = {
    "aten.native_layer_norm.default": _statistics,
    "aten.native_group_norm.default": _statistics,
    "aten.native_batch_norm.default": _statistics,
    "aten._native_batch_norm_legit_functional.default": _functional_statistics,
    "aten.native_group_norm_backward.default": _input_gradient,
    "aten.native_batch_norm_backward.default": _masked_gradient,
}
