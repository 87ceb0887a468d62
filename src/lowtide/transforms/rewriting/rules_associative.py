"""Associative rules: regrouping chains of products, sums and of what distributes over them.

The starred rules stand in DNNFusion's Table 4; the others were found by `bench/rule_search.py`, which builds
small terms and compares them numerically, and are the smallest of those it finds, 45 in all.  Classes
are letters of `rule.rules_of`; `tests/differential/test_rewrite_rules.py` holds every line to its letter.
"""

from __future__ import annotations

from lowtide.transforms.rewriting.rule import Property, rules_of

__all__ = ["ASSOCIATIVE"]

ASSOCIATIVE = rules_of(
    Property.ASSOCIATIVE,
    """
    r* | recip-of-product | recip(a) * recip(a*b)     | square(recip(a)) * recip(b)
    d* | shared-root      | (a*sqrt(b)) * (sqrt(b)*c) | a*b*c
    r* | abs-of-factors   | abs(a) * b * abs(c)       | abs(a*c) * b
    r* | shared-sum       | (a*sum(b)) * (sum(b)*c)   | a*square(sum(b))*c
    e  | assoc-01         | a/1                       | a
    e  | assoc-02         | 1*a                       | a
    e  | assoc-03         | k/-a                      | -k/a
    e  | assoc-04         | -a*a                      | -square(a)
    e  | assoc-05         | -a*k                      | -k*a
    e  | assoc-06         | -a/k                      | a/-k
    r  | assoc-07         | a*b*b                     | a*square(b)
    r  | assoc-08         | a/b/b                     | a/square(b)
    e  | assoc-09         | -(a*k)                    | -k*a
    e  | assoc-10         | -(a/k)                    | a/-k
    e  | assoc-11         | -(k/a)                    | -k/a
    e  | assoc-12         | a - -a                    | a + a
    e  | assoc-13         | a - -b                    | a + b
    e  | assoc-14         | -a - a                    | -(a + a)
    e  | assoc-15         | -a + b                    | b - a
    e  | assoc-16         | -a - k                    | -k - a
    r  | assoc-17         | a*(a/b)                   | square(a)/b
    r  | assoc-18         | a/(b/a)                   | square(a)/b
    e  | assoc-19         | -(a - b)                  | b - a
    e  | assoc-20         | -(a + k)                  | -k - a
    r  | assoc-21         | sqrt(a)/a                 | rsqrt(a)
    r  | assoc-22         | a + a - a                 | a
    r  | assoc-23         | a + b + b                 | a + (b + b)
    r  | assoc-24         | a - b - b                 | a - (b + b)
    r  | assoc-25         | a + k - 1                 | a + (k - 1)
    r  | assoc-26         | a - k - 1                 | a - (1 + k)
    r  | assoc-27         | a - 1 + k                 | a + (k - 1)
    r  | assoc-28         | a - 1 - k                 | a - (1 + k)
    r  | assoc-29         | k - a - 1                 | k - 1 - a
    r  | assoc-30         | 1 + a + k                 | 1 + k + a
    r  | assoc-31         | 1 + a - k                 | a - (k - 1)
    r  | assoc-32         | 1 - a - k                 | 1 - k - a
    r  | assoc-33         | recip(a/b)                | b/a
    r  | assoc-34         | recip(a*k)                | recip(k)/a
    r  | assoc-35         | a/recip(a)                | square(a)
    r  | assoc-36         | a*recip(b)                | a/b
    r  | assoc-37         | a/recip(b)                | a*b
    r  | assoc-38         | recip(a)/a                | square(recip(a))
    r  | assoc-39         | recip(a)/k                | recip(k)/a
    r  | assoc-40         | a/square(a)               | recip(a)
    r  | assoc-41         | a - (a + a)               | -a
    """,
)
