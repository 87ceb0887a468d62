"""The scalar functions of the preamble: errors in units in the last place, special values, vector code."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lowtide.fusion.codegen.compiler import compile_source, load_library
from lowtide.fusion.codegen.mathlib import preamble

BOUNDS: dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]] = {
    "lt_exp": (1.0, torch.exp),
    "lt_log": (1.0, torch.log),
    "lt_erf": (1.0, torch.erf),
    "lt_tanh": (2.6, torch.tanh),
    "lt_tanh_precise": (1.5, torch.tanh),
    "lt_sigmoid": (2.6, torch.sigmoid),
}
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 88.7, 88.8, -103.0, -104.0, -110.0, 1.0]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loops = "\n".join(
        f'extern "C" void t_{name}(const float* x, float* y, long n) {{\n'
        f"#pragma omp simd\n  for (long i = 0; i < n; ++i) y[i] = {name}(x[i]); }}"
        for name in BOUNDS
    )
    return load_library(compile_source(preamble(False, False) + loops + "\n", False))


def run(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    getattr(library, f"t_{name}")(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_long(x.size)
    )
    return y


@pytest.mark.parametrize("name", list(BOUNDS))
def test_error_in_units_in_the_last_place(library: ctypes.CDLL, name: str) -> None:
    bound, exact = BOUNDS[name]
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=200_000) * scale for scale in (0.01, 0.3, 1, 5, 30)]).astype(
        np.float32
    )
    if name == "lt_log":
        x = np.exp(x.clip(-87, 88)).astype(np.float32)
    if name == "lt_sigmoid":
        x = x.clip(-80, 80)
    truth = exact(torch.from_numpy(x).double()).numpy()
    with np.errstate(over="ignore"):
        rounded = truth.astype(np.float32)
    finite = np.isfinite(rounded) & (np.abs(rounded) > 1.2e-38)
    ulp = np.spacing(np.abs(rounded[finite])).astype(np.float64)
    error = np.abs(run(library, name, x)[finite].astype(np.float64) - truth[finite]) / ulp
    assert error.max() <= bound


@pytest.mark.parametrize("name", list(BOUNDS))
def test_special_values_are_those_of_ieee(library: ctypes.CDLL, name: str) -> None:
    x = np.array(SPECIAL, dtype=np.float32)
    ours = torch.from_numpy(run(library, name, x))
    exact = BOUNDS[name][1](torch.from_numpy(x).double()).float()
    assert torch.equal(ours.isnan(), exact.isnan())
    assert torch.equal(ours.isinf(), exact.isinf())
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-38, equal_nan=True)
