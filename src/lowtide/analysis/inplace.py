"""Which operators may write their result over a dying input.

Problem.  Capture turns every in-place call into its functional form, so that a graph has no hidden
order.  Memory wants the opposite: `relu(x)` with a dead `x` needs no second buffer.

Method.  `INPLACE` lists, as data, operators whose kernel reads an element of each input before it
writes the same element of the output, and reads no other element: TensorIterator kernels that
PyTorch tags `pointwise`.  `tests/differential/test_inplace.py` calls each of them with its output
at the address of each input and compares with the ordinary call; an operator that is not tested
there is not listed here.  `donors` adds what the table cannot know: the window must be exactly the
same, and must be all of its storage.

Invariants.  A donor has the output's shape, strides and element type, so that equal positions are
equal addresses; it is never broadcast, never resident, never a result of the graph.

Not done.  Row-wise kernels (softmax), multi-output operators, fused kernels.
"""

from __future__ import annotations

from lowtide.ir.graph import Graph, Node, Role, TensorMeta, Value
from lowtide.ir.ops import Aten

__all__ = ["INPLACE", "covers_storage", "donors"]

# fmt: off
INPLACE: frozenset[str] = frozenset(
    {
        # arithmetic
        "abs", "add", "addcdiv", "addcmul", "atan2", "clamp", "clamp_max", "clamp_min", "div", "fmod",
        "lerp", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "remainder", "rsub", "sign",
        "square", "sub", "true_divide", "where", "masked_fill",
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
    }
)
# fmt: on


def donors(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Node id -> storages that its single output may take over if they die there, in input order.

    Nodes without any are absent.  What depends on the order (whether they die there) is left to the
    caller.
    """
    private = _private_storages(graph)
    found = {}
    for node in graph.nodes:
        if _may_overwrite(node):
            out = graph.values[node.outputs[0]]
            windows = [graph.values[value] for value in node.inputs]
            if out.storage in private and (takes := _matching(graph, out, windows, private)):
                found[node.id] = takes
    return found


def _may_overwrite(node: Node) -> bool:
    if len(node.outputs) != 1 or node.writes or not isinstance(node.op, Aten):
        return False
    namespace, name, *_ = node.op.overload.split(".")
    return namespace == "aten" and name in INPLACE


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
    differs = {window.storage for window in windows if window.meta != out.meta or window.offset}
    given = dict.fromkeys(window.storage for window in windows)
    same = [storage for storage in given if storage in private and storage not in differs]
    if not same or out.storage in given or not covers_storage(graph, out):
        return ()
    # The windows have the strides of `out`, which is dense, so equal sizes are equal bytes.
    nbytes = graph.storages[out.storage].nbytes
    return tuple(storage for storage in same if graph.storages[storage].nbytes == nbytes)


def covers_storage(graph: Graph, value: Value) -> bool:
    """Whether `value` addresses every byte of its storage exactly once."""
    nbytes = value.meta.numel * value.meta.dtype.itemsize
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
