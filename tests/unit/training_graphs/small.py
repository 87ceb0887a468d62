"""A small training step of the files' format: attention, a hidden layer, squared error, updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.training_graphs.model import Graph, Links, Node, Shape

HW = {"flops": 1e9, "bw": 1e9, "pcie": 4e8, "launch": 1e-6, "swap_lat": 1e-6, "sms": 4, "dsize": 4}
BATCH, LENGTH, WIDTH, HEADS, SIZE, HIDDEN = 8, 6, 16, 4, 4, 32


@dataclass
class Maker:
    """Appends nodes; ids count up."""

    nodes: list[Node] = field(default_factory=list)

    def add(self, op: str, kind: str, inputs: list[int], shape: Shape, links: Links, **attrs: Any) -> int:
        self.nodes.append(Node(len(self.nodes), op, kind, tuple(inputs), shape, attrs, links))
        return len(self.nodes) - 1

    def shape(self, value: int) -> Shape:
        return self.nodes[value].shape

    def given(self, kind: str, *shape: int) -> int:
        return self.add(
            "placeholder", kind, [], shape, (), name=f"p{len(self.nodes)}", is_weight=kind == "weight"
        )

    def same(self, op: str, *inputs: int, **attrs: Any) -> int:
        shape = self.shape(inputs[0])
        links = (tuple((d, d) for d in range(len(shape))),) * len(inputs)
        return self.add(op, "compute", list(inputs), shape, links, **attrs)

    def flex(self, a: int, b: int, reduce: int, trans_a: bool = False, trans_b: bool = False) -> int:
        sa, sb = self.shape(a), self.shape(b)
        cut_a = range(reduce) if trans_a else range(len(sa) - reduce, len(sa))
        cut_b = range(len(sb) - reduce, len(sb)) if trans_b else range(reduce)
        free_a = [d for d in range(len(sa)) if d not in cut_a]
        free_b = [d for d in range(len(sb)) if d not in cut_b]
        shape = tuple([sa[d] for d in free_a] + [sb[d] for d in free_b])
        link_a = [(d, k) for k, d in enumerate(free_a)] + [(d, -1 - k) for k, d in enumerate(cut_a)]
        link_b = [(d, len(free_a) + k) for k, d in enumerate(free_b)] + [
            (d, -1 - k) for k, d in enumerate(cut_b)
        ]
        return self.add(
            "flex_matmul", "compute", [a, b], shape, (tuple(link_a), tuple(link_b)),
            trans_a=trans_a, trans_b=trans_b, trans_c=False, n_batch_dims=0, n_reduce_dims=reduce,
        )  # fmt: skip

    def matmul(
        self, a: int, b: int, trans_a: bool = False, trans_b: bool = False, trans_c: bool = False
    ) -> int:
        sa, sb = self.shape(a), self.shape(b)
        row_a, sum_a = (3, 2) if trans_a else (2, 3)
        column_b, sum_b = (2, 3) if trans_b else (3, 2)
        row, column = (3, 2) if trans_c else (2, 3)
        shape = [sa[0], sa[1], 0, 0]
        shape[row], shape[column] = sa[row_a], sb[column_b]
        links = (
            ((0, 0), (1, 1), (row_a, row), (sum_a, -1)),
            ((0, 0), (1, 1), (column_b, column), (sum_b, -1)),
        )
        return self.add(
            "matmul",
            "compute",
            [a, b],
            tuple(shape),
            links,
            trans_a=trans_a,
            trans_b=trans_b,
            trans_c=trans_c,
        )

    def heads(self, value: int) -> int:
        a, b, c, d = self.shape(value)
        links = (((0, 0), (2, 1), (1, 2), (3, 3)),)
        return self.add("permute", "view", [value], (a, c, b, d), links, dims=[0, 2, 1, 3])

    def update(self, weight: int, gradient: int) -> None:
        """Append w += g; call it once nobody reads the old weight any more."""
        shape = self.shape(weight)
        links = (tuple((d, d) for d in range(len(shape))),) * 2
        self.add("ewise.bin.add_", "inplace", [weight, gradient], shape, links, commutative=False)


def small_graph() -> Graph:
    """The step; every forward value that the backward reads is read there."""
    m = Maker()
    given, goal, seed = (m.given("input", BATCH, LENGTH, WIDTH) for _ in range(3))
    w0 = m.given("weight", WIDTH, WIDTH)
    wq, wk, wv = (m.given("weight", WIDTH, HEADS, SIZE) for _ in range(3))
    wo = m.given("weight", HEADS, SIZE, WIDTH)
    w1, w2 = m.given("weight", WIDTH, HIDDEN), m.given("weight", HIDDEN, WIDTH)
    x = m.flex(given, w0, 1)
    q, k, v = (m.heads(m.flex(x, w, 1)) for w in (wq, wk, wv))
    p = m.same("softmax", m.same("ewise.uni.const.div", m.matmul(q, k, trans_b=True), const=2.0), dim=3)
    o = m.heads(m.matmul(p, v))
    a = m.same("ewise.bin.add", m.flex(o, wo, 2), x)
    h = m.same("ewise.uni.relu", m.flex(a, w1, 1))
    y = m.same("ewise.bin.add", m.flex(h, w2, 1), a)
    mask = m.same("ewise.uni.const.gt", h, const=0)
    error = m.same("ewise.bin.sub", y, goal)
    m.same("ewise.uni.const.pow", error, const=2)
    dy = m.same("ewise.uni.const.mul", m.same("ewise.bin.mul", seed, error), const=2)
    dh = m.same("ewise.bin.mul", m.flex(dy, w2, 1, trans_b=True), mask)
    m.update(w2, m.flex(h, dy, 2, trans_a=True))
    da = m.same("ewise.bin.add", dy, m.flex(dh, w1, 1, trans_b=True))
    m.update(w1, m.flex(a, dh, 2, trans_a=True))
    do = m.heads(m.flex(da, wo, 1, trans_b=True))
    m.update(wo, m.flex(o, da, 2, trans_a=True))
    dp = m.matmul(do, v, trans_b=True)
    dv = m.heads(m.matmul(p, do, trans_a=True))
    ds = m.same("ewise.uni.const.div", m.same("softmax_bwd", dp, p, dim=3), const=2.0)
    dq = m.heads(m.matmul(ds, k))
    dk = m.heads(m.matmul(q, ds, trans_a=True, trans_c=True))
    to_x = [m.flex(g, w, 2, trans_b=True) for g, w in ((dq, wq), (dk, wk), (dv, wv))]
    dx = m.same("ewise.bin.add", m.same("ewise.bin.add", m.same("ewise.bin.add", *to_x[:2]), to_x[2]), da)
    for weight, gradient in ((wq, dq), (wk, dk), (wv, dv)):
        m.update(weight, m.flex(x, gradient, 2, trans_a=True))
    m.update(w0, m.flex(given, dx, 2, trans_a=True))
    return Graph(tuple(m.nodes))
