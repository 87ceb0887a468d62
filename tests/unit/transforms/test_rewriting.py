"""Rewriting on graphs: what is found, what is left alone, and what a reader sees afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.differential.fusion_bodies import trace
from torch import nn
from torch.nn import functional

from lowtide.capture.door import capture
from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph, Role
from lowtide.ir.ops import Aten
from lowtide.ir.text import parse_graph
from lowtide.ir.verify import verify
from lowtide.transforms.rewriting.derived import derived_nodes, split_derived
from lowtide.transforms.rewriting.record import Rewritten
from lowtide.transforms.rewriting.rewrite import RewriteOptions, rewrite
from lowtide.transforms.rewriting.rule import Numerics
from lowtide.workload import Workload

EVERYTHING = RewriteOptions(frozenset(Numerics), cancelling=True)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def names(graph: Graph) -> list[str]:
    return [
        n.op.overload.split(".")[1] for n in graph.nodes if isinstance(n.op, Aten) and not graph.is_view(n)
    ]


def rules(edit: Rewritten) -> list[str]:
    return [each.rule for each in edit.applied]


def run(graph: Graph, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """All values, operator by operator; layouts must be the predicted ones."""
    values = dict(given)
    for node in graph.nodes:
        assert isinstance(node.op, Aten)
        results = tensors_of(call(node.op, [values[value] for value in node.inputs]))
        for out, result in zip(node.outputs, results, strict=True):
            assert tuple(result.stride()) == graph.values[out].meta.stride or not result.numel()
            values[out] = result
    return values


def rewritten(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], options: RewriteOptions | None = None
) -> Rewritten:
    """The rewritten trace, verified and compared with the function."""
    graph = trace(function, inputs)
    edit = rewrite(graph, options)
    verify(edit.graph)
    before = run(graph, dict(zip(graph.inputs, inputs, strict=True)))
    after = run(edit.graph, dict(zip(edit.graph.inputs, inputs, strict=True)))
    for out in graph.outputs:
        torch.testing.assert_close(after[out], before[out], rtol=2e-5, atol=2e-6)
    return edit


def test_the_largest_saving_comes_first() -> None:
    """Factoring saves a product of the whole size; the sum of the small pair waits."""

    def both(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (a * b + a * c) * (d - -d)

    edit = rewritten(both, [rand(32, 16)] * 3 + [rand(16)])
    assert rules(edit)[0] == "shared-factor" and len(edit.applied) == 2
    assert names(edit.graph) == ["add", "mul", "add", "mul"]


def test_a_broadcast_factor_is_not_pulled_out_where_that_costs_more() -> None:
    """a*k + b*k with rows a, b and a column k: both forms are counted on these shapes."""
    column, row = rand(32, 1), rand(1, 32)
    edit = rewritten(lambda a, b, k: a * k + b * k, [row, row * 2, column])
    assert names(edit.graph) == ["add", "mul"]  # (a + b)*k: one row, then the square
    edit = rewritten(lambda a, b, k: k * a + k * b.sum(1, keepdim=True), [column, column, rand(32, 32)])
    assert "add" in names(edit.graph)


def test_a_shared_product_is_not_taken_apart() -> None:
    edit = rewritten(
        lambda a, b, c: (a * b + a * c, torch.cumsum(a * b, 0), torch.cumsum(a * c, 0)), [rand(8, 8)] * 3
    )
    assert rules(edit).count("shared-factor") == 0
    assert names(edit.graph).count("mul") == 2


def test_operators_without_properties_cut() -> None:
    """tanh stands between the two factors: nothing is shared across it."""
    edit = rewritten(lambda a, b: torch.tanh(a * b) + a * b * 2, [rand(8, 8), rand(8, 8)])
    assert "tanh" in names(edit.graph)


def test_chains_are_matched_in_any_order() -> None:
    edit = rewritten(lambda a, b, c: a.abs() * b * (c.abs() * 2), [rand(8, 8)] * 3)
    assert names(edit.graph).count("abs") == 1


def test_domain_and_cancelling_rules_are_not_applied_by_default() -> None:
    def risky(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (a * torch.sqrt(b)) * torch.sqrt(b), torch.exp(a).prod(1, keepdim=True)

    inputs = [rand(8, 8), rand(8, 8).abs()]
    assert not {"shared-root", "product-of-exps"} & set(rules(rewritten(risky, inputs)))
    assert "product-of-exps" in rules(rewritten(risky, inputs, EVERYTHING))


def test_exact_only_leaves_products_as_they_are() -> None:
    options = RewriteOptions(frozenset({Numerics.EXACT}))
    edit = rewritten(lambda a, b, c: (a * b + a * c) - -b, [rand(8, 8)] * 3, options)
    assert names(edit.graph) == ["mul", "mul", "add", "add"]


def test_integers_wrap_and_are_matched_by_their_own_rules_only() -> None:
    whole = torch.arange(-32, 32).view(8, 8)
    edit = rewritten(lambda a: torch.bitwise_left_shift(a, 2).sum(1, keepdim=True), [whole], EVERYTHING)
    assert names(edit.graph) == ["sum", "__lshift__"]
    assert rewritten(lambda a, b: a * b + a * b, [whole, whole]).graph is not None


def test_a_result_that_turns_out_to_be_another_value() -> None:
    """-(-x) is x: readers read x itself; what the caller gets is a copy of his argument, not the argument."""
    edit = rewritten(lambda x: torch.cumsum(torch.neg(torch.neg(x)), 0), [rand(8, 8)])
    assert names(edit.graph) == ["cumsum"]
    edit = rewritten(lambda x: torch.neg(torch.neg(x)), [rand(8, 8)])
    assert names(edit.graph) == ["clone"]


def test_layouts_that_would_change_are_not_rewritten() -> None:
    """The sum of two transposed tensors is transposed; a copy of one of them is what it is."""
    edit = rewritten(lambda a, b: torch.cumsum(a.t() * b.t() + a.t() * b.t() * 2, 0), [rand(8, 4)] * 2)
    verify(edit.graph)


def test_forward_says_where_values_went() -> None:
    graph = trace(lambda a, b: (torch.tanh(a) + torch.tanh(a) * b).cumsum(0), [rand(4, 4)] * 2)
    edit = rewrite(graph)
    first, second = (n.outputs[0] for n in graph.nodes if n.op == Aten("aten.tanh.default", n.op.args))  # type: ignore[union-attr]
    assert edit.resolve(first) == first and edit.resolve(second) == first
    assert all(value is None or value in edit.graph.values for value in edit.forward.values())


COMMON = """
input %0: f32[8,8]
input %1: f32[8,8] param
%2: f32[8,8] = aten.tanh.default(%0)  # - a.py:1
%3: f32[8,8] = aten.tanh.default(%0)  # - a.py:2 PHASE
%4: f32[8,8] = aten.mul.Tensor(%2, %3)  # - a.py:2 PHASE
%5: f32[8,8] output = aten.cumsum.default(%4, 0)  # - a.py:2 PHASE
return %5
"""


@pytest.mark.parametrize(("phase", "left"), [("loss", 2), ("backward", 2), ("forward", 1)])
def test_what_the_backward_computes_again_stays_computed_again(phase: str, left: int) -> None:
    """A user's checkpoint must not be undone."""
    graph = parse_graph(COMMON.replace("PHASE", phase))
    assert names(rewrite(graph).graph).count("tanh") == left


def test_rules_do_not_share_what_the_backward_computes_again() -> None:
    """The rewrite of the second product must not read the first one's result."""
    text = """
    input %0: f32[8,8]
    input %1: f32[8,8]
    %2: f32[8,8] = aten.mul.Tensor(%0, %1)
    %3: f32[8,8] = aten.tanh.default(%2)
    %4: f32[8,8] = aten.mul.Tensor(%0, %1)  # - - backward
    %5: f32[8,8] = aten.neg.default(%4)  # - - backward
    %6: f32[8,8] = aten.sub.Tensor(%3, %5)  # - - backward
    %7: f32[8,8] output = aten.cumsum.default(%6, 0)  # - - backward
    return %7
    """
    edit = rewrite(parse_graph(text))
    assert names(edit.graph) == ["mul", "tanh", "mul", "add", "cumsum"]


def test_values_that_are_written_are_read_where_they_were() -> None:
    text = """
    input %0: f32[8,8] buffer
    input %1: f32[8,8]
    %2: f32[8,8] = aten.mul.Tensor(%0, %1)
    %3: f32[8,8] = aten.neg.default(%2)
    n9: aten.copy_.default(%0!, %1)
    %4: f32[8,8] = aten.mul.Tensor(%0, %1)
    %5: f32[8,8] output = aten.sub.Tensor(%4, %3)
    return %5
    """
    graph = parse_graph(text)
    edit = rewrite(graph)
    verify(edit.graph)
    order = [node.id for node in edit.graph.nodes]
    assert order.index(2) < order.index(9) < order.index(4)


class Attention(nn.Module):
    def __init__(self, scaled: bool, fused: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.qkv = nn.Linear(16, 48)
        self.scaled, self.fused = scaled, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split(16, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.view(2, 8, 4, 4).transpose(1, 2) for p in parts)
        if self.scaled:
            return torch.softmax(q @ k.transpose(-2, -1) * 0.3, -1) @ v
        return functional.scaled_dot_product_attention(q, k, v)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.b, self.m = nn.ConvTranspose2d(8, 4, 2), nn.BatchNorm2d(4)
        for norm in (self.n, self.m):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.m(self.b(self.n(self.a(x)).relu()))


def derived(module: nn.Module, *inputs: torch.Tensor) -> tuple[Rewritten, Counter[str]]:
    """Rewritten with derived weights, prepared once, compared with eager."""
    program = capture(Workload(module.eval(), args=inputs))
    edit = rewrite(program.graph, RewriteOptions(derive=True))
    verify(edit.graph)
    parts = split_derived(edit.graph)
    verify(parts.graph)
    verify(parts.preparation)
    given = program.bind(inputs)
    with torch.no_grad():
        ready = run(parts.preparation, given)
        got = run(parts.graph, {**given, **{value: ready[value] for value in parts.state}})
        expected = run(program.graph, given)
    for out in program.graph.outputs:
        worst = (got[out] - expected[out]).abs().max() / expected[out].abs().max()
        assert worst.item() <= 2e-6
    assert derived_nodes(parts.graph) == () or all(
        parts.graph.is_view(parts.graph.node[n]) for n in derived_nodes(parts.graph)
    )
    return edit, Counter(rules(edit))


def test_projections_of_one_input_are_one_product() -> None:
    edit, applied = derived(Attention(scaled=False), rand(2, 8, 16))
    assert applied["merged-products"] == 1
    assert sum(name == "addmm" for name in names(edit.graph)) == 1


def test_scales_go_into_weights() -> None:
    edit, applied = derived(Attention(scaled=True), rand(2, 8, 16))
    assert applied["folded-scale"] == 1
    ahead = set(derived_nodes(edit.graph))
    left = [n for n in edit.graph.nodes if n.id not in ahead and not edit.graph.is_view(n)]
    assert not any(isinstance(n.op, Aten) and n.op.overload == "aten.mul.Tensor" for n in left)


def test_a_scale_of_a_part_of_a_product_is_not_folded_into_the_whole() -> None:
    """The queries of one joint projection are scaled; its keys and values are not."""
    _, applied = derived(Attention(scaled=True, fused=True), rand(2, 8, 16))
    assert applied["folded-scale"] == 0


def test_batch_norm_goes_into_convolutions() -> None:
    edit, applied = derived(Convolutions(), rand(2, 3, 8, 8))
    assert applied["folded-norm"] == 2
    assert "native_batch_norm" not in names(edit.graph)


def test_batch_norm_in_training_mode_stays() -> None:
    model = Convolutions().train()
    program = capture(Workload(model, args=(rand(2, 3, 8, 8),)))
    assert rewrite(program.graph, RewriteOptions(derive=True)).applied == ()


def test_products_read_a_transposed_copy_where_it_lies() -> None:
    def scores(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.bmm(a, b.transpose(1, 2).contiguous())

    edit = rewritten(scores, [rand(2, 8, 4), rand(2, 8, 4)])
    assert rules(edit) == ["absorbed-copy"] and names(edit.graph) == ["bmm"]


def test_a_copy_that_a_view_needs_stays() -> None:
    edit = rewritten(
        lambda a, b: torch.mm(a.transpose(1, 2).contiguous().view(8, 16), b), [rand(2, 8, 8), rand(16, 4)]
    )
    assert edit.applied == () and "clone" in names(edit.graph)


def test_derived_weights_are_constants_of_the_rest() -> None:
    program = capture(Workload(Convolutions().eval(), args=(rand(2, 3, 8, 8),)))
    parts = split_derived(rewrite(program.graph, RewriteOptions(derive=True)).graph)
    assert parts.state and set(parts.state) <= set(parts.graph.inputs)
    assert all(parts.graph.storage_of(value).role is Role.CONST for value in parts.state)
    assert names(parts.graph) == ["convolution", "relu", "convolution"]
