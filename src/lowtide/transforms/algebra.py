"""Algebraic rewrites that only take an operator apart: rules as data, applied wherever they match.

rewrite:    convolution_backward(g, x, w) -> gx, gw, gb      becomes      gx = backward_data(g, x, w)
                                                                          gw, gb = backward_weights(g, x, w)
legal when: it computes the gradient of the input and one of the other two.
effect:     ATen runs the two kernels one after the other anyway, so time and bits stay; their workspaces
            and results are no longer needed at once, and each can be split along an axis that keeps
            every sum whole (the data along the batch, the weights along the output channels).

Numerics: class `exact`.  Not done: rules that re-associate (merged projections, folded scales).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowtide.ir import Aten, Edit, Graph, Node
from lowtide.ir.aten import renumber
from lowtide.ir.ops import Arg, refs_in
from lowtide.transforms.draft import Draft

__all__ = ["RULES", "take_apart"]

_CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_MASK = 10
"""Position of `output_mask` in its arguments."""


def take_apart(graph: Graph) -> Edit:
    """`graph` with every rule of `RULES` applied at every place; ids of values are kept."""
    draft = Draft(graph)
    for node in graph.nodes:
        rule = RULES.get(node.op.overload) if isinstance(node.op, Aten) else None
        if rule is None or not rule(draft, node):
            draft.nodes.append(node)
    return Edit(Graph(tuple(draft.nodes), draft.values, draft.storages, graph.inputs, graph.outputs))


def _split_convolution_backward(draft: Draft, node: Node) -> bool:
    """Emit the two halves; False if there is only one."""
    assert isinstance(node.op, Aten)
    mask = node.op.args[_MASK]
    assert isinstance(mask, tuple)
    if not mask[0] or not any(mask[1:]):
        return False
    _emit_half(draft, node, (False, *mask[1:]), node.outputs[1:], draft.node_id())
    _emit_half(draft, node, (True, False, False), node.outputs[:1], node.id)
    return True


def _emit_half(
    draft: Draft, node: Node, mask: tuple[Arg, ...], outputs: tuple[int, ...], number: int
) -> None:
    assert isinstance(node.op, Aten)
    args = tuple(mask if k == _MASK else arg for k, arg in enumerate(node.op.args))
    op, inputs = _without_unread(Aten(node.op.overload, args, node.op.kwargs), node.inputs)
    draft.emit(op, inputs, node.origin, outputs, node=number)


def _without_unread(op: Aten, inputs: tuple[int, ...]) -> tuple[Aten, tuple[int, ...]]:
    """Keep only the inputs that the arguments mention."""
    kept = sorted(set(refs_in(op.args)))
    places = [kept.index(k) if k in kept else 0 for k in range(len(inputs))]
    return renumber(op, places), tuple(inputs[k] for k in kept)


RULES: Mapping[str, Callable[[Draft, Node], bool]] = {
    _CONVOLUTION_BACKWARD: _split_convolution_backward,
}
"""Operator -> the rule that takes it apart."""
