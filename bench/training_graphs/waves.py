"""Products cut along the batch so that their tiles fill whole waves.

rewrite:    y = f(x, w)   ->   y = concat(f(x[:k], w), f(x[k:], w)) along the batch, k where the two are
cheapest.
legal when: f maps samples to samples: the first dimension of x and of y is one axis, w is not on it.
effect:     98 tiles on 82 processors are two waves; 80 tiles and then 18, split along the sum, are one and
            a quarter. Slices and the whole exist twice for a moment.  Exact where the sum is not split,
            else `reassociates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .model import Graph, Links, Node, Shape
from .prices import op_time

__all__ = ["fit_waves"]

_PRODUCTS = frozenset({"conv2d", "conv2d_bwd_inp", "flex_matmul"})
_WORTH = 0.1
"""Part of the time that a cut has to save."""


def fit_waves(graph: Graph, hw: Mapping[str, Any]) -> tuple[Graph, dict[int, int]]:
    """The graph with products cut where that saves time; new node -> the product that it is a piece of."""
    fresh = graph.next_id
    nodes: list[Node] = []
    origin: dict[int, int] = {}
    for node in graph.nodes:
        cut = _best_cut(graph, node, hw)
        if cut is None:
            nodes.append(node)
            continue
        pieces = _pieces(graph, node, cut, fresh)
        fresh += len(pieces)
        origin |= {piece.id: node.id for piece in pieces}
        links: Links = (tuple((dim, dim) for dim in range(len(node.shape))),) * 2
        made = (pieces[1].id, pieces[3].id)
        nodes += [*pieces, Node(node.id, "concat", "compute", made, node.shape, {"dim": 0}, links)]
    return Graph(tuple(nodes), graph.inputs, graph.outputs), origin


def _best_cut(graph: Graph, node: Node, hw: Mapping[str, Any]) -> int | None:
    if node.op not in _PRODUCTS or (0, 0) not in node.links[0] or any(out == 0 for _, out in node.links[1]):
        return None
    given, weight = graph.in_shapes(node)

    def time(samples: int) -> float:
        shapes = [(samples, *given[1:]), weight]
        return op_time(node.op, shapes, (samples, *node.shape[1:]), node.attrs, hw)

    whole, batch = time(node.shape[0]), node.shape[0]
    if batch < 2:
        return None
    best = min(range(1, batch), key=lambda k: (time(k) + time(batch - k), abs(k - batch // 2)))
    return best if time(best) + time(batch - best) < whole * (1 - _WORTH) else None


def _pieces(graph: Graph, node: Node, cut: int, fresh: int) -> list[Node]:
    """Slice, product, slice, product."""
    value, weight = node.inputs
    given = graph.node[value].shape
    aside: Links = (tuple((dim, dim) for dim in range(1, len(given))),)
    found: list[Node] = []
    for start, stop in ((0, cut), (cut, node.shape[0])):
        shape: Shape = (stop - start, *given[1:])
        span = {"dims": [0], "starts": [start], "ends": [stop]}
        piece = Node(fresh + len(found), "slice", "view", (value,), shape, span, aside)
        found.append(piece)
        part = replace(
            node, id=fresh + len(found), inputs=(piece.id, weight), shape=(stop - start, *node.shape[1:])
        )
        found.append(part)
    return found
