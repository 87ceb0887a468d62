"""A rule: two terms that are equal, why, and what happens to the rounding.

Laws for whoever writes a rule, each with the mistake that taught it.

 1. Every variable on the right occurs on the left: an unbound one is refused when the rule is defined.
    (`a*c + a*b -> (a+b)*c` is how the paper's Table 4 prints its fifth row: bound, and wrong.  Hence 2.)
 2. A rule is what the tests say it is.  `tests/differential/test_rewrite_rules.py` evaluates each on random
    numbers; the class is asserted, not believed.
 3. `exact` includes NaN, infinities and signed zeros' magnitude.  (`a - a -> 0` is not even true.
    `relu(relu(a))` is; `max(relu(a), 0)` too, only while relu hands on NaN, as ATen's does.)
 4. `sqrt(b)*sqrt(b) -> b` needs b >= 0: `domain`, never applied by default.  A BatchNorm's variance plus
    epsilon is positive, a captured graph does not say so.
 5. `reassociates` is not a licence.  `(a + b) - a -> b` is right to the last bit and eager is not: against
    eager the difference is a rounding of `a`, which may be any multiple of `b`.  Rules with cancellation
    are `conditioned=False` and stay out by default.
 6. A rule must lower FLOPs, or bytes at equal FLOPs, for some shapes; whether it does at a site, the engine
    counts on the site's shapes.  (`a*c + b*c` with c of one element is cheaper than the factored form
    is with a broadcast c.)
 7. Reductions of one rule run over the same axes.  `sum(a*b) -> a*sum(b)` holds only where `a` does not vary
    along them; the pattern says `inv`ariant with a name that starts with ``k``.
 8. Overflow is a domain too.  `abs(a)*abs(c)` and `abs(a*c)` have the same bits; `abs(a)*b*abs(c)` and
    `abs(a*c)*b` do not when `a*b` leaves the range and `a*c` does not.  The tests' special operands
    found that in a rule that was called exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lowtide.transforms.rewriting.term import Apply, Term, parse_term, print_term, variables

__all__ = ["Numerics", "Property", "Rule", "rules_of"]


class Numerics(Enum):
    """What a rule does to the numbers."""

    EXACT = "exact"  # the same bits, NaN and infinities included
    REASSOCIATES = "reassociates"  # the same real number, rounded in another order
    DOMAIN = "domain"  # the same real number only for some operands (a sign, a range)


class Property(Enum):
    """The mathematical property that a rule uses."""

    ASSOCIATIVE = "associative"
    DISTRIBUTIVE = "distributive"
    COMMUTATIVE = "commutative"


@dataclass(frozen=True)
class Rule:
    """``left -> right``.

    `conditioned`: in float32 both sides agree within 2e-6 of the largest value whatever the scale of each
    variable.  `integers`: holds for integers (that wrap around) instead of floating point.
    `printed`: stands in the paper's Table 4.  Raises ValueError for a right side that names a
    variable which the left side does not bind, and for a left side that is no operator.
    """

    name: str
    left: str
    right: str
    property: Property
    numerics: Numerics
    conditioned: bool = True
    integers: bool = False
    printed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Apply):
            raise ValueError(f"rule {self.name}: {self.left!r} is no operator to look for")
        unbound = set(variables(self.result)) - set(variables(self.pattern))
        if unbound:
            raise ValueError(f"rule {self.name}: {', '.join(sorted(unbound))} is not bound by {self.left!r}")

    @cached_property
    def pattern(self) -> Term:
        """The left side."""
        return parse_term(self.left)

    @cached_property
    def result(self) -> Term:
        """The right side."""
        return parse_term(self.right)

    def __str__(self) -> str:
        return f"{print_term(self.pattern)} -> {print_term(self.result)}"


_LETTERS = {
    "e": (Numerics.EXACT, True, False),
    "r": (Numerics.REASSOCIATES, True, False),
    "c": (Numerics.REASSOCIATES, False, False),
    "d": (Numerics.DOMAIN, True, False),
    "i": (Numerics.EXACT, True, True),
}


def rules_of(kind: Property, text: str) -> tuple[Rule, ...]:
    """Rules from lines ``class | name | left | right``.

    Class: e exact, r reassociates, c reassociates but cancels, d domain, i exact on integers; a star
    behind it marks what the paper prints.
    """
    rules = []
    for line in filter(None, (each.strip() for each in text.splitlines())):
        letter, name, left, right = (part.strip() for part in line.split("|"))
        numerics, conditioned, integers = _LETTERS[letter.rstrip("*")]
        rules.append(
            Rule(name, left, right, kind, numerics, conditioned, integers, printed=letter.endswith("*"))
        )
    return tuple(rules)
