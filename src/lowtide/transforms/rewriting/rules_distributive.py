"""Distributive rules: products over sums, factored where that is cheaper.

The starred rules stand in DNNFusion's Table 4; the others were found by `bench/rule_search.py`, which builds
small terms and compares them numerically, and are the smallest of those it finds, 38 in all.  Classes
are letters of `rule.rules_of`; `tests/differential/test_rewrite_rules.py` holds every line to its letter.
"""

from __future__ import annotations

from lowtide.transforms.rewriting.rule import Property, rules_of

__all__ = ["DISTRIBUTIVE"]

DISTRIBUTIVE = rules_of(
    Property.DISTRIBUTIVE,
    """
    r* | shared-factor        | a*c + a*b                 | a*(b + c)
    r* | one-plus             | a + a*b                   | a*(b + 1)
    r* | square-minus-product | square(a + b) - (a + b)*c | (a + b)*(a + b - c)
    r  | distr-01             | a - a*b                   | (1 - b)*a
    r  | distr-02             | a + a/k                   | (1 + recip(k))*a
    r  | distr-03             | a - a/k                   | (1 - recip(k))*a
    r  | distr-04             | a*b - a                   | a*(b - 1)
    r  | distr-05             | a/k - a                   | a*(recip(k) - 1)
    e  | distr-06             | a*(a + a)                 | square(a) + square(a)
    r  | distr-07             | (a + a)*k                 | a*(k + k)
    r  | distr-08             | (a + b)/a                 | 1 + b/a
    r  | distr-09             | (a - b)/a                 | 1 - b/a
    r  | distr-10             | (a - b)/b                 | a/b - 1
    r  | distr-11             | (a - 1)/a                 | 1 - recip(a)
    r  | distr-12             | (1 + a)/a                 | 1 + recip(a)
    r  | distr-13             | (1 - a)/a                 | recip(a) - 1
    r  | distr-14             | -a - a*b                  | -a*(1 + b)
    r  | distr-15             | a*b + a/b                 | a*(b + recip(b))
    r  | distr-16             | a*b - a/b                 | a*(b - recip(b))
    r  | distr-17             | a*b - a*c                 | a*(b - c)
    r  | distr-18             | a*b + a/c                 | a*(b + recip(c))
    r  | distr-19             | a*b - a/c                 | a*(b - recip(c))
    r  | distr-20             | a/b - a*b                 | a*(recip(b) - b)
    r  | distr-21             | a/b - a*c                 | a*(recip(b) - c)
    r  | distr-22             | a/b + c/b                 | (a + c)/b
    r  | distr-23             | a/b - c/b                 | (a - c)/b
    e  | distr-24             | -a*(a - b)                | a*(b - a)
    r  | distr-25             | -a/(a - b)                | a/(b - a)
    e  | distr-26             | -a*(b - a)                | a*(a - b)
    r  | distr-27             | -a/(b - a)                | a/(a - b)
    e  | distr-28             | -a*(b - c)                | a*(c - b)
    r  | distr-29             | -a/(b - c)                | a/(c - b)
    r  | distr-30             | (a + b)/-a                | -(1 + b/a)
    r  | distr-31             | (a - b)/-a                | b/a - 1
    r  | distr-32             | (a - b)/-b                | 1 - a/b
    e  | distr-33             | (a - b)/-c                | (b - a)/c
    r  | distr-34             | (1 + a)/-a                | -(1 + recip(a))
    r  | distr-35             | -(a + b)/a                | -(1 + b/a)
    """,
)
