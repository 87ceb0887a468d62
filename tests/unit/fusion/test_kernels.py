"""Generated kernels, one idea each, against eager; how many loops they have where that is the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.differential.fusion_bodies import trace
from torch.nn import functional

from lowtide.fusion.codegen.library import compile_bodies, emit_source
from lowtide.fusion.codegen.lower import lower
from lowtide.fusion.codegen.nest import plan_stages
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir.graph import Graph

A = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def written_softmax(x: torch.Tensor) -> torch.Tensor:
    power = torch.exp(x - x.amax(-1, keepdim=True))
    return power / power.sum(-1, keepdim=True)


Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]
CASES: dict[str, Case] = {  # function, inputs, stages
    "chain": (lambda x, y: (x + y) * 2 - x, (rand(5, 7), rand(7)), 1),
    "softmax written out is one pass over rows": (written_softmax, (rand(33, 1000),), 1),
    "softmax over the first axis": (lambda x: torch.softmax(x, 0), (rand(33, 100),), 1),
    "log-softmax over channels": (lambda x: torch.log_softmax(x, 1), (rand(2, 4, 16, 17),), 1),
    "add, layer norm, gelu": (
        lambda x, y, w, b: functional.gelu(functional.layer_norm(x + y, (768,), w, b)),
        (rand(37, 768), rand(37, 768), rand(768), rand(768)),
        1,
    ),
    "layer norm backward reads its rows once": (
        lambda g, x, m, r, w, b: A.native_layer_norm_backward(g, x, [64], m, r, w, b, [True] * 3),
        (rand(40, 64), rand(40, 64), rand(40, 1), rand(40, 1).abs(), rand(64), rand(64)),
        2,
    ),
    "batch norm": (
        lambda x, w, b: torch.relu(A._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0]),
        (rand(4, 10, 12, 3), rand(10), rand(10)),
        1,
    ),
    "group norm": (
        lambda x, w, b: functional.group_norm(x, 5, w, b),
        (rand(4, 10, 12, 3), rand(10), rand(10)),
        2,
    ),
    "gelu backward and the bias gradient": (
        lambda g, x: (lambda z: (z, z.sum(0)))(A.gelu_backward(g, x)),
        (rand(100, 64), rand(100, 64)),
        2,
    ),
    "permute, add, relu": (
        lambda x, y: torch.relu(x.permute(0, 2, 1) + y) * 2,
        (rand(3, 40, 36), rand(3, 36, 40)),
        1,
    ),
    "heads": (lambda x: x.view(2, 8, 3, 4).transpose(1, 2).contiguous() + 1, (rand(2, 8, 12),), 1),
    "cat then relu": (lambda x, y: torch.relu(torch.cat([x, y], 1)), (rand(4, 10, 12), rand(4, 3, 12)), 2),
    "pad": (lambda x: functional.pad(x, (1, 2, 3, 0)), (rand(4, 10, 12),), 4),
    "embedding": (lambda w, i: functional.embedding(i, w) * 2, (rand(40, 16), ints(40, 3, 5)), 1),
    "cross-entropy": (functional.cross_entropy, (rand(40, 16), ints(16, 40)), 2),
    "linear, gelu": (
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        (rand(4, 33, 70), rand(300, 70), rand(300)),
        1,
    ),
    "product of transposed operands": (lambda x, y: x.t() @ y.t(), (rand(300, 100), rand(90, 300)), 1),
    "product with a computed operand": (lambda x, y: torch.relu(x) @ y, (rand(70, 300), rand(300, 90)), 1),
    "heads from a linear layer": (
        lambda x, w, b: functional.linear(x, w, b).view(2, 50, 6, 32).transpose(1, 2).contiguous(),
        (rand(2, 50, 70), rand(192, 70), rand(192)),
        1,
    ),
    "attention written out": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v,
        (rand(3, 100, 64), rand(3, 130, 64), rand(3, 130, 48)),
        3,
    ),
    "attention with a mask, four axes": (
        lambda q, k, v: (
            (torch.softmax((q @ k.transpose(-2, -1)).tril(), -1) @ v).transpose(1, 2).contiguous()
        ),
        (rand(2, 3, 70, 32), rand(2, 3, 70, 32), rand(2, 3, 70, 32)),
        3,
    ),
    "attention that keeps its weights": (
        lambda q, k, v: (lambda p: (p, p @ v))(torch.softmax(q @ k.transpose(-2, -1), -1)),
        (rand(3, 50, 16), rand(3, 50, 16), rand(3, 50, 16)),
        3,
    ),
    "scaled dot product attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        (rand(2, 3, 70, 32), rand(2, 3, 90, 32), rand(2, 3, 90, 32)),
        3,
    ),
    "causal attention": (
        lambda q, k, v: A._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        (rand(2, 3, 70, 32), rand(2, 3, 70, 32), rand(2, 3, 70, 32)),
        3,
    ),
    "layer norm of a product": (
        lambda x, w: functional.layer_norm(x @ w, (90,)),
        (rand(100, 300), rand(300, 90)),
        2,
    ),
    "full sum in fixed chunks": (lambda x: x.sum(), (rand(1000, 100),), 2),
    "bfloat16": (lambda x, y: (x + y) * x, (rand(40, 100).bfloat16(), rand(40, 100).bfloat16()), 1),
}


@pytest.fixture(scope="module")
def bodies() -> dict[str, Graph]:
    return {name: trace(function, inputs) for name, (function, inputs, _) in CASES.items()}


@pytest.fixture(scope="module")
def kernels(bodies: dict[str, Graph]) -> dict[str, Any]:
    library = compile_bodies(list(bodies.values()))
    assert library is not None
    return {name: library.kernel(k) for k, name in enumerate(bodies)}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_eager(name: str, kernels: dict[str, Any]) -> None:
    function, inputs, _ = CASES[name]
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for threads in (1, 2, 3):
        for ours, eager in zip(kernels[name].run(inputs, threads), expected, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)
            scale = eager.double().abs().max().item()
            assert (ours.double() - eager.double()).abs().max().item() <= 2e-6 * max(scale, 1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_number_of_stages(name: str, bodies: dict[str, Graph]) -> None:
    assert len(plan_stages(lower(bodies[name]).kernel)) == CASES[name][2]


@pytest.mark.parametrize("name", list(CASES))
def test_result_does_not_depend_on_threads(name: str, kernels: dict[str, Any]) -> None:
    _, inputs, _ = CASES[name]
    one, three = kernels[name].run(inputs, 1), kernels[name].run(inputs, 3)
    assert all(torch.equal(x, y) for x, y in zip(one, three, strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if "attention" in name])
def test_attention_keeps_no_square_of_scores(name: str, kernels: dict[str, Any]) -> None:
    """Scratch is a block of 64 rows of scores and the packed operands, not heads x length x length."""
    _, (q, k, _), _ = CASES[name]
    squares = q.numel() // q.shape[-1] * k.shape[-2] * 4
    rows = 64 * k.shape[-2] * 4
    assert kernels[name].signature.shared_bytes == 0
    assert kernels[name].signature.scratch_bytes(1) < max(squares, 5 * rows)


def test_common_subtrees_are_computed_once() -> None:
    """DNNFusion, figure 4: the shared product is emitted once."""

    def figure(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        one, again = torch.exp(a * b), torch.exp(a * b)
        return (one * c).reciprocal() + again * again

    text, _, _ = emit_source([trace(figure, (rand(4, 5), rand(4, 5), rand(4, 5)))])
    assert text.count("= lt_exp(") == 1


def test_equal_bodies_share_one_function() -> None:
    body = trace(lambda x: torch.relu(x) * 3, (rand(8, 8),))
    library = compile_bodies([body, body])
    assert library is not None
    assert library.kernel(0).name == library.kernel(1).name


def test_an_index_outside_its_table_is_an_error() -> None:
    body = trace(lambda w, i: functional.embedding(i, w) * 2, (rand(40, 16), ints(40, 5)))
    library = compile_bodies([body])
    assert library is not None
    with pytest.raises(IndexError, match="outside its table"):
        library.kernel(0).run([rand(40, 16), torch.tensor([0, 1, 40, 3, 4])])


@pytest.mark.parametrize("target", [5, -1, -100])
def test_a_target_that_is_no_class_is_an_error_as_in_eager(target: int) -> None:
    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return functional.nll_loss(torch.log_softmax(x, 1), t)

    x, t = rand(6, 5), torch.tensor([0, 4, 1, 2, 3, target])
    library = compile_bodies([trace(loss, (x, t.clamp(min=0, max=4)))])
    assert library is not None
    if target == -100:  # ignored
        torch.testing.assert_close(library.kernel(0).run([x, t])[0], loss(x, t))
        return
    with pytest.raises(IndexError):
        loss(x, t)
    with pytest.raises(IndexError, match="outside its table"):
        library.kernel(0).run([x, t])


def test_a_value_kept_for_a_later_pass_under_one_that_varies_less() -> None:
    """The inner value does not depend on the last column variable, so it is ready before it is kept."""

    def body(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(g / 3)[:, :, None, None].expand(4, 4, 5, 5)
        total = (wide * y).sum((0, 2, 3))
        return (y - wide / 25) * total[None, :, None, None]

    given = (rand(4, 4), rand(4, 4, 5, 5))
    library = compile_bodies([trace(body, given)])
    assert library is not None
    torch.testing.assert_close(library.kernel(0).run(list(given))[0], body(*given), rtol=1e-5, atol=1e-5)


def test_what_has_no_kernel_is_refused_by_name() -> None:
    body = trace(lambda x: torch.cumsum(x, 0), (rand(3, 4),))
    with pytest.raises(Unfusable, match="cumsum"):
        emit_source([body])


def test_output_may_take_the_memory_of_an_input_only_if_safe() -> None:
    chain = compile_bodies([trace(lambda x, y: torch.relu(x) + y.t(), (rand(8, 8), rand(8, 8)))])
    rows = compile_bodies([trace(lambda x: torch.softmax(x, -1), (rand(8, 8),))])
    assert chain is not None and rows is not None
    assert chain.kernel(0).signature.inplace == ((0, 0),)
    assert rows.kernel(0).signature.inplace == ()


def test_without_a_compiler_plans_run_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.fusion.codegen.library.find_compiler", lambda: None)
    with pytest.warns(UserWarning, match="run unfused"):
        assert compile_bodies([trace(torch.relu, (rand(3),))]) is None


def test_blas_stands_in_for_the_micro_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose libtorch exports no brgemm: same results from BLAS."""
    from lowtide.fusion.codegen import library, shelf

    plain = shelf.preamble
    monkeypatch.setattr(shelf, "preamble", lambda *parts: "#define LT_BLAS\n" + plain(*parts))
    x, y = rand(50, 60), rand(60, 70)
    found = library.compile_bodies([trace(torch.mm, (x, y))])
    assert found is not None
    torch.testing.assert_close(found.kernel(0).run([x, y])[0], x @ y, rtol=1e-5, atol=1e-5)
