"""The table of axis rules: operator overload -> rule.

Operators that PyTorch tags `pointwise` share one rule and need no entry; a few more act element by
element and lack the tag.  An operator with neither is opaque: it runs as a whole, always.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.analysis.axis import Call, Link, Rule, arguments_of, is_pointwise
from lowtide.analysis.axis_rules_products import PRODUCT_RULES
from lowtide.analysis.axis_rules_rows import ROW_RULES
from lowtide.analysis.axis_rules_views import VIEW_RULES
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Aten, refs_in

__all__ = ["AXIS_RULES", "DENSE", "dense_inputs", "rule_of"]


def _pointwise(call: Call) -> Iterator[Link]:
    """Every output dimension is a loop; inputs are broadcast from the right."""
    out = call.outputs[0].shape
    tensors = {name: arg.shape for name, arg in call.arguments.items() if isinstance(arg, TensorMeta)}
    if any(not _broadcasts(shape, out) for shape in tensors.values()):
        return
    for dim, extent in enumerate(out):
        if extent > 1:
            cut = {name: _aligned(shape, dim - len(out), extent) for name, shape in tensors.items()}
            yield Link(extent, cut, (dim,) * len(call.outputs))


def _broadcasts(shape: tuple[int, ...], out: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(out), strict=False)
    return len(shape) <= len(out) and all(size in (1, whole) for size, whole in pairs)


def _aligned(shape: tuple[int, ...], from_right: int, extent: int) -> int | None:
    dim = len(shape) + from_right
    return dim if dim >= 0 and shape[dim] == extent else None


_UNTAGGED_POINTWISE = (
    "aten._to_copy.default",
    "aten.alias.default",
    "aten.copy.default",
    "aten.detach.default",
    "aten.elu_backward.default",
    "aten.empty_like.default",
    "aten.fill.Scalar",
    "aten.full_like.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.leaky_relu_backward.default",
    "aten.lift_fresh_copy.default",
    "aten.log_sigmoid_backward.default",
    "aten.masked_fill.Tensor",
    "aten.mish_backward.default",
    "aten.ones_like.default",
    "aten.softplus_backward.default",
    "aten.zeros_like.default",
)

AXIS_RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNTAGGED_POINTWISE, _pointwise),
    **VIEW_RULES,
    **PRODUCT_RULES,
    **ROW_RULES,
}


def rule_of(overload: str) -> Rule | None:
    """The rule of an operator; None if it is opaque."""
    found = AXIS_RULES.get(overload)
    if found is None and is_pointwise(overload):
        return _pointwise
    return found


DENSE: dict[str, tuple[str, ...]] = {
    "aten.native_group_norm.default": ("input", "weight", "bias"),
    "aten.native_group_norm_backward.default": ("grad_out", "input", "mean", "rstd", "weight"),
    "aten.native_layer_norm_backward.default": ("mean", "rstd"),
}
"""Arguments whose strides the CPU kernel ignores (or refuses): a slice must be copied first.

Eager never passes a strided one, so the backward kernels read wrong numbers without a word.
"""


def dense_inputs(op: Aten) -> tuple[int, ...]:
    """Positions of the inputs that must be contiguous when `op` runs on slices."""
    names = DENSE.get(op.overload, ())
    given = arguments_of(op) if names else {}
    return tuple(position for name in names for position in refs_in(given.get(name)))
