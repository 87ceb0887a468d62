"""Writing operators and the forms that return the result instead."""

from __future__ import annotations

import pytest
import torch

from lowtide.capture import functional
from lowtide.ir.aten import call, resolve, tensors_of
from lowtide.ir.ops import Aten, Ref

R0, R1, R2 = Ref(0), Ref(1), Ref(2)


@pytest.mark.parametrize(
    ("op", "form", "kept"),
    [
        (Aten("aten.add_.Tensor", (R0, R1)), "aten.add.Tensor", 0),
        (Aten("aten.relu_.default", (R0,)), "aten.relu.default", 0),
        (Aten("aten.__iand__.Tensor", (R0, R1)), "aten.__and__.Tensor", 0),
        (Aten("aten.bernoulli_.float", (R0,)), "aten.bernoulli.p", 0),
        (Aten("aten.maximum.out", (R0, R1), (("out", R2),)), "aten.maximum.default", 0),
        (Aten("aten.rrelu_with_noise_.default", (R0, R1)), "aten.rrelu_with_noise_functional.default", 0),
        (
            Aten("aten.native_batch_norm.default", (R0, None, None, R1, R2, True, 0.1, 1e-5)),
            "aten._native_batch_norm_legit_functional.default",
            3,
        ),
    ],
)
def test_forms(op: Aten, form: str, kept: int) -> None:
    found = functional.find(op)
    assert found is not None
    assert (found.op.overload, found.kept) == (form, kept)


def test_written_arguments() -> None:
    norm = "aten.native_batch_norm.default"
    assert functional.written(Aten("aten.add_.Tensor", (R1, R0))) == (1,)
    assert functional.written(Aten("aten.maximum.out", (R0, R1), (("out", R2),))) == (2,)
    assert functional.written(Aten("aten.add.Tensor", (R0, R1))) == ()
    assert functional.written(Aten(norm, (R0, None, None, R1, R2, True, 0.1, 1e-5))) == (1, 2)
    assert functional.written(Aten(norm, (R0, None, None, R1, R2, False, 0.1, 1e-5))) == ()
    assert functional.written(Aten(norm, (R0, None, None, None, None, True, 0.1, 1e-5))) == ()


def test_an_operator_without_a_form() -> None:
    assert functional.find(Aten("aten.set_.source_Tensor_storage_offset", (R0, R1, 0, (1,)))) is None
    assert (
        functional.find(Aten("aten.cudnn_batch_norm.default", (R0, R1, None, None, None, True, 0.1, 1)))
        is None
    )


POINTWISE = [
    "relu",
    "sigmoid",
    "tanh",
    "exp",
    "neg",
    "abs",
    "sqrt",
    "silu",
    "hardswish",
    "elu",
    "gelu",
    "zero",
]
DRAWING = ["uniform", "normal", "exponential", "bernoulli", "geometric", "cauchy", "log_normal", "random"]


@pytest.mark.parametrize("name", POINTWISE + DRAWING)
@pytest.mark.parametrize("contiguous", [True, False])
def test_forms_compute_the_same_bits(name: str, contiguous: bool) -> None:
    x = torch.rand(4, 6) if contiguous else torch.rand(6, 4).t()
    packet = getattr(torch.ops.aten, f"{name}_", None)
    if packet is None:
        pytest.skip(f"{name}_ does not exist")
    overload = next(v for v in packet.overloads() if v in {"default", "float"})
    op = Aten(f"aten.{name}_.{overload}", (R0,) + ((0.3,) if name == "geometric" else ()))
    form = functional.find(op)
    assert form is not None
    # A non-contiguous Bernoulli draw is laid out by `layout.drawing_order`, not by the form alone.
    if name == "bernoulli" and not contiguous:
        return
    torch.manual_seed(0)
    (ours,) = tensors_of(call(form.op, [x.clone()]))
    after = torch.get_rng_state()
    torch.manual_seed(0)
    theirs = x.clone()
    call(op, [theirs])
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert torch.equal(after, torch.get_rng_state())


def test_backward_of_batch_norm_does_not_look_at_running_statistics() -> None:
    """`passes.drop_statistics` relies on it."""
    backward = torch.ops.aten.native_batch_norm_backward
    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x, gradient = (torch.randn(4, 3, 5, 5).to(dtype, memory_format=layout) for _ in range(2))
            weight, mean, variance = (torch.rand(3, dtype=dtype) + 1 for _ in range(3))
            _, saved_mean, saved_rstd = torch.ops.aten.native_batch_norm(
                x, weight, weight, mean, variance, True, 0.1, 1e-5
            )
            given, absent = (
                backward(gradient, x, weight, *s, saved_mean, saved_rstd, True, 1e-5, [True] * 3)
                for s in ((mean, variance), (None, None))
            )
            assert all(torch.equal(one, other) for one, other in zip(given, absent, strict=True))


def test_almost_every_writing_operator_has_a_form() -> None:
    names = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    writing, without = 0, []
    for name in names:
        packet, _, variant = name.partition(".")
        try:
            operator = resolve(f"aten.{packet}.{variant or 'default'}")
        except ValueError:
            continue
        if operator._schema.is_mutable and not variant.endswith("out"):
            writing += 1
            if functional.find(Aten(str(operator))) is None:
                without.append(str(operator))
    assert writing > 300
    assert len(without) < 30, without
