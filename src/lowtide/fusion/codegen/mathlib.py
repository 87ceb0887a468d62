"""The C++ preamble of generated files: scalar functions that the compiler can vectorise, micro-kernels.

Problem.  libm calls inside a loop stop vectorisation (3-4x slower than eager), and -ffast-math breaks NaN
and infinity.

Method.  The text lies in ``*.hpp`` beside this module.  Polynomials in plain C++ with explicit `fma`, no
branches, no tables; under ``omp simd`` they become 16-lane code.  Largest error in units in the last place
(tests/unit/fusion): exp 0.9, log 0.9, erf 1.0, tanh 2.5 (`lt_tanh_precise` 1.4 at twice the cost), sigmoid
2.5; results below 2^-126 are exact for exp and flushed for sigmoid.  NaN and infinities come
out as IEEE says.  Doubles use libm.

Invariants.  The file is compiled with ``-ffp-contract=off``: products and sums round as written, so
element-wise kernels give eager's bits.  The coefficients of erf, log and expm1 are N. Juffa's published
minimax fits, exp is Cephes'.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["preamble"]


@cache
def _text(name: str) -> str:
    return (files("lowtide.fusion.codegen") / name).read_text()


def preamble(uses_torch: bool, uses_brgemm: bool, uses_windows: bool = False) -> str:
    """What a generated file starts with; the parts that not every file needs only on request."""
    parts = [_text("scalars.hpp")]
    parts += [_text("torch_sqrt.hpp")] if uses_torch else []
    parts += [_text("brgemm.hpp")] if uses_brgemm else []
    parts += [_text("windows.hpp")] if uses_windows else []
    return "".join(parts)
