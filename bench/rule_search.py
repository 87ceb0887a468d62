"""The rest of the rules: enumerate small terms, keep equal pairs where one is cheaper.

    python bench/rule_search.py [--operators 3] > lines for transforms/rewriting/rules_*.py

Terms over three variables, one that does not vary along the reduced axis (``k``) and the number 1 are built
level by level from the cheapest term of every class.  Two terms are equal if they agree on random numbers
in float64 (signed and positive: those that agree only on the positive are of class `domain`).  A pair is a
rule if one side needs fewer FLOPs (or fewer bytes at equal FLOPs) and the rules found so far do not get
there already.  Classes are measured by `classify_numerics`, which the tests use too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "src"),
]

from tests.differential.rule_trials import classify_numerics  # noqa: E402

from lowtide.transforms.rewriting.greedy import Search, rewrite_partition  # noqa: E402
from lowtide.transforms.rewriting.rewrite import RULES  # noqa: E402
from lowtide.transforms.rewriting.rule import Numerics, Property, Rule  # noqa: E402
from lowtide.transforms.rewriting.sheet import Impossible, Sheet  # noqa: E402
from lowtide.transforms.rewriting.spelling import Axes  # noqa: E402
from lowtide.transforms.rewriting.term import (  # noqa: E402
    ADDITIVE,
    COMMUTATIVE,
    REDUCTIONS,
    Apply,
    Number,
    Term,
    Var,
    print_term,
    subterms,
    variables,
)

ROWS, COLUMNS = 8, 16
ENOUGH = 90
"""Rules per property after which the search ends."""
OVER = Axes((1,), True, 2, (COLUMNS,))
UNARY = ("neg", "abs", "recip", "sqrt", "rsqrt", "square", "exp", "log", "relu", *sorted(REDUCTIONS))
BINARY = ("add", "sub", "mul", "div")

Values = tuple[np.ndarray, np.ndarray]


@dataclass
class Entry:
    """A term with its values (signed, positive), its operators and its cost."""

    term: Term
    values: Values
    operators: int
    cost: tuple[int, int]


@dataclass
class Book:
    """The cheapest term of every class, by the fingerprints on both samples."""

    best: dict[tuple[bytes, bytes], Entry] = field(default_factory=dict)
    positive: dict[bytes, Entry] = field(default_factory=dict)
    levels: list[list[Entry]] = field(default_factory=list)
    pairs: list[tuple[Entry, tuple[bytes, bytes]]] = field(default_factory=list)


def fingerprint(value: np.ndarray) -> bytes:
    """Eight significant digits of every element, and the shape."""
    if value.ndim == 0:
        return repr(float(value)).encode()
    with np.errstate(all="ignore"):
        return repr(value.shape).encode() + b"".join(b"%.8g," % each for each in (value.ravel()[::5] + 0.0))


def seeds() -> list[Entry]:
    rng = np.random.default_rng(0)
    found = []
    for name in "abck":
        shape = (ROWS, 1) if name == "k" else (ROWS, COLUMNS)
        signed, positive = rng.normal(size=shape), rng.uniform(0.3, 2.0, size=shape)
        found.append(Entry(Var(name), (signed, positive), 0, (0, 0)))
    found.append(Entry(Number(1.0), (np.float64(1.0), np.float64(1.0)), 0, (0, 0)))
    return found


FUNCTIONS = {
    "neg": np.negative, "abs": np.abs, "recip": np.reciprocal, "sqrt": np.sqrt, "square": np.square,
    "rsqrt": lambda x: 1 / np.sqrt(x), "exp": np.exp, "log": np.log, "relu": lambda x: np.maximum(x, 0),
    "sum": lambda x: x.sum(1, keepdims=True), "mean": lambda x: x.mean(1, keepdims=True),
    "prod": lambda x: x.prod(1, keepdims=True), "amax": lambda x: x.max(1, keepdims=True),
    "amin": lambda x: x.min(1, keepdims=True),
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
}  # fmt: skip


def cost_of(sheet: Sheet, term: Term) -> tuple[int, tuple[int, int]]:
    root = cell_of(sheet, term)
    return root, sheet.cost(sheet.live([root]))


def cell_of(sheet: Sheet, term: Term) -> int:
    if isinstance(term, Var):
        shape = (ROWS, 1) if term.name == "k" else (ROWS, COLUMNS)
        return sheet.leaf("abck".index(term.name), shape, torch.float32)
    if isinstance(term, Number):
        return sheet.number(term.value)
    attribute = OVER if term.op in REDUCTIONS else None
    return sheet.apply(term.op, tuple(cell_of(sheet, arg) for arg in term.args), attribute)


def enter(
    book: Book, sheet: Sheet, term: Apply, args: tuple[Entry, ...], level: int, out: list[Entry]
) -> None:
    """Value, class and cost of a new term; it joins the book."""
    with np.errstate(all="ignore"):
        values = tuple(FUNCTIONS[term.op](*(arg.values[k] for arg in args)) for k in (0, 1))
    if not np.isfinite(values[1]).all() or np.abs(values[1]).max() > 1e9 or np.ptp(values[1]) < 1e-9:
        return  # out of range, or a constant
    try:
        _, cost = cost_of(sheet, term)
    except Impossible:
        return
    entry = Entry(term, values, level, cost)  # type: ignore[arg-type]
    key = (fingerprint(values[0]), fingerprint(values[1]))
    book.pairs.append((entry, key))
    if key not in book.best:
        out.append(entry)
    if key not in book.best or entry.cost < book.best[key].cost:
        book.best[key] = entry
    if key[1] not in book.positive or entry.cost < book.positive[key[1]].cost:
        book.positive[key[1]] = entry


def grow(book: Book, sheet: Sheet, level: int) -> None:
    """All terms with `level` operators on top of what is in the book."""
    new: list[Entry] = []
    for arg in book.levels[level - 1]:
        for op in UNARY:
            if op not in REDUCTIONS or getattr(arg.values[0], "shape", ()) == (ROWS, COLUMNS):
                enter(book, sheet, Apply(op, (arg.term,)), (arg,), level, new)
    for left, right in splits(book, level):
        for op in BINARY:
            if op in COMMUTATIVE and print_term(left.term) > print_term(right.term):
                continue
            enter(book, sheet, Apply(op, (left.term, right.term)), (left, right), level, new)
    book.levels.append(new)


def splits(book: Book, level: int) -> Iterator[tuple[Entry, Entry]]:
    for i, j in itertools.product(range(level), repeat=2):
        if i + j != level - 1:
            continue
        for left, right in itertools.product(book.levels[i], book.levels[j]):
            if level < 3 or len(set(variables(left.term)) | set(variables(right.term))) <= 3:
                yield left, right


def canonical(term: Term) -> bool:
    """Whether variables occur in alphabetical order (k aside)."""
    names = [name for name in variables(term) if name != "k"]
    return names == list("abc")[: len(names)]


def property_of(left: Term, right: Term) -> Property:
    operators = [each.op for each in subterms(left) if isinstance(each, Apply)]
    if any(op in REDUCTIONS for op in operators):
        return Property.COMMUTATIVE
    chain = [op for op in operators if op in BINARY]
    both = any(op in ADDITIVE for op in chain) and any(op in ("mul", "div") for op in chain)
    if both or (chain and "square" in operators and any(op in ADDITIVE for op in chain)):
        return Property.DISTRIBUTIVE
    return Property.ASSOCIATIVE if chain else Property.COMMUTATIVE


def reaches(
    sheet: Sheet, rules: dict[str, list[Rule]], left: Term, cost: tuple[int, int], shape: object
) -> bool:
    """Whether the rules so far take `left` to something as cheap."""
    root = cell_of(sheet, left)
    (end,), _ = rewrite_partition(sheet, (root,), rules, lambda _k, _c: True, Search(rounds=8))
    return sheet.cost(sheet.live([end])) <= cost


def search(operators: int) -> list[tuple[Property, Rule]]:
    book, sheet = Book(), Sheet()
    book.levels.append(seeds())
    for entry in book.levels[0]:
        key = (fingerprint(entry.values[0]), fingerprint(entry.values[1]))
        book.best[key] = book.positive[key[1]] = entry
    for level in range(1, operators + 1):
        grow(book, sheet, level)
        print(f"# level {level}: {len(book.levels[-1])} classes, {len(book.pairs)} terms", file=sys.stderr)
    return harvest(book)


def harvest(book: Book) -> list[tuple[Property, Rule]]:
    found: list[tuple[Property, Rule]] = []
    index: dict[str, list[Rule]] = {}
    for rule in RULES:
        if rule.printed and not rule.integers:
            add_to(index, rule)
    order = sorted(book.pairs, key=lambda pair: (pair[0].operators, len(print_term(pair[0].term))))
    for entry, key in order:
        if all(sum(kind is own for own, _ in found) > ENOUGH for kind in Property):
            break
        for right in (book.best[key], book.positive[key[1]]):
            rule = candidate(entry, right, index, len(found))
            if rule is not None:
                add_to(index, rule)
                found.append((rule.property, rule))
                break
    return found


def candidate(entry: Entry, right: Entry, index: dict[str, list[Rule]], number: int) -> Rule | None:
    left = entry.term
    if right.cost >= entry.cost or not canonical(left) or not isinstance(left, Apply):
        return None
    if set(variables(right.term)) - set(variables(left)) or isinstance(right.term, Number):
        return None
    sheet = Sheet()
    if reaches(sheet, index, left, right.cost, None):
        return None
    numerics, conditioned = classify_numerics(left, right.term)
    if numerics is None:
        return None
    kind = property_of(left, right.term)
    return Rule(f"found-{number}", print_term(left), print_term(right.term), kind, numerics, conditioned)


def add_to(index: dict[str, list[Rule]], rule: Rule) -> None:
    assert isinstance(rule.pattern, Apply)
    index.setdefault(rule.pattern.op, []).append(rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operators", type=int, default=2)
    found = search(parser.parse_args().operators)
    for kind in Property:
        print(f"# {kind.value}")
        for own, rule in found:
            if own is kind:
                letter = {Numerics.EXACT: "e", Numerics.DOMAIN: "d"}.get(
                    rule.numerics, "r" if rule.conditioned else "c"
                )
                print(f"    {letter}  | {rule.name:16} | {rule.left:40} | {rule.right}")


if __name__ == "__main__":
    main()
