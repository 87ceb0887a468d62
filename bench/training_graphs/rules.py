"""Algebraic rewrites: a division by a constant goes into a weight, projections of one value become one
product.

fold-division:  softmax(a b^T / c) with a = x w   ->   a' = x (w / c), softmax(a' b^T); backward, the
                gradient of the scores is used undivided (it meets a' and w / c instead of a and w), and w's
                own gradient is divided.  Exact for powers of two, else `reassociates`.
merge-projections:  x w1, x w2, x w3   ->   one product with the weights side by side, results sliced; the
                gradient to x is one product over the gradients side by side instead of three and two sums.
                `reassociates`. part-concat:    conv-data(g, w) that is only sliced, conv-weight(concat(a,
                b), g)   ->   one call for each piece, where waves of tiles do not make that dearer; the
                concatenation dies with the forward.  Exact.
fuse-threshold: g * (h > 0)  ->  threshold_backward(g, h): one kernel instead of two, exact.

Legal when the nodes match with exactly the readers named; everything else is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .model import Graph, Links, Node, Shape
from .prices import op_time

__all__ = ["fold_divisions", "fuse_thresholds", "merge_projections", "part_concats"]

_NOT_DEARER = 1.002
"""A rewrite that saves memory may cost this factor."""

_DIV, _HEADS_FIRST = "ewise.uni.const.div", [0, 2, 1, 3]


def _same(shape: Shape) -> Links:
    return (tuple((dim, dim) for dim in range(len(shape))),)


class _Edit:
    """A graph under rewriting: nodes replaced in place, removed, or put before others."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.now = {node.id: node for node in graph.nodes}
        self.before: dict[int, list[Node]] = {}
        self.gone: set[int] = set()
        self.next = graph.next_id

    def new(
        self, before: int, op: str, kind: str, inputs: list[int], shape: Shape, attrs: dict, links: Links
    ) -> int:  # type: ignore[type-arg]
        """A new node right before node `before`; its id."""
        made = Node(self.next, op, kind, tuple(inputs), shape, attrs, links)
        self.before.setdefault(before, []).append(made)
        self.next += 1
        return made.id

    def read(self, reader: int, old: int, new: int) -> None:
        """Let a node read `new` instead of `old`."""
        node = self.now[reader]
        self.now[reader] = replace(
            node, inputs=tuple(new if value == old else value for value in node.inputs)
        )

    def graph_now(self) -> Graph:
        """The rewritten graph."""
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes.extend(self.before.get(node.id, ()))
            if node.id not in self.gone:
                nodes.append(self.now[node.id])
        return Graph(tuple(nodes), self.graph.inputs, self.graph.outputs)


def fold_divisions(graph: Graph) -> Graph:
    """Every division of attention scores that can go into the projection's weight."""
    for node in graph.nodes:
        if node.op == _DIV and graph.node[node.inputs[0]].op == "matmul":
            graph = _fold(graph, node) or graph
    return graph


def _only(graph: Graph, value: int, op: str) -> Node | None:
    """The only reader of a value, if it has this tag."""
    readers = graph.readers[value]
    found = graph.node[readers[0]] if len(readers) == 1 else None
    return found if found is not None and found.op == op else None


def _fold(graph: Graph, divide: Node) -> Graph | None:
    scores = graph.node[divide.inputs[0]]
    left = graph.node[scores.inputs[0]]
    project = graph.node[left.inputs[0]] if left.op == "permute" else None
    softmax = _only(graph, divide.id, "softmax")
    if (
        project is None
        or softmax is None
        or project.op != "flex_matmul"
        or len(graph.readers[scores.id]) != 1
    ):
        return None
    weight = graph.node[project.inputs[1]]
    backs = [graph.node[r] for r in graph.readers[softmax.id] if graph.node[r].op == "softmax_bwd"]
    back = _only(graph, backs[0].id, _DIV) if len(backs) == 1 else None
    others = [r for r in graph.readers[left.id] if r != scores.id]
    if (
        back is None
        or back.attrs["const"] != divide.attrs["const"]
        or weight.kind != "weight"
        or len(others) != 1
    ):
        return None
    if len(graph.readers[project.id]) != 1:
        return None
    return _divided(graph, divide, back, graph.node[others[0]], project, weight)


def _divided(graph: Graph, divide: Node, back: Node, key: Node, project: Node, weight: Node) -> Graph | None:
    """`key`: the product that gives the other operand's gradient."""
    readers = [r for r in graph.readers[back.id] if r != key.id]
    if back.id not in key.inputs or len(readers) != 1:
        return None
    grad = _only(graph, readers[0], "permute")
    if grad is None or graph.node[readers[0]].op != "matmul":
        return None
    data = [r for r in graph.readers[grad.id] if weight.id in graph.node[r].inputs]
    wanted = [r for r in graph.readers[grad.id] if weight.id not in graph.node[r].inputs]
    if len(data) != 1 or len(wanted) != 1 or graph.node[wanted[0]].shape != weight.shape:
        return None
    if set(graph.readers[weight.id]) - {project.id, data[0]} != set(graph.readers[wanted[0]]):
        return None
    edit = _Edit(graph)
    const = {"const": divide.attrs["const"]}
    scaled = edit.new(project.id, _DIV, "compute", [weight.id], weight.shape, const, _same(weight.shape))
    edit.read(project.id, weight.id, scaled)
    edit.read(data[0], weight.id, scaled)
    for gone in (divide, back):
        edit.gone.add(gone.id)
        for reader in graph.readers[gone.id]:
            edit.read(reader, gone.id, gone.inputs[0])
    update = graph.readers[wanted[0]][0]
    true = edit.new(update, _DIV, "compute", [wanted[0]], weight.shape, const, _same(weight.shape))
    edit.read(update, wanted[0], true)
    return edit.graph_now()


def merge_projections(graph: Graph) -> Graph:
    """Every group of projections to heads that share their operand."""
    for source in [node.id for node in graph.nodes]:
        if source not in graph.node:
            continue
        group = [graph.node[r] for r in graph.readers[source] if _is_projection(graph, graph.node[r], source)]
        if len(group) > 1 and len({graph.node[node.inputs[1]].shape for node in group}) == 1:
            graph = _merge(graph, source, group)
    return graph


def _is_projection(graph: Graph, node: Node, source: int) -> bool:
    if node.op != "flex_matmul" or node.inputs[0] != source or node.attrs["trans_a"] or node.attrs["trans_b"]:
        return False
    permute = _only(graph, node.id, "permute")
    return (
        permute is not None
        and list(permute.attrs["dims"]) == _HEADS_FIRST
        and len(graph.node[node.inputs[1]].shape) == 3
        and node.attrs["n_reduce_dims"] == 1
    )


def _merge(graph: Graph, source: int, group: list[Node]) -> Graph:
    edit = _Edit(graph)
    first = group[0]
    weights = [node.inputs[1] for node in group]
    into, heads, size = graph.node[weights[0]].shape
    total = heads * len(group)
    batch, length = first.shape[:2]
    at = min((node.id for node in group), key=[node.id for node in graph.nodes].index)
    aside = ((0, 0), (2, 2))
    both = edit.new(
        at, "concat", "compute", weights, (into, total, size), {"dim": 1}, tuple(aside for _ in weights)
    )
    product = edit.new(
        at,
        "flex_matmul",
        "compute",
        [source, both],
        (batch, length, total, size),
        dict(first.attrs),
        first.links,
    )
    permuted = edit.new(
        at, "permute", "view", [product], (batch, total, length, size), {"dims": _HEADS_FIRST},
        (((0, 0), (2, 1), (1, 2), (3, 3)),),
    )  # fmt: skip
    for number, node in enumerate(group):
        old = graph.node[graph.readers[node.id][0]]
        span = {"dims": [1], "starts": [number * heads], "ends": [(number + 1) * heads]}
        piece = edit.new(at, "slice", "view", [permuted], old.shape, span, (((0, 0), (2, 2), (3, 3)),))
        edit.gone |= {node.id, old.id}
        for reader in graph.readers[old.id]:
            edit.read(reader, old.id, piece)
    _merge_gradients(graph, edit, weights, both, heads)
    return _sorted(edit.graph_now())


def _merge_gradients(graph: Graph, edit: _Edit, weights: list[int], both: int, heads: int) -> None:
    """One product for the gradient to the shared operand, if its parts are only summed."""
    parts = [graph.node[r] for value in weights for r in _data_gradients(graph, value)]
    if len(parts) != len(weights):
        return
    summed = {node.id for node in parts}
    sums: list[Node] = []
    while len(summed) > 1:
        step = next(
            (
                n
                for n in graph.nodes
                if n.op == "ewise.bin.add" and len(n.inputs) == 2 and summed.issuperset(n.inputs)
            ),
            None,
        )
        if step is None or any(len(graph.readers[value]) != 1 for value in step.inputs):
            return
        summed = summed - set(step.inputs) | {step.id}
        sums.append(step)
    last = sums[-1]
    first = parts[0]
    gradients = [edit.now[node.id].inputs[0] for node in parts]
    batch, length, _, size = graph.node[first.inputs[0]].shape
    aside = ((0, 0), (1, 1), (3, 3))
    shape = (batch, length, heads * len(parts), size)
    together = edit.new(
        last.id, "concat", "compute", gradients, shape, {"dim": 2}, tuple(aside for _ in gradients)
    )
    edit.gone |= {node.id for node in (*parts, *sums)} - {last.id}
    edit.now[last.id] = replace(first, id=last.id, inputs=(together, both))


def _data_gradients(graph: Graph, weight: int) -> list[int]:
    return [
        r
        for r in graph.readers[weight]
        if graph.node[r].op == "flex_matmul"
        and graph.node[r].attrs["trans_b"]
        and graph.node[r].inputs[1] == weight
    ]


def _sorted(graph: Graph) -> Graph:
    """Producers first, else the given order."""
    order: list[Node] = []
    done: set[int] = set()

    def emit(node: Node) -> None:
        for value in node.inputs:
            if value not in done:
                emit(graph.node[value])
        if node.id not in done:
            order.append(node)
            done.add(node.id)

    for node in graph.nodes:
        if node.id not in done:
            emit(node)
    return Graph(tuple(order), graph.inputs, graph.outputs)


def fuse_thresholds(graph: Graph) -> Graph:
    """Every product with a mask that nobody else reads, as one kernel."""
    edit = _Edit(graph)
    for node in graph.nodes:
        if node.op != "ewise.bin.mul":
            continue
        mask = graph.node[node.inputs[1]]
        if mask.op == "ewise.uni.const.gt" and mask.attrs["const"] == 0 and len(graph.readers[mask.id]) == 1:
            edit.gone.add(mask.id)
            edit.now[node.id] = replace(
                node, op="ewise.bin.threshold_backward", inputs=(node.inputs[0], mask.inputs[0])
            )
    return edit.graph_now()


def part_concats(graph: Graph, hw: Mapping[str, Any]) -> Graph:
    """Gradients of convolutions of a concatenation, piece by piece, wherever that is not dearer."""
    for node in list(graph.nodes):
        if node.op == "conv2d_bwd_inp":
            graph = _part_data(graph, node, hw) or graph
        elif node.op == "conv2d_bwd_wgt":
            graph = _part_weight(graph, node, hw) or graph
    return graph


def _part_data(graph: Graph, node: Node, hw: Mapping[str, Any]) -> Graph | None:
    """grad slices of conv-data(g, w)  ->  conv-data(g, slice of w) each."""
    slices = [graph.node[reader] for reader in graph.readers[node.id]]
    if not slices or any(each.op != "slice" or list(each.attrs["dims"]) != [1] for each in slices):
        return None
    grad, weight = (graph.node[value] for value in node.inputs)
    into, _, *window = weight.shape
    shapes = [(into, each.shape[1], *window) for each in slices]
    whole = op_time(node.op, graph.in_shapes(node), node.shape, node.attrs, hw)
    pieces = (
        op_time(node.op, [grad.shape, shape], each.shape, node.attrs, hw)
        for each, shape in zip(slices, shapes, strict=True)
    )
    if sum(pieces) > whole * _NOT_DEARER:
        return None
    edit = _Edit(graph)
    edit.gone.add(node.id)
    for each, shape in zip(slices, shapes, strict=True):
        links: Links = (tuple((dim, dim) for dim in range(4) if dim != 1),)
        piece = edit.new(each.id, "slice", "view", [weight.id], shape, dict(each.attrs), links)
        edit.now[each.id] = replace(node, id=each.id, inputs=(grad.id, piece), shape=each.shape)
    return edit.graph_now()


def _part_weight(graph: Graph, node: Node, hw: Mapping[str, Any]) -> Graph | None:
    """conv-weight(concat(a, b), g)  ->  concat(conv-weight(a, g), conv-weight(b, g))."""
    together, grad = (graph.node[value] for value in node.inputs)
    if together.op != "concat" or together.attrs["dim"] != 1:
        return None
    out, _, *window = node.shape
    pieces = [graph.node[value] for value in together.inputs]
    shapes = [(out, piece.shape[1], *window) for piece in pieces]
    whole = op_time(node.op, graph.in_shapes(node), node.shape, node.attrs, hw)
    parted = (
        op_time(node.op, [piece.shape, grad.shape], shape, node.attrs, hw)
        for piece, shape in zip(pieces, shapes, strict=True)
    )
    if sum(parted) > whole * _NOT_DEARER:
        return None
    edit = _Edit(graph)
    made = [
        edit.new(node.id, node.op, "compute", [piece.id, grad.id], shape, dict(node.attrs), node.links)
        for piece, shape in zip(pieces, shapes, strict=True)
    ]
    links = (tuple((dim, dim) for dim in range(4) if dim != 1),) * len(made)
    edit.now[node.id] = Node(node.id, "concat", "compute", tuple(made), node.shape, {"dim": 1}, links)
    return edit.graph_now()
