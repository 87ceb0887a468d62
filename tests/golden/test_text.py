"""The printed form, in full: one graph that uses everything, and one line per broken invariant."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.unit.ir.broken import BROKEN

from lowtide.ir import (
    Aten,
    Fission,
    Fused,
    Graph,
    Load,
    Merge,
    Node,
    Origin,
    Part,
    Ref,
    Role,
    Scalar,
    Slice,
    Storage,
    Store,
    TensorMeta,
    Value,
)
from lowtide.ir.text import parse_graph, print_graph
from lowtide.ir.verify import InvalidGraph, verify

Golden = Callable[[str, str], None]


def dense(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)


def relu_body(meta: TensorMeta) -> Graph:
    values = {0: Value(0, meta, 0), 1: Value(1, meta, 1)}
    storages = {k: Storage(k, meta.span_bytes, Role.TEMP) for k in values}
    return Graph((Node(5, Aten("aten.relu.default", (Ref(0),)), (0,), (1,)),), values, storages, (0,), (1,))


def everything() -> Graph:
    """A graph built by hand that holds every operation, every kind of argument, roles and odd layouts."""
    weight, rows = dense(6, 4), dense(8, 4)
    values = {
        0: Value(0, rows, 0),
        1: Value(1, weight, 1),
        2: Value(2, TensorMeta((), (), torch.float64, "host"), 2),
        3: Value(3, TensorMeta((4, 6), (1, 4), torch.float32), 1),
        4: Value(4, dense(8, 6), 40),
        5: Value(5, TensorMeta((4, 6), (12, 1), torch.float32), 40, 6),
        6: Value(6, dense(8, 4), 6),
        7: Value(7, dense(8, 4, dtype=torch.int64), 7),
        8: Value(8, rows, 8),
        9: Value(9, rows, 9),
        10: Value(10, TensorMeta((8, 4), (4, 1), torch.float32, "cuda:0"), 10),
        11: Value(11, rows, 11),
        12: Value(12, dense(), 12),
    }
    roles = {0: Role.INPUT, 1: Role.PARAM, 2: Role.HOST, 12: Role.OUTPUT, 9: Role.GRAD}
    sizes = {2: 0, 40: 192, 7: 512, 12: 128}
    storages = {
        number: Storage(
            number,
            sizes.get(number, values.get(number, values[0]).meta.span_bytes),
            roles.get(number, Role.TEMP),
        )
        for number in sorted({value.storage for value in values.values()})
    }
    halves = tuple(Part(0, (Slice(0, k, k + 4),), (Slice(0, k, k + 4),)) for k in (0, 4))
    odd = Aten(
        "aten.everything.default",
        (Ref(1), (1, -2, (True, None)), 1e-05, float("-inf"), 'a "word"\n', Ref(0)),
        (
            ("device", torch.device("cuda", 1)),
            ("dtype", torch.bfloat16),
            ("layout", torch.strided),
            ("memory_format", torch.channels_last),
            ("z", 1 - 2j),
        ),
    )
    nodes = (
        Node(3, Aten("aten.t.default", (Ref(0),)), (1,), (3,)),
        Node(
            40, Aten("aten.mm.default", (Ref(0), Ref(1))), (0, 3), (4,), (), Origin("enc.0.fc", "model.py:31")
        ),
        Node(5, Aten("aten.slice.Tensor", (Ref(0), 0, 0, 8, 2)), (4,), (5,), (), Origin("enc 0", "", "loss")),
        Node(6, odd, (4, 5), (6, 7), (), Origin("", "my model.py:3")),
        Node(8, Fission((relu_body(dense(4, 4)),), halves, (Merge.WRITE,)), (6,), (8,), (), Origin("enc.1")),
        Node(9, Fused(relu_body(rows)), (8,), (9,), (), Origin("enc.2", "-", "backward")),
        Node(10, Store("host"), (9,), (10,)),
        Node(11, Load("host"), (10,), (11,)),
        Node(12, Aten("aten.mse_loss.default", (Ref(0), Ref(0))), (11,), (12,)),
        Node(13, Aten("aten.add_.Tensor", (Ref(0), Ref(1)), (("alpha", Ref(2)),)), (1, 4, 2), (), (1,)),
        Node(99, Scalar("update[0].scalar[2]"), (), ()),
    )
    return Graph(nodes, values, storages, (0, 1, 2), (12,))


def test_everything(golden: Golden) -> None:
    graph = everything()
    text = print_graph(graph)
    golden("everything.txt", text)
    assert parse_graph(text) == graph


def test_messages_of_broken_graphs(golden: Golden) -> None:
    lines = []
    for invariant, graph, _ in BROKEN:
        try:
            verify(graph())
        except InvalidGraph as error:
            assert error.invariant == invariant
            lines.append(str(error))
    golden("invalid_graphs.txt", "\n".join(lines) + "\n")
    assert max(map(len, lines)) < 300
