"""Every rewrite rule is what its class says, as an equation and at random sites of graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from tests.differential import rule_trials as trials
from tests.differential.fusion_bodies import trace

from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten
from lowtide.ir.verify import verify
from lowtide.transforms.rewriting.meaning import evaluate
from lowtide.transforms.rewriting.rewrite import RULES, RewriteOptions, algebra
from lowtide.transforms.rewriting.rule import Numerics, Property, Rule
from lowtide.transforms.rewriting.term import Apply, Term, Var, subterms, variables

EVERY = pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}: {rule.left}")


def test_there_are_as_many_as_in_the_paper() -> None:
    counts = {kind: sum(rule.property is kind for rule in RULES) for kind in Property}
    assert counts == {Property.ASSOCIATIVE: 45, Property.DISTRIBUTIVE: 38, Property.COMMUTATIVE: 66}
    assert sum(rule.printed for rule in RULES) == 10
    assert len({rule.name for rule in RULES}) == len({(r.left, r.integers) for r in RULES}) == len(RULES)


@EVERY
def test_the_equation_holds_as_its_class_says(rule: Rule) -> None:
    left, right = rule.pattern, rule.result
    if rule.integers:
        assert holds_for_integers(left, right)
        return
    assert trials.agrees(left, right, "positive", torch.float64, 1e-10)
    if rule.numerics is Numerics.EXACT:
        assert trials.is_exact(left, right)
    if rule.numerics is Numerics.REASSOCIATES:
        assert trials.agrees(left, right, "signed", torch.float64, 1e-10)
        assert trials.agrees(left, right, "zeros", torch.float64, 1e-10)
        assert trials.is_conditioned(left, right) or not rule.conditioned
    if rule.numerics is Numerics.DOMAIN:  # not for all operands: else it would be in a better class
        assert trials.classify_numerics(left, right)[0] is Numerics.DOMAIN


def holds_for_integers(left: Term, right: Term) -> bool:
    """Wrapping 64-bit integers, small and large."""
    generator = torch.Generator().manual_seed(0)
    for shape in trials.SHAPES:
        for bound in (5, 2**62):
            given = {
                name: torch.randint(
                    -bound, bound, (shape[0], 1) if name[0] == "k" else shape, generator=generator
                )
                for name in variables(left)
            }
            if not torch.equal(evaluate(left, given), evaluate(right, given)):
                return False
    return True


def site_of(
    rule: Rule, seed: int, dtype: torch.dtype
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """A function in which the rule's left side occurs among other operators, and operands for it."""
    rng = random.Random(seed)
    names = variables(rule.pattern)
    shape = rng.choice(((16, 24), (5, 7), (64, 33)))
    partial = {"sqrt", "rsqrt", "log"} & {t.op for t in subterms(rule.pattern) if isinstance(t, Apply)}
    positive = rule.numerics is Numerics.DOMAIN or bool(partial)
    kind = "positive" if positive else "signed"
    if rule.integers:
        given = [torch.randint(-9, 9, (shape[0], 1) if n[0] == "k" else shape) for n in names]
    else:
        given = list(trials.operands(names, shape, seed, dtype, kind).values())

    def site(*args: torch.Tensor) -> torch.Tensor:
        inside = {name: arg.clone() for name, arg in zip(names, args, strict=True)}
        return torch.cumsum(evaluate(rule.pattern, inside), 0).flip(0)

    return site, given


def run(graph: Graph, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The graph's results, one operator after the other."""
    values: dict[int, torch.Tensor] = dict(zip(graph.inputs, given, strict=True))
    for node in graph.nodes:
        assert isinstance(node.op, Aten)
        results = tensors_of(call(node.op, [values[value] for value in node.inputs]))
        values.update(zip(node.outputs, results, strict=True))
    return tuple(values[value] for value in graph.outputs)


def applicable(rule: Rule) -> bool:
    """Whether the rule saves anything on its own: swaps only enable others."""
    return rule.name != "swap-factors"


@EVERY
def test_sites_are_rewritten_to_the_same_numbers(rule: Rule) -> None:
    for seed, dtype in ((0, torch.float64), (1, torch.float32)):
        site, given = site_of(rule, seed, dtype)
        graph = trace(site, given)
        edit = algebra(graph, RewriteOptions(frozenset(Numerics), cancelling=True, rules=(rule,)))
        verify(edit.graph)
        assert [each.rule for each in edit.applied] == ([rule.name] if applicable(rule) else [])
        (expected,), (got,) = run(graph, given), run(edit.graph, given)
        if rule.integers or rule.numerics is Numerics.EXACT:
            assert trials.same_bits(got, expected)
        else:
            largest = max(expected.abs().max().item(), 1e-30)
            tolerance = 1e-10 if dtype == torch.float64 else 2e-6 if rule.conditioned else 1e-3
            assert (got - expected).abs().max().item() <= tolerance * largest


def test_an_unbound_variable_is_refused_when_the_rule_is_defined() -> None:
    with pytest.raises(ValueError, match="b is not bound by 'recip"):
        Rule("wrong", "recip(a)", "a*b", Property.ASSOCIATIVE, Numerics.EXACT)
    with pytest.raises(ValueError, match="no operator to look for"):
        Rule("wrong", "a", "a", Property.ASSOCIATIVE, Numerics.EXACT)


def test_table_4_as_printed_has_a_wrong_row() -> None:
    """``A*C + A*B -> (A + B)*C`` is bound and false: what numbers say decides."""
    wrong = Rule("sic", "a*c + a*b", "(a + b)*c", Property.DISTRIBUTIVE, Numerics.REASSOCIATES)
    assert trials.classify_numerics(wrong.pattern, wrong.result)[0] is None


def test_variables_are_the_leaves() -> None:
    for rule in RULES:
        leaves = {each.name for each in subterms(rule.pattern) if isinstance(each, Var)}
        assert leaves == set(variables(rule.pattern)) and isinstance(rule.pattern, Apply)
