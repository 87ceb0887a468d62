"""Which operations draw: the table of tags against the generator itself."""

from __future__ import annotations

import pytest
import torch

from lowtide.ir.aten import call
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Fused, Load, Ref
from lowtide.ir.random import is_random

X = torch.rand(1, 2, 4, 4)
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
OPERATIONS = [
    Aten("aten.bernoulli.p", (Ref(0), 0.5)),
    Aten("aten.rand_like.default", (Ref(0),)),
    Aten("aten.randn.default", ((3,),)),
    Aten("aten.randperm.default", (5,)),
    Aten("aten.uniform.default", (Ref(0), 0.0, 1.0)),
    Aten("aten.normal_functional.default", (Ref(0),)),
    Aten("aten.native_dropout.default", (Ref(0), 0.5, True)),
    Aten("aten.native_dropout.default", (Ref(0), 0.5, False)),
    Aten("aten.multinomial.default", (Ref(0), 1)),
    Aten(ATTENTION, (Ref(0), Ref(0), Ref(0))),
    Aten(ATTENTION, (Ref(0), Ref(0), Ref(0)), (("dropout_p", 0.0),)),
    Aten("aten.relu.default", (Ref(0),)),
    Aten("aten.empty_like.default", (Ref(0),)),
]


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.overload)
def test_random_operations_advance_the_generator_and_no_others(op: Aten) -> None:
    before = torch.get_rng_state()
    call(op, [X[0, 0] if "multinomial" in op.overload else X])
    assert is_random(op) == (not torch.equal(before, torch.get_rng_state()))


def test_bodies_count() -> None:
    def body(op: Aten) -> Graph:
        return Graph((Node(0, op, (), ()),), {}, {}, (), ())

    assert is_random(Fused(body(Aten("aten.randn.default", ((3,),)))))
    assert not is_random(Fused(body(Aten("aten.zeros.default", ((3,),)))))
    assert not is_random(Load("disk"))
