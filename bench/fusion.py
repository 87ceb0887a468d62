"""How fast generated kernels are: one thread, process CPU time, interleaved with eager, fresh processes.

    python bench/fusion.py [--rows NAME,...] [--rivals all] [--json OUT.json]

A row is an inference that is captured, planned, fused and compiled as any workload is; operators that stay
outside kernels run through ATen.  `ratio` is against eager with the C library's default memory allocator,
`tuned` against eager whose large blocks are kept (no page faults): fusion has to win without them too.
`error` is the largest difference relative to the largest value.  `kernels` counts what is launched.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

ROUNDS = 15
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


class Lambda(nn.Module):
    """A function, with optional weights, as a module."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.held)


def eleven(x: Tensor, y: Tensor) -> Tensor:
    """Eleven cheap element-wise operators."""
    t = torch.relu((x + y) * 0.5) - x
    t = torch.abs(t * y) + 1.0
    t = torch.clamp(t, 0.1, 4.0)
    return (t * t - y) * 0.25


def gelu(x: Tensor) -> Tensor:
    """GELU (tanh) written out."""
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def softmax(x: Tensor) -> Tensor:
    """Softmax written out."""
    power = torch.exp(x - x.amax(-1, keepdim=True))
    return power / power.sum(-1, keepdim=True)


def norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add, layer norm, GELU."""
    return functional.gelu(functional.layer_norm(x + y, weight.shape, weight, bias))


def permuted(x: Tensor, y: Tensor) -> Tensor:
    """Permute, add, ReLU, multiply."""
    return torch.relu(x.permute(0, 2, 1) + y) * 1.5


def squeeze_excite(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Global mean, two small linear layers, a gate per channel."""
    s = functional.relu(functional.linear(x.mean((2, 3)), w1, b1))
    return x * torch.sigmoid(functional.linear(s, w2, b2))[:, :, None, None]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One linear layer and its activation."""
    return functional.gelu(functional.linear(x, weight, bias))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out."""
    return torch.softmax(q @ k.transpose(-2, -1) * 0.125, -1) @ v


@dataclass(frozen=True)
class Row:
    """One line of the table: what to run and the ratio that the issue asks for."""

    title: str
    at_most: float
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def _plain(
    function: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    weights: Sequence[tuple[int, ...]] = (),
) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        held = [torch.randn(shape) / (shape[-1] ** 0.5) for shape in weights]
        return Lambda(function, *held).eval(), tuple(torch.randn(shape) for shape in shapes)

    return make


class Encoder(nn.Module):
    """A BERT-like encoder: post-norm layers with SDPA."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderLayer(dim, heads) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual and a layer norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape

        def split(t: Tensor) -> Tensor:
            return t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)

        mixed = functional.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        x = self.norm1(x + self.o(mixed.transpose(1, 2).reshape(batch, length, dim)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


def _encoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Encoder(6, 768, 12).eval(), (torch.randn(1, 128, 768),)


def _images(name: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        from bench import images

        return getattr(images, name)()  # type: ignore[no-any-return]

    return make


MILLIONS = (1 << 22,)
ROWS = {
    "eleven": Row("11 cheap element-wise, 4M", 0.08, _plain(eleven, [MILLIONS, MILLIONS])),
    "gelu": Row("GELU written out, 4M", 0.08, _plain(gelu, [MILLIONS])),
    "softmax": Row("softmax written out 4096x1024", 0.33, _plain(softmax, [(4096, 1024)])),
    "norm": Row("add + LayerNorm + GELU 4096x768", 0.38, _plain(norm, [(4096, 768)] * 2, [(768,), (768,)])),
    "permute": Row("permute + add + relu + mul", 0.20, _plain(permuted, [(16, 512, 512)] * 2)),
    "squeeze": Row(
        "squeeze-excite block 96x112x112",
        0.60,
        _plain(squeeze_excite, [(1, 96, 112, 112)], [(24, 96), (24,), (96, 24), (96,)]),
    ),
    "linear": Row(
        "Linear 768->3072 + GELU, M=384", 0.79, _plain(linear_gelu, [(384, 768)], [(3072, 768), (3072,)])
    ),
    "attention": Row("attention written out 12x384x64", 0.66, _plain(attention, [(12, 384, 64)] * 3)),
    "depthwise": Row("depthwise 3x3 + BN + ReLU6", 0.41, _images("depthwise")),
    "mobilenet": Row("MobileNetV2-like 224", 0.41, _images("mobilenet")),
    "unet": Row("U-Net-like b32 256", 0.72, _images("unet")),
    "bert": Row("BERT-like, 6 layers, L128", 0.77, _encoder),
}


@dataclass(frozen=True)
class Result:
    """Times are CPU seconds, medians."""

    row: str
    title: str
    at_most: float
    eager_s: float
    ours_s: float
    ratio: float
    error: float
    kernels_before: int
    kernels_after: int
    rivals_s: dict[str, float]


def _time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(name: str, rivals: str) -> Result:
    """One row, in this process."""
    from bench.rivals import RIVALS, available
    from bench.steps import build

    row = ROWS[name]
    torch.set_num_threads(1)
    module, inputs = row.make()
    with torch.no_grad():
        ours, before, after = build(module, inputs)
        calls: dict[str, Callable[[], object]] = {"eager": lambda: module(*inputs), "ours": ours}
        calls.update({each: RIVALS[each][1](module, inputs) for each in available(rivals)})
        expected, got = module(*inputs), ours()
        for each in calls.values():
            each()
        taken = [[_time(each) for each in calls.values()] for _ in range(ROUNDS)]
    assert isinstance(got, Tensor)
    middle = dict(zip(calls, map(statistics.median, zip(*taken, strict=True)), strict=True))
    eager, own = middle.pop("eager"), middle.pop("ours")
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    return Result(
        name, row.title, row.at_most, eager, own, own / eager, error, before, after, middle,
    )  # fmt: skip


def run_row(name: str, rivals: str, tuned: bool) -> Result:
    """One row in a fresh process, with the allocator tuned or not."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(TUNED if tuned else {})}
    command = [sys.executable, __file__, "--one", name, "--rivals", rivals]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"row {name} failed:\n{done.stderr[-2000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rivals", default="", help="inductor,frozen,onnxruntime,openvino or all (slow)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asdict(measure(chosen.one, chosen.rivals))))
        return
    results = []
    heads = ("at most", "ratio", "tuned", "eager ms", "ours ms", "error")
    print(f"{'row':36}" + "".join(f"{head:>9}" for head in heads) + "  kernels")
    for name in chosen.rows.split(","):
        plain, tuned = run_row(name, chosen.rivals, False), run_row(name, "", True)
        results.append({**asdict(plain), "tuned_ratio": tuned.ratio, "tuned_eager_s": tuned.eager_s})
        numbers = (plain.at_most, plain.ratio, tuned.ratio, plain.eager_s * 1e3, plain.ours_s * 1e3)
        line = f"{plain.title:36}" + "".join(f"{number:9.3f}" for number in numbers)
        line += f"{plain.error:9.1e}  {plain.kernels_before} -> {plain.kernels_after}"
        rival = "".join(f"  {each} {took / plain.eager_s:.3f}" for each, took in plain.rivals_s.items())
        print(line + rival, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
    main()
