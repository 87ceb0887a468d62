"""Mapping types read off access maps; Table 3 as printed in the paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.differential.fusion_bodies import trace
from torch.nn import functional

from lowtide.capture.door import capture
from lowtide.fusion.mapping import (
    OPAQUE,
    TABLE,
    Classified,
    Kind,
    Mapping,
    Verdict,
    classify,
    combine,
    fused_type,
)
from lowtide.ir.ops import Aten
from lowtide.workloads.parse import load_workload

ONE, M, A, R, S = (
    Mapping.ONE_TO_ONE,
    Mapping.ONE_TO_MANY,
    Mapping.MANY_TO_MANY,
    Mapping.REORGANIZE,
    Mapping.SHUFFLE,
)

OPERATORS: list[tuple[Callable[..., Any], list[torch.Tensor], Mapping, Kind | None]] = [
    (torch.relu, [torch.ones(3, 4)], ONE, None),
    (torch.add, [torch.ones(3, 4), torch.ones(3, 4)], ONE, None),
    (torch.add, [torch.ones(3, 4), torch.ones(4)], M, None),
    (lambda x: x[:, 1:3], [torch.ones(3, 4)], ONE, None),
    (lambda x: torch.cat([x, x]), [torch.ones(3, 4)], ONE, None),
    (lambda x: x.view(12), [torch.ones(3, 4)], R, None),
    (lambda x: x.permute(1, 0, 2), [torch.ones(3, 4, 5)], S, None),
    (lambda x: x.flip(0), [torch.ones(3, 4)], S, None),
    (lambda x: x.expand(2, 3, 4), [torch.ones(3, 4)], M, None),
    (lambda x: x.repeat(2, 1), [torch.ones(3, 4)], M, None),
    (lambda w, i: functional.embedding(i, w), [torch.ones(3, 4), torch.tensor([0, 1])], M, None),
    (lambda x: functional.interpolate(x, scale_factor=2), [torch.ones(1, 2, 3, 4)], M, None),
    (lambda x: torch.softmax(x, -1), [torch.ones(3, 4)], A, Kind.ROW),
    (lambda x: torch.softmax(x, 0), [torch.ones(3, 4)], A, Kind.REDUCTION),
    (lambda x: x.sum(0), [torch.ones(3, 4)], A, Kind.REDUCTION),
    (lambda x: functional.layer_norm(x, (4,)), [torch.ones(3, 4)], A, Kind.ROW),
    (torch.mm, [torch.ones(3, 4), torch.ones(4, 5)], A, Kind.CONTRACTION),
    (functional.conv2d, [torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)], A, Kind.WINDOW),
    (lambda x: x.cumsum(0), [torch.ones(3, 4)], A, Kind.SCAN),
    (torch.nonzero, [torch.ones(3)], A, Kind.OPAQUE),
]


@pytest.mark.parametrize(("function", "inputs", "mapping", "kind"), OPERATORS)
def test_types_follow_from_access_maps(
    function: Callable[..., Any], inputs: list[torch.Tensor], mapping: Mapping, kind: Kind | None
) -> None:
    graph = trace(function, inputs)
    found = classify(graph, graph.nodes[-1])
    assert (found.mapping, found.kind) == (mapping, kind)


PRINTED = {  # first: results for second = One-to-One, One-to-Many, Many-to-Many, Reorganize, Shuffle
    ONE: (ONE, M, A, R, S),
    M: (M, M, None, M, M),
    A: (A, A, None, A, A),
    R: (R, M, A, R, R),
    S: (S, M, A, R, S),
}
YELLOW = {(M, M), (M, R), (M, S), (A, M), (A, R), (A, S), (R, M), (R, A), (S, M), (S, A)}


def test_table_3_is_the_papers() -> None:
    for first, results in PRINTED.items():
        for second, result in zip((ONE, M, A, R, S), results, strict=True):
            cell = TABLE[first, second]
            colour = (
                Verdict.RED
                if result is None
                else Verdict.YELLOW
                if (first, second) in YELLOW
                else Verdict.GREEN
            )
            assert (cell.verdict, cell.result) == (colour, result)
    assert sum(cell.verdict is not Verdict.RED for cell in TABLE.values()) == 23


def test_impedance_decides_the_fused_type() -> None:
    """The harder of the two types wins; between the two hardest, the first: all 23 cells follow."""
    for (first, second), cell in TABLE.items():
        assert cell.result in (None, fused_type(first, second))
    assert fused_type(M, A) is M and fused_type(A, M) is A and fused_type(S, R) is fused_type(R, S) is R


BUNDLED = (
    "unetpp:batch=2,size=32,width=8,mode=train",
    "resnet50:batch=2,size=32,width=8,stages=2,classes=4,mode=train",
    "mobilenetv2:batch=2,size=64,width=0.35,classes=4,mode=train",
    "vit-base:batch=2,size=32,layers=1,dim=32,heads=2,classes=4,mode=train,attention=eager",
    "bert-base:batch=2,seq=16,layers=1,dim=32,heads=2,vocab=64,mode=train,dropout=0.1",
    "gptneo-1.3b:batch=1,seq=16,layers=2,dim=32,heads=2,vocab=64,mode=train",
    "gpt2:layers=1,dim=64,heads=4,seq=32,batch=2,vocab=128,mode=train,attention=explicit",
    "mlp:batch=64,dim=32,layers=2,mode=infer",
)

UNTYPED = {
    "aten.bernoulli.p",  # random: never a member, whatever it maps
    "aten.new_empty.default",  # no elements are computed
}


@pytest.mark.parametrize("text", BUNDLED)
def test_every_operator_of_the_bundled_workloads_has_a_type(text: str) -> None:
    """Backward ones too; what is left out is named with its reason."""
    graph = capture(load_workload(text)).graph
    nodes = [node for node in graph.nodes if isinstance(node.op, Aten) and node.outputs]
    opaque = {node.op.overload for node in nodes if classify(graph, node) == OPAQUE}  # type: ignore[union-attr]
    assert opaque <= UNTYPED


def test_row_reductions_share_rows_but_products_stay_apart() -> None:
    row, product = Classified(A, Kind.ROW), Classified(A, Kind.CONTRACTION)
    assert combine(row, row)[0] is Verdict.YELLOW
    assert combine(product, product)[0] is Verdict.RED
    assert combine(product, row)[0] is Verdict.RED
    assert combine(product, Classified(ONE)) == (Verdict.GREEN, product)
