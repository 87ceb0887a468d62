"""Commutative rules: one operator before instead of after another, mostly reductions first.

The starred rules stand in DNNFusion's Table 4; the others were found by `bench/rule_search.py`, which builds
small terms and compares them numerically, and are the smallest of those it finds, 66 in all.  Classes
are letters of `rule.rules_of`; `tests/differential/test_rewrite_rules.py` holds every line to its letter.
"""

from __future__ import annotations

from lowtide.transforms.rewriting.rule import Property, rules_of

__all__ = ["COMMUTATIVE"]

COMMUTATIVE = rules_of(
    Property.COMMUTATIVE,
    """
    e* | swap-factors    | a*b             | b*a
    i* | sum-of-shifted  | sum(shl(a))     | shl(sum(a))
    c* | product-of-exps | prod(exp(a))    | exp(sum(a))
    i  | comm-01         | shl(a) + shl(b) | shl(a + b)
    i  | comm-02         | shl(a) - shl(b) | shl(a - b)
    i  | comm-03         | sum(-a)         | -sum(a)
    i  | comm-04         | sum(a*k)        | k*sum(a)
    i  | comm-05         | --a             | a
    e  | comm-06         | abs(-a)         | abs(a)
    e  | comm-07         | abs(abs(a))     | abs(a)
    e  | comm-08         | relu(relu(a))   | relu(a)
    e  | comm-09         | square(abs(a))  | square(a)
    e  | comm-10         | abs(square(a))  | square(a)
    e  | comm-11         | relu(abs(a))    | abs(a)
    e  | comm-12         | amax(relu(a))   | relu(amax(a))
    e  | comm-13         | amin(relu(a))   | relu(amin(a))
    e  | comm-14         | --a             | a
    e  | comm-15         | sum(-a)         | -sum(a)
    e  | comm-16         | amax(-a)        | -amin(a)
    e  | comm-17         | amin(-a)        | -amax(a)
    e  | comm-18         | mean(-a)        | -mean(a)
    r  | comm-19         | sum(a*k)        | k*sum(a)
    r  | comm-20         | sum(a/k)        | sum(a)/k
    r  | comm-21         | mean(a*k)       | k*mean(a)
    r  | comm-22         | mean(a/k)       | mean(a)/k
    e  | comm-23         | square(-a)      | square(a)
    r  | comm-24         | sum(a + a)      | sum(a) + sum(a)
    e  | comm-25         | amax(a + a)     | amax(a) + amax(a)
    e  | comm-26         | amin(a + a)     | amin(a) + amin(a)
    r  | comm-27         | mean(a + a)     | mean(a) + mean(a)
    r  | comm-28         | amax(a + k)     | amax(a) + k
    r  | comm-29         | amin(a + k)     | amin(a) + k
    r  | comm-30         | mean(a + k)     | k + mean(a)
    r  | comm-31         | amax(a - k)     | amax(a) - k
    r  | comm-32         | amin(a - k)     | amin(a) - k
    r  | comm-33         | mean(a - k)     | mean(a) - k
    r  | comm-34         | amax(k - a)     | k - amin(a)
    r  | comm-35         | amin(k - a)     | k - amax(a)
    r  | comm-36         | mean(k - a)     | k - mean(a)
    r  | comm-37         | amax(exp(a))    | exp(amax(a))
    r  | comm-38         | amin(exp(a))    | exp(amin(a))
    r  | comm-39         | amin(log(a))    | log(amin(a))
    e  | comm-40         | amin(sqrt(a))   | sqrt(amin(a))
    r  | comm-41         | sqrt(recip(a))  | rsqrt(a)
    r  | comm-42         | prod(recip(a))  | recip(prod(a))
    r  | comm-43         | recip(sqrt(a))  | rsqrt(a)
    e  | comm-44         | amax(rsqrt(a))  | rsqrt(amin(a))
    r  | comm-45         | recip(recip(a)) | a
    r  | comm-46         | rsqrt(recip(a)) | sqrt(a)
    r  | comm-47         | recip(rsqrt(a)) | sqrt(a)
    r  | comm-48         | sqrt(square(a)) | abs(a)
    e  | comm-49         | -recip(-a)      | recip(a)
    r  | comm-50         | a*k/sum(a)      | a*(k/sum(a))
    r  | comm-51         | a*k/sum(b)      | a*(k/sum(b))
    r  | comm-52         | a/k*sum(a)      | a/(k/sum(a))
    r  | comm-53         | a/k*sum(b)      | a/(k/sum(b))
    r  | comm-54         | k/a/sum(a)      | k/sum(a)/a
    r  | comm-55         | k/a/sum(b)      | k/sum(b)/a
    r  | comm-56         | a*sum(a)/k      | a/(k/sum(a))
    r  | comm-57         | a/sum(a)*k      | a*(k/sum(a))
    r  | comm-58         | a*sum(b)/k      | a/(k/sum(b))
    r  | comm-59         | a/sum(b)*k      | a*(k/sum(b))
    e  | comm-60         | -sum(a - b)     | sum(b - a)
    r  | comm-61         | a*k/amax(a)     | a*(k/amax(a))
    r  | comm-62         | a*k/amin(a)     | a*(k/amin(a))
    r  | comm-63         | a*k/mean(a)     | a*(k/mean(a))
    """,
)
