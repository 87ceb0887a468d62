"""Which operators may write their result over a dying input.

Problem.  Capture turns every in-place call into its functional form, so that a graph has no hidden
order.  Memory wants the opposite: `relu(x)` with a dead `x` needs no second buffer.

Method.  `INPLACE` lists, as data, operators whose kernel has read an element of each input before it
writes the same element of the output, and reads it no more: TensorIterator kernels that PyTorch tags
`pointwise`, softmax, which goes row by row, and scatters, which write a part of a whole.
`tests/differential/test_inplace.py` calls every overload of each name with its result at the address of
each input and compares with the ordinary call; an operator that is not tested there is not listed here.
`donors` adds what the table cannot know: the window must be exactly the same, and must be all of its
storage.

Invariants.  A donor has the output's shape, strides and element type, so that equal positions are
equal addresses; it is never broadcast, never resident, never a result of the graph.  What takes over may be
a result: then all that came before in these bytes lies where the caller gets them.  A node has one
donor at most, since only nodes with a single output have any.

Fused kernels say themselves which pairs are safe (`OperatorFacts.inplace`); `kernel_donors` asks the same of
the windows.

Not done.  Operators with several outputs (the backward of a normalisation would be safe).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import cast

from lowtide.ir.graph import Graph, Node, Role, TensorMeta, Value
from lowtide.ir.ops import Aten, Ref

__all__ = ["INPLACE", "SCATTERS", "covers_storage", "donors", "kernel_donors"]

# fmt: off
_POINTWISE = (
    # arithmetic
    "abs", "add", "addcdiv", "addcmul", "atan2", "clamp", "clamp_max", "clamp_min", "div", "fmod",
    "lerp", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "remainder", "rsub", "sign",
    "square", "sub", "true_divide", "where",
    # rounding
    "ceil", "floor", "frac", "round", "trunc",
    # transcendental
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "log", "log10",
    "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan",
    # activations and their derivatives
    "elu", "elu_backward", "gelu", "gelu_backward", "hardsigmoid", "hardsigmoid_backward",
    "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu",
    "leaky_relu_backward", "mish", "relu", "sigmoid", "sigmoid_backward", "silu", "silu_backward",
    "softplus", "softplus_backward", "tanh", "tanh_backward", "threshold", "threshold_backward",
    # logic (result and operand both bool)
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "eq", "ge", "gt", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "ne",
)
# fmt: on

SCATTERS = ("as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter")
"""Operators that the executor runs as a copy of the whole, if that is elsewhere, and one of the part."""

INPLACE: Mapping[str, tuple[int, ...] | None] = MappingProxyType(
    {
        **dict.fromkeys(_POINTWISE),
        **dict.fromkeys(SCATTERS, (0,)),
        # copies its first argument before it reads the mask
        "masked_fill": (0,),
        # row by row: reads a row before it writes it
        "_log_softmax": (0,),
        "_log_softmax_backward_data": (0, 1),
        "_softmax": (0,),
        "_softmax_backward_data": (0, 1),
    }
)
"""Base name in the aten namespace -> arguments that the result may be written over; None: any."""


def donors(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Node id -> storages that its single output may take over if they die there, in input order.

    Nodes without any are absent.  What depends on the order (whether they die there) is left to the
    caller.
    """
    private = _private(graph)
    found = {}
    for node in graph.nodes:
        if len(node.outputs) != 1 or not (candidates := _overwritable(node)):
            continue
        out = graph.values[node.outputs[0]]
        windows = [graph.values[value] for value in node.inputs]
        if same := _matching(graph, out, windows, private):
            allowed = {graph.values[value].storage for value in candidates}
            if takes := tuple(storage for storage in same if storage in allowed):
                found[node.id] = takes
    return found


def kernel_donors(graph: Graph, node: Node, pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Storage of an output -> storages that it may take over if they die there, for a fused kernel.

    `pairs` are the (output, input) positions that the kernel lets share memory.
    """
    private = _private(graph)
    windows = [graph.values[value] for value in node.inputs]
    found: dict[int, tuple[int, ...]] = {}
    given: set[int] = set()
    for position, source in pairs:
        out = graph.values[node.outputs[position]]
        if windows[source].storage in given:
            continue  # one result only
        same = _matching(graph, out, windows, private)
        alone = sum(each.storage == windows[source].storage for each in windows) == 1
        if alone and windows[source].storage in same:
            found[out.storage] = (*found.get(out.storage, ()), windows[source].storage)
            given.add(windows[source].storage)
    return found


def _private(graph: Graph) -> frozenset[int]:
    """`_private_storages`, indexed once per graph."""
    found = graph.memo.get(_private_storages)
    if found is None:
        found = graph.memo[_private_storages] = _private_storages(graph)
    return cast("frozenset[int]", found)


def _overwritable(node: Node) -> tuple[int, ...]:
    """The inputs that the kernel of `node` tolerates to be overwritten by its result."""
    if not isinstance(node.op, Aten) or node.writes:
        return ()
    namespace, name, *_ = node.op.overload.split(".")
    if namespace != "aten" or name not in INPLACE:
        return ()
    positions = INPLACE[name]
    if positions is None:
        return node.inputs
    args = [node.op.args[position] for position in positions if position < len(node.op.args)]
    return tuple(node.inputs[arg.index] for arg in args if isinstance(arg, Ref))


def _private_storages(graph: Graph) -> frozenset[int]:
    """Storages that the graph alone uses: neither the caller's nor handed to the caller."""
    shared = {graph.values[value].storage for value in (*graph.inputs, *graph.outputs)}
    return frozenset(
        storage.id
        for storage in graph.storages.values()
        if storage.id not in shared
        and not storage.role.resident
        and storage.role not in (Role.OUTPUT, Role.HOST)
    )


def _matching(graph: Graph, out: Value, windows: list[Value], private: frozenset[int]) -> tuple[int, ...]:
    """Private storages whose every window among `windows` is all of the storage, laid out as `out`."""
    # Strides of one-element axes count: PyTorch refuses to write over what they make look different.
    differs = {window.storage for window in windows if window.meta != out.meta}
    given = dict.fromkeys(window.storage for window in windows)
    same = [storage for storage in given if storage in private and storage not in differs]
    resident = graph.storages[out.storage].role.resident
    if not same or resident or out.storage in given or not covers_storage(graph, out):
        return ()
    # A window with the layout of `out` on a storage of equal size is all of it: it has no room to be moved.
    nbytes = graph.storages[out.storage].nbytes
    return tuple(storage for storage in same if graph.storages[storage].nbytes == nbytes)


def covers_storage(graph: Graph, value: Value) -> bool:
    """Whether `value` addresses every byte of its storage exactly once."""
    nbytes = value.meta.nbytes
    return (
        value.offset == 0
        and nbytes > 0
        and nbytes == graph.storages[value.storage].nbytes
        and (value.meta.contiguous or _is_dense(value.meta))
    )


def _is_dense(meta: TensorMeta) -> bool:
    """Whether the strides are those of a contiguous tensor with its axes permuted."""
    expected = 1
    for step, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
