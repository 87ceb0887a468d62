"""The gradients of a convolution as operators of their own.

Problem.  `convolution_backward` gives up to three gradients at once: that of its input can be cut along
rows with a halo, those of weight and bias are sums over rows.  One node cannot do both.

rewrite:    convolution_backward(g, x, w; input, weight, bias)
                ->  convolution(g, w, transposed)                      the input's gradient
                    convolution_backward(g, x, w; -, weight, bias)     the others
legal when: the convolution is not transposed.
effect:     the first no longer reads x; the kernels run are the same (class `reassociates`: blocking may
            differ with the shapes).

Not done.  Transposed convolutions, whose gradients have no windows yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.analysis.axis import arguments_of, describe_call, with_argument
from lowtide.ir import Aten, Graph, Node, Ref
from lowtide.ir.ops import Arg
from lowtide.transforms.draft import Draft
from lowtide.transforms.prediction import predict

__all__ = ["take_gradients_apart"]

_BACKWARD = "aten.convolution_backward.default"


def take_gradients_apart(graph: Graph) -> Graph:
    """`graph` with the rewrite above applied wherever it matches; `graph` itself if it does nowhere."""
    found = graph.memo.get(take_gradients_apart)
    if not isinstance(found, Graph):
        found = graph.memo[take_gradients_apart] = _apart(graph)
    return found


def _apart(graph: Graph) -> Graph:
    draft = Draft(graph)
    changed = False
    for node in graph.nodes:
        if isinstance(node.op, Aten) and _matches(node, node.op) and _rewrite(graph, draft, node, node.op):
            changed = True
        else:
            draft.nodes.append(node)
    return draft.graph(graph.inputs, graph.outputs) if changed else graph


def _matches(node: Node, op: Aten) -> bool:
    if op.overload != _BACKWARD or len(set(_operands(op))) < 3 or len(node.inputs) != 3:
        return False
    given = arguments_of(op)
    mask = given["output_mask"]
    assert isinstance(mask, tuple)
    return bool(mask[0]) and not given["transposed"]


def _operands(op: Aten) -> Iterator[int]:
    for arg in op.args[:3]:
        assert isinstance(arg, Ref)
        yield arg.index


def _rewrite(graph: Graph, draft: Draft, node: Node, op: Aten) -> bool:
    """Emit both operators; False if the first would lay its result out otherwise."""
    gradient, _, weight = (node.inputs[position] for position in _operands(op))
    metas = tuple(graph.values[value].meta for value in node.inputs)
    call = describe_call(op, metas, tuple(graph.values[value].meta for value in node.outputs))
    space = call.rank("weight") - 2
    stride, padding, dilation = (
        (found * space if len(found) == 1 else found)
        for found in (call.integers(name) for name in ("stride", "padding", "dilation"))
    )
    extra: tuple[Arg, ...] = tuple(
        call.shape("input")[2 + k]
        - ((call.shape("grad_output")[2 + k] - 1) * stride[k] - 2 * padding[k])
        - (dilation[k] * (call.shape("weight")[2 + k] - 1) + 1)
        for k in range(space)
    )
    lists: tuple[Arg, ...] = (stride, padding, dilation, True, extra, call.integer("groups"))
    spread = Aten("aten.convolution.default", (Ref(0), Ref(1), None, *lists))
    given, made = graph.values[gradient].meta, graph.values[node.outputs[0]].meta
    if predict(spread, (given, graph.values[weight].meta))[0].meta != made:
        return False
    mask = call.integers("output_mask")
    rest = (False, bool(mask[1]), bool(mask[2]))
    draft.emit(spread, (gradient, weight), node.origin, outputs=node.outputs[:1])
    if any(rest):
        sums = with_argument(op, "output_mask", rest)
        draft.emit(sums, node.inputs, node.origin, outputs=node.outputs[1:], node=node.id)
    return True
