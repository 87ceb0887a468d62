"""Index arithmetic: where an element of one tensor lies in another.

Problem.  A permute, a reshape or a slice inside a fused kernel must cost nothing: it becomes a change of
the index with which its consumer reads.  Composed naively, such indices fill up with divisions and
remainders, and a loop that divides per element is slower than the copy it was meant to save.

Method.  An Index is a linear form over atoms: loop variables with known size, ``//`` and ``%`` of an
Index by a constant.  The constructors simplify (SmartMem, ASPLOS'24, section 3.2: identity, split, merge,
strength reduction): terms divisible by the divisor leave a ``//`` and vanish from a ``%``; a remainder
that lies in ``[0, d)`` is dropped; common factors cancel; ``k*(x//k) + x%k`` merges back to ``x``.

Invariants.  All variables range over ``[0, size)``; an Index is immutable and hashable, equal forms
compare equal; `//` and `%` are only taken of forms that cannot be negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

__all__ = ["ZERO", "Atom", "Index", "Quotient", "Remainder", "Var", "flatten", "unflatten"]


@dataclass(frozen=True)
class Var:
    """A loop variable in ``[0, size)``."""

    name: str
    size: int


@dataclass(frozen=True)
class Quotient:
    """``index // divisor``."""

    index: Index
    divisor: int


@dataclass(frozen=True)
class Remainder:
    """``index % divisor``."""

    index: Index
    divisor: int


Atom = Var | Quotient | Remainder


def _atom_key(atom: Atom) -> str:
    return repr(atom)


def _atom_bound(atom: Atom) -> int:
    """The largest value that an atom takes."""
    if isinstance(atom, Var):
        return max(atom.size - 1, 0)
    if isinstance(atom, Quotient):
        return atom.index.upper // atom.divisor
    return min(atom.divisor - 1, atom.index.upper)


@dataclass(frozen=True)
class Index:
    """``constant + sum(coefficient * atom)``; `terms` is sorted and has no zero coefficient."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(value: int | Var | Index) -> Index:
        """The index that is a number or a variable; a variable of size 1 is 0."""
        if isinstance(value, Index):
            return value
        if isinstance(value, Var):
            return Index(((value, 1),)) if value.size > 1 else Index()
        return Index((), value)

    @cached_property
    def upper(self) -> int:
        """The largest value this index takes."""
        return self.constant + sum(c * _atom_bound(a) for a, c in self.terms if c > 0)

    @cached_property
    def lower(self) -> int:
        """The smallest value this index takes."""
        return self.constant + sum(c * _atom_bound(a) for a, c in self.terms if c < 0)

    @cached_property
    def variables(self) -> frozenset[Var]:
        """All loop variables in it, inside quotients too."""
        found: set[Var] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, Var) else atom.index.variables
        return frozenset(found)

    @property
    def linear(self) -> bool:
        """Whether it has no quotient and no remainder."""
        return all(isinstance(atom, Var) for atom, _ in self.terms)

    def coefficient(self, var: Var) -> int:
        """The factor of `var` among the plain terms."""
        return next((c for atom, c in self.terms if atom == var), 0)

    def __add__(self, other: Index | int) -> Index:
        other = Index.of(other)
        return _collect(self.terms + other.terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        return Index(tuple((a, c * factor) for a, c in self.terms), self.constant * factor)

    def __sub__(self, other: Index | int) -> Index:
        return self + Index.of(other) * -1

    def __floordiv__(self, divisor: int) -> Index:
        if divisor == 1:
            return self
        whole, rest = _split(self, divisor)
        if rest.lower >= 0 and rest.upper < divisor:
            return whole
        rest, _, factor = _cancel(rest, divisor)
        divisor //= factor
        if divisor == 1:
            return whole + rest
        if rest.lower >= 0 and rest.upper < divisor:
            return whole
        if len(rest.terms) == 1 and rest.constant == 0 and isinstance(rest.terms[0][0], Quotient):
            atom, factor = rest.terms[0]
            if factor == 1 and isinstance(atom, Quotient):
                return whole + atom.index // (atom.divisor * divisor)
        return whole + Index(((Quotient(rest, divisor), 1),))

    def __mod__(self, divisor: int) -> Index:
        if divisor == 1:
            return Index()
        _, rest = _split(self, divisor)
        if rest.lower >= 0 and rest.upper < divisor:
            return rest
        big, small, factor = _cancel(rest, divisor)
        if factor > 1:
            return (big % (divisor // factor)) * factor + small
        if len(rest.terms) == 1 and rest.constant == 0 and isinstance(rest.terms[0][0], Remainder):
            atom, coefficient = rest.terms[0]
            if coefficient == 1 and isinstance(atom, Remainder) and atom.divisor % divisor == 0:
                return atom.index % divisor
        return Index(((Remainder(rest, divisor), 1),))

    def substitute(self, replace: Callable[[Var], Index]) -> Index:
        """The index with every variable replaced, simplified again."""
        total = Index((), self.constant)
        for atom, coefficient in self.terms:
            total = total + _replace_atom(atom, replace) * coefficient
        return total


ZERO = Index()


def _replace_atom(atom: Atom, replace: Callable[[Var], Index]) -> Index:
    if isinstance(atom, Var):
        return replace(atom)
    inner = atom.index.substitute(replace)
    return inner // atom.divisor if isinstance(atom, Quotient) else inner % atom.divisor


def _collect(terms: Iterable[tuple[Atom, int]], constant: int) -> Index:
    total: dict[Atom, int] = {}
    for atom, coefficient in terms:
        total[atom] = total.get(atom, 0) + coefficient
    merged = _merge({a: c for a, c in total.items() if c})
    if isinstance(merged, Index):
        return merged + constant
    return Index(tuple(sorted(merged.items(), key=lambda item: _atom_key(item[0]))), constant)


def _merge(total: dict[Atom, int]) -> dict[Atom, int] | Index:
    """Merge ``k*c*(x//k) + c*(x%k)`` to ``c*x``."""
    for atom, factor in total.items():
        if not isinstance(atom, Remainder):
            continue
        quotient = atom.index // atom.divisor
        rest = dict(total)
        del rest[atom]
        for part, coefficient in quotient.terms:
            if rest.get(part) != factor * coefficient * atom.divisor:
                break
            del rest[part]
        else:
            if quotient.constant == 0 and quotient.terms:
                return _collect(rest.items(), 0) + atom.index * factor
    return total


def _split(index: Index, divisor: int) -> tuple[Index, Index]:
    """(q, r) with ``index == q * divisor + r`` and r made of the terms that do not divide."""
    whole = tuple((a, c // divisor) for a, c in index.terms if c % divisor == 0)
    rest = tuple((a, c) for a, c in index.terms if c % divisor)
    constant = index.constant // divisor
    remainder = Index(rest, index.constant - constant * divisor)
    if remainder.lower < 0:
        remainder, constant = Index(rest, index.constant), 0
    return Index(whole, constant), remainder


def _cancel(index: Index, divisor: int) -> tuple[Index, Index, int]:
    """(big, small, f) with ``index == big * f + small``, f a factor of `divisor` and small in ``[0, f)``.

    Then ``index // d == big // (d/f)`` and ``index % d == big % (d/f) * f + small``; f is 1 if there is none.
    """
    for factor in sorted({gcd(c, divisor) for _, c in index.terms}, reverse=True):
        if factor == 1:
            continue
        big = tuple((a, c // factor) for a, c in index.terms if c % factor == 0)
        small = Index(tuple((a, c) for a, c in index.terms if c % factor), index.constant % factor)
        if small.lower >= 0 and small.upper < factor:
            return Index(big, index.constant // factor), small, factor
    return index, Index(), 1


def flatten(indices: Sequence[Index], sizes: Sequence[int]) -> Index:
    """The row-major position of `indices` in a tensor of `sizes`."""
    total = Index()
    for index, size in zip(indices, sizes, strict=True):
        total = total * size + index
    return total


def unflatten(position: Index, sizes: Sequence[int]) -> tuple[Index, ...]:
    """The indices of a row-major position in a tensor of `sizes`."""
    result: list[Index] = []
    step = 1
    for place, size in zip(range(len(sizes) - 1, -1, -1), reversed(sizes), strict=True):
        part = position // step if step > 1 else position
        outermost = all(s == 1 for s in sizes[:place])
        result.append(Index() if size == 1 else part if outermost else part % size)
        step *= size
    return tuple(reversed(result))
