"""Convolutions, pools and resizing as kernels, with what surrounds them, against eager on random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as f
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.differential.fusion_bodies import trace

from lowtide.fusion.codegen.library import Kernel, compile_bodies, emit_source
from lowtide.fusion.codegen.tensor import Unfusable
from lowtide.ir.graph import Graph, Role

Program = Callable[..., torch.Tensor]
Case = tuple[Program, list[torch.Tensor], int]  # the first inputs change from call to call, the rest do not


def frozen(body: Graph, moving: int) -> Graph:
    """`body` with the inputs after the first `moving` as constants, as in an inference."""
    kept = {body.values[value].storage for value in body.inputs[moving:]}
    storages = {k: replace(s, role=Role.CONST) if k in kept else s for k, s in body.storages.items()}
    return Graph(body.nodes, body.values, storages, body.inputs, body.outputs)


def image(rng: random.Random, shape: Sequence[int]) -> torch.Tensor:
    """Row-major, channels-last or a window of something larger."""
    form = rng.randrange(3)
    if form == 2:
        return torch.randn(shape[0], shape[1], shape[2] + 2, shape[3] + 3)[:, :, 1:-1, 2:-1]
    made = torch.randn(*shape)
    return made.contiguous(memory_format=torch.channels_last) if form else made


def surrounded(
    rng: random.Random, inner: Program, result: torch.Tensor
) -> tuple[Program, list[torch.Tensor]]:
    """`inner` followed by some of bias, normalisation, activation; more constants."""
    c = result.shape[1]
    scale, shift, mean, var = torch.randn(c), torch.randn(c), torch.randn(c), torch.rand(c) + 0.5
    form = rng.randrange(4)
    if form == 0:
        return inner, []
    if form == 1:
        return lambda *a: f.relu(inner(*a)), []
    more = [scale, shift, mean, var]

    def run(*a: torch.Tensor) -> torch.Tensor:
        x = inner(*a[:-4])
        y = f.batch_norm(x, a[-2], a[-1], a[-4], a[-3], False)
        return f.hardtanh(y, 0.0, 6.0) if form == 2 else torch.sigmoid(y) * x

    return run, more


def convolution(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    depth = rng.choice((1, 3, 8, 16, 20, 32, 48))
    alone = rng.random() < 0.3
    wide = depth if alone else rng.choice((1, 5, 16, 32, 70, 130))
    taps = rng.choice(((1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (2, 3), (1, 4)))
    steps = rng.choice(((1, 1), (1, 1), (2, 2), (1, 2)))
    spread = rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (2, 2)))
    pad = (rng.randrange(taps[0]), rng.randrange(taps[1]))
    least = [(t - 1) * d + 1 - 2 * p for t, d, p in zip(taps, spread, pad, strict=True)]
    size = [max(rng.choice((1, 2, 7, 14, 19, 33, 60)), low, 1) for low in least]
    x = image(rng, (rng.choice((1, 2)), depth, *size))
    weight = torch.randn(wide, 1 if alone else depth, *taps)
    if rng.random() < 0.3:
        weight = weight.contiguous(memory_format=torch.channels_last)
    groups = depth if alone else 1

    def inner(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return f.conv2d(x, w, b, steps, pad, spread, groups)

    bias = torch.randn(wide)
    run, more = surrounded(rng, inner, inner(x, weight, bias))
    return run, [x, weight, bias, *more], 1


def joined(seed: int) -> Case:
    """A 3 x 3 convolution of a concatenation or of something computed, with a residual."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    depth, size = rng.choice((4, 16, 32)), [rng.choice((5, 8, 20)) for _ in range(2)]
    x, y = (image(rng, (1, depth, *size)) for _ in range(2))
    if rng.random() < 0.5:
        weight = torch.randn(2 * depth, 2 * depth, 3, 3)
        return lambda x, y, w: f.conv2d(torch.cat([x, y], 1), w, None, 1, 1), [x, y, weight], 2
    weight = torch.randn(depth, depth, 3, 3)
    return lambda x, y, w: f.relu(f.conv2d(torch.tanh(x) * y, w, None, 1, 1) + x), [x, y, weight], 2


def pool(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = [rng.choice((6, 7, 16, 33, 60)) for _ in range(2)]
    x = image(rng, (2, rng.choice((1, 3, 16, 20)), *size))
    taps, step = rng.choice(((2, 2), (3, 3), (3, 2), (5, 4))), rng.choice((1, 2, 3))
    pad = rng.choice((0, min(taps) // 2))
    ceil = rng.random() < 0.3
    if rng.random() < 0.5:
        x[torch.rand(x.shape) < 0.05] = float("nan")
        return lambda x: f.max_pool2d(x, taps, step, pad, 1, ceil), [x], 1
    include = pad == 0 or rng.random() < 0.7
    return lambda x: f.avg_pool2d(x, taps, step, pad, ceil and pad == 0, include), [x], 1


def resized(seed: int) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    h, w, depth = rng.choice((1, 5, 12)), rng.choice((1, 6, 9)), rng.choice((1, 8, 20))
    x = image(rng, (2, depth, h, w))
    form = rng.randrange(3)
    if form == 0:
        return lambda x: f.interpolate(x, scale_factor=(2, 3)) * 2, [x], 1
    if form == 1:
        return lambda x: f.adaptive_avg_pool2d(x, (1, w)), [x], 1
    kh, kw = rng.choice(((2, 2), (3, 1), (1, 4)))
    weight, bias = torch.randn(depth, 7, kh, kw), torch.randn(7)
    return lambda x, w, b: f.conv_transpose2d(x, w, b, (kh, kw)), [x, weight, bias], 1


def compiled(cases: Sequence[Case]) -> list[tuple[Kernel, Program, list[torch.Tensor]]]:
    """Those of `cases` that have a kernel, compiled together."""
    kept = []
    for program, inputs, moving in cases:
        body = frozen(trace(program, inputs), moving)
        try:
            emit_source([body], keep=True)
        except Unfusable:
            continue
        kept.append((body, program, inputs))
    library = compile_bodies([body for body, _, _ in kept], keep=True)
    assert library is not None
    return [(library.kernel(n), program, inputs) for n, (_, program, inputs) in enumerate(kept)]


def distance(ours: torch.Tensor, eager: torch.Tensor) -> float:
    """Largest difference relative to the largest value; NaN must meet NaN."""
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    assert torch.equal(ours.isnan(), eager.isnan())
    top = eager.nan_to_num().abs().max().clamp(min=1e-30)
    return ((ours - eager).nan_to_num().abs().max() / top).item()


@pytest.mark.parametrize(
    ("draw", "share"),
    [(convolution, 1.0), (joined, 1.0), (pool, 0.6), (resized, 1.0)],
    ids=["convolution", "joined", "pool", "resized"],
)
@settings(
    max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
@given(seed=st.integers(0, 1 << 20))
def test_random_windows(draw: Callable[[int], Case], share: float, seed: int) -> None:
    """As near to the exact result as eager is: what a normalisation amplifies is amplified in both."""
    cases = [draw(seed * 64 + number) for number in range(8)]
    found = compiled(cases)
    assert len(found) >= share * len(cases)
    for kernel, program, inputs in found:
        exact, eager = program(*(each.double() for each in inputs)), program(*inputs)
        for threads in (1, 2):
            (ours,) = kernel.run(inputs, threads)
            assert ours.dtype == eager.dtype
            assert distance(ours.double(), exact) <= 2e-6 + 4 * distance(eager.double(), exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    """Winograd's transforms would carry it to the neighbours."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 9, 130), torch.randn(16, 16, 3, 3)
    x[0, 3, 4, 77] = value

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return f.conv2d(x, w, None, 1, 1)

    ((kernel, _, _),) = compiled([(run, [x, weight], 1)])
    (ours,) = kernel.run([x, weight])
    eager = run(x, weight)
    assert torch.equal(ours.isfinite(), eager.isfinite())
    assert torch.equal(ours.isnan(), eager.isnan())
    calm = eager.isfinite() & (eager.abs() < 1e6)
    torch.testing.assert_close(ours[calm], eager[calm], rtol=1e-5, atol=1e-4)


def test_prepared_weights_follow_the_constants() -> None:
    """A kernel reads its arranged weights until it is told that they changed."""
    x, weight = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)
    ((kernel, run, _),) = compiled([(lambda x, w: f.conv2d(x, w, None, 1, 1), [x, weight], 1)])
    assert kernel.signature.constants == (1,)
    assert kernel.signature.prepared_bytes == 16 * 16 * 64 * 4  # 16 transformed weights in panels of 64
    torch.testing.assert_close(kernel.run([x, weight])[0], run(x, weight), rtol=1e-5, atol=1e-4)
    weight *= 2
    torch.testing.assert_close(kernel.run([x, weight])[0], run(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: f.conv2d(x, w[:, :4], None, groups=4),
        lambda x, w: f.conv_transpose2d(x, w, None, 2, 1),
        lambda x, w: f.max_pool2d(x, 2, return_indices=True)[1] + w.sum().long(),
        lambda x, w: f.adaptive_avg_pool2d(x, 5) + w.sum(),
    ],
    ids=["groups", "overlapping", "places", "windows of several sizes"],
)
def test_refused(run: Program) -> None:
    x, weight = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)
    with pytest.raises(Unfusable):
        emit_source([frozen(trace(run, [x, weight]), 1)], keep=True)


def test_weights_that_change_have_no_kernel() -> None:
    """A training step's convolutions stay with ATen."""
    x, weight = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)
    body = trace(lambda x, w: f.conv2d(x, w), [x, weight])
    for candidate, keep in ((body, True), (frozen(body, 1), False)):
        with pytest.raises(Unfusable, match="changes from call to call"):
            emit_source([candidate], keep=keep)
