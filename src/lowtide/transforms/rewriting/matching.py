"""Where the left side of a rule occurs: matching modulo commutativity and associativity.

Method.  Operands of commutative operators are tried both ways round.  With `regroup`, chains of one such
operator are multisets: at the root of a rule the left side may be some factors of a longer product (the
others are multiplied on again), inside it a variable may take several.  Exact rules never regroup.

A variable takes any cell, a number included; one whose name starts with ``k`` must not vary along the axes
of the rule's reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations

from lowtide.transforms.rewriting.sheet import Impossible, Sheet
from lowtide.transforms.rewriting.spelling import Axes
from lowtide.transforms.rewriting.term import COMMUTATIVE, REDUCTIONS, Apply, Number, Term, Var

__all__ = ["Binding", "build", "extend", "matches"]

LONGEST_CHAIN = 6
"""Chains with more operands are matched pair by pair only."""


@dataclass(frozen=True)
class Binding:
    """Cells by variable, the attribute that reductions (``axes``) and shifts (``amount``) share."""

    cells: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[str, Axes | int | None] = field(default_factory=dict)

    def bind(self, name: str, cell: int) -> Binding:
        """With one more variable."""
        return Binding({**self.cells, name: cell}, self.attributes)

    def share(self, op: str, attribute: Axes | int | None) -> Binding | None:
        """With the attribute of an operator; None if another one is bound."""
        key = _slot(op)
        if key is None:
            return self
        if key in self.attributes:
            return self if self.attributes[key] == attribute else None
        return Binding(self.cells, {**self.attributes, key: attribute})


def _slot(op: str) -> str | None:
    if op in REDUCTIONS:
        return "axes"
    return "amount" if op == "shl" else None


def matches(
    sheet: Sheet, pattern: Term, cell: int, regroup: bool
) -> Iterator[tuple[Binding, tuple[int, ...]]]:
    """(binding, other operands of its chain) for every way in which `pattern` is `cell`, or a part of it."""
    assert isinstance(pattern, Apply)
    found = _chain_root(sheet, pattern, cell) if regroup else None
    for binding, rest in found or ((b, ()) for b in _match(sheet, pattern, cell, Binding(), regroup)):
        if _invariant(sheet, binding):
            yield binding, rest


def _chain_root(sheet: Sheet, pattern: Apply, cell: int) -> Iterator[tuple[Binding, tuple[int, ...]]] | None:
    if pattern.op not in COMMUTATIVE or sheet.cells[cell].op != pattern.op:
        return None
    operands = _flat(sheet, cell, pattern.op)
    wanted = _flat_pattern(pattern, pattern.op)
    if len(operands) > LONGEST_CHAIN or len(operands) < len(wanted):
        return None
    return _assign(sheet, wanted, operands, Binding(), keep_rest=True)


def _flat(sheet: Sheet, cell: int, op: str) -> tuple[int, ...]:
    found = sheet.cells[cell]
    return tuple(each for arg in found.args for each in _flat(sheet, arg, op)) if found.op == op else (cell,)


def _flat_pattern(pattern: Term, op: str) -> tuple[Term, ...]:
    if isinstance(pattern, Apply) and pattern.op == op:
        return tuple(each for arg in pattern.args for each in _flat_pattern(arg, op))
    return (pattern,)


def _assign(
    sheet: Sheet, wanted: tuple[Term, ...], operands: tuple[int, ...], binding: Binding, keep_rest: bool
) -> Iterator[tuple[Binding, tuple[int, ...]]]:
    """Pattern operands to chain operands, operators first; what is left over is the rest."""
    if not wanted:
        if keep_rest or not operands:
            yield binding, operands
        return
    first = min(wanted, key=lambda term: _freedom(term, binding))
    others = list(wanted)
    others.remove(first)
    for place, operand in enumerate(operands):
        if operand in operands[:place]:
            continue
        left = operands[:place] + operands[place + 1 :]
        for found in _match(sheet, first, operand, binding, True):
            yield from _assign(sheet, tuple(others), left, found, keep_rest)


def _freedom(term: Term, binding: Binding) -> int:
    if isinstance(term, Var):
        return 1 if term.name in binding.cells else 2
    return 0


def _match(sheet: Sheet, pattern: Term, cell: int, binding: Binding, regroup: bool) -> Iterator[Binding]:
    if isinstance(pattern, Var):
        bound = binding.cells.get(pattern.name)
        if bound is None:
            yield binding.bind(pattern.name, cell)
        elif bound == cell:
            yield binding
        return
    found = sheet.cells[cell]
    if isinstance(pattern, Number):
        if found.op == "number" and found.attribute == pattern.value:
            yield binding
        return
    if found.op != pattern.op:
        return
    assert not isinstance(found.attribute, float)
    shared = binding.share(pattern.op, found.attribute)
    if shared is not None:
        yield from _match_operands(sheet, pattern, cell, shared, regroup)


def _match_operands(
    sheet: Sheet, pattern: Apply, cell: int, binding: Binding, regroup: bool
) -> Iterator[Binding]:
    args = sheet.cells[cell].args
    orders = set(permutations(args)) if pattern.op in COMMUTATIVE else {args}
    for order in sorted(orders):
        yield from _match_in_order(sheet, pattern.args, order, binding, regroup)
    if regroup and pattern.op in COMMUTATIVE:
        yield from _match_chain(sheet, pattern, cell, binding)


def _match_in_order(
    sheet: Sheet, wanted: tuple[Term, ...], args: tuple[int, ...], binding: Binding, regroup: bool
) -> Iterator[Binding]:
    if not wanted:
        yield binding
        return
    for found in _match(sheet, wanted[0], args[0], binding, regroup):
        yield from _match_in_order(sheet, wanted[1:], args[1:], found, regroup)


def _match_chain(sheet: Sheet, pattern: Apply, cell: int, binding: Binding) -> Iterator[Binding]:
    """A whole chain inside a rule: one variable takes what the other operands leave."""
    operands, wanted = _flat(sheet, cell, pattern.op), _flat_pattern(pattern, pattern.op)
    if not 2 < len(operands) <= LONGEST_CHAIN or len(wanted) > len(operands):
        return
    if len(wanted) == len(operands):
        yield from (found for found, _ in _assign(sheet, wanted, operands, binding, keep_rest=False))
        return
    for place, term in enumerate(wanted):
        if isinstance(term, Var) and term.name not in binding.cells and term not in wanted[:place]:
            others = wanted[:place] + wanted[place + 1 :]
            if term in others:
                continue
            for found, rest in _assign(sheet, others, operands, binding, keep_rest=True):
                if term.name not in found.cells and rest:
                    yield found.bind(term.name, _joined(sheet, pattern.op, rest))


def _joined(sheet: Sheet, op: str, operands: tuple[int, ...]) -> int:
    whole = operands[0]
    for each in operands[1:]:
        whole = sheet.apply(op, (whole, each))
    return whole


def _invariant(sheet: Sheet, binding: Binding) -> bool:
    over = binding.attributes.get("axes")
    if not isinstance(over, Axes):
        return True
    return all(_constant_along(sheet.shapes[c], over) for name, c in binding.cells.items() if name[0] == "k")


def _constant_along(shape: tuple[int, ...], over: Axes) -> bool:
    """Whether a tensor of `shape`, broadcast to the reduction's operand, does not vary along its axes, and
    still lines up with the reduction's result."""
    if len(shape) > over.rank:
        return False
    shift = over.rank - len(shape)
    if not over.keepdim:
        return all(axis < shift for axis in over.axes)
    return all(axis < shift or shape[axis - shift] == 1 for axis in over.axes)


def build(sheet: Sheet, term: Term, binding: Binding) -> int:
    """The cell of a right side; raises Impossible."""
    if isinstance(term, Var):
        return binding.cells[term.name]
    if isinstance(term, Number):
        return sheet.number(term.value)
    args = tuple(build(sheet, arg, binding) for arg in term.args)
    key = _slot(term.op)
    if key is None:
        return sheet.apply(term.op, args)
    if key not in binding.attributes:
        raise Impossible
    return sheet.apply(term.op, args, binding.attributes[key])


def extend(sheet: Sheet, op: str, cell: int, rest: tuple[int, ...]) -> int:
    """`cell` with the operands of its chain that the rule did not take."""
    return _joined(sheet, op, (cell, *rest))
