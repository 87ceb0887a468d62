"""Random programs, rewritten and planned, against eager: every element type, odd shapes, NaN and infinity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.differential.fusion_bodies import trace
from tests.differential.test_fusion_random import exact_program, smooth_program
from tests.differential.test_rewrite_rules import run
from tests.models.fused_run import run_graph

from lowtide.fusion.modes import MODES
from lowtide.ir.verify import verify
from lowtide.transforms.fuse import FuseCandidate, apply
from lowtide.transforms.rewriting.rewrite import RewriteOptions, rewrite
from lowtide.transforms.rewriting.rule import Numerics

FEW = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FEW
@given(seed=st.integers(0, 1 << 20))
def test_exact_rewrites_keep_every_bit(seed: int) -> None:
    """bool, integers, bfloat16, float32 and float64 together; empty and one-element tensors among them."""
    for number in range(24):
        program, inputs = exact_program(seed * 64 + number)
        graph = trace(program, inputs)
        edit = rewrite(graph, RewriteOptions(frozenset({Numerics.EXACT})))
        verify(edit.graph)
        before, after = run(graph, inputs), run(edit.graph, inputs)
        for ours, eager in zip(after, before, strict=True):
            assert ours.dtype == eager.dtype and ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


@FEW
@given(seed=st.integers(0, 1 << 20))
def test_default_rewrites_keep_the_tolerance(seed: int) -> None:
    applied = 0
    for number in range(24):
        program, inputs = smooth_program(seed * 64 + number)
        graph = trace(program, inputs)
        edit = rewrite(graph)
        verify(edit.graph)
        applied += len(edit.applied)
        truth = run(graph, [t.double() for t in inputs])
        for ours, eager, exact in zip(run(edit.graph, inputs), run(graph, inputs), truth, strict=True):
            scale = exact.abs().max().clamp(min=1)  # sums may cancel
            theirs = ((eager - exact).abs().max() / scale).item()
            assert ((ours - exact).abs().max() / scale).item() <= 4 * theirs + 4e-6
    assert applied > 0


@pytest.mark.parametrize("mode", MODES)
def test_planned_programs_are_bit_equal(mode: str) -> None:
    """Groups of every planner as kernels, the rest operator by operator."""
    fused = 0
    for number in range(10):
        program, inputs = exact_program(1000 + number)
        graph = trace(program, inputs)
        blocks = MODES[mode](graph)
        fused += len(blocks)
        edited = apply(graph, FuseCandidate(blocks)).graph
        verify(edited)
        given_values = dict(zip(graph.inputs, inputs, strict=True))
        ours, eager = run_graph(edited, given_values), run(graph, inputs)
        for out, value in zip(graph.outputs, eager, strict=True):
            torch.testing.assert_close(ours[out], value, rtol=0, atol=0, equal_nan=True)
    assert fused > 0
