"""Small float64 training steps that between them hold what fission has to cope with, and how to run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.capture import Program, capture
from lowtide.ir import Graph
from lowtide.run.eager import run_graph
from lowtide.workload import Workload


class Attention(nn.Module):
    """Causal attention written out; dropout on its weights."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        mixed = F.dropout(weights, self.dropout) @ v
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, dim))


class Language(nn.Module):
    """Embeddings, two pre-norm blocks, a tied head."""

    def __init__(self, dropout: float = 0.0, dim: int = 8, words: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(8, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.attention = nn.ModuleList(Attention(dim, 2, dropout) for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for norm, attend in zip(self.norms, self.attention, strict=False):
            x = x + attend(norm(x))
        return self.norms[2](x) @ self.words.weight.t()


class Planes(nn.Module):
    """Convolutions with groups, GroupNorm, pooling, transposed and bilinear upsampling, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        down = F.max_pool2d(self.norm(self.grouped(x)).relu(), 2)
        wide = F.interpolate(F.avg_pool2d(down, 2), scale_factor=2, mode="bilinear")
        return self.last(torch.cat([x, self.up(down + wide)], 1))


class Normalised(nn.Module):
    """BatchNorm between convolutions: its batch cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(w, 6, 3, padding=1) for w in (3, 6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolve(x)).relu()
        return self.head(x.mean((2, 3)))


def perceptron(loss: Callable[..., Tensor] = F.mse_loss, dropout: float = 0.0) -> Workload:
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3))
    return _step(model, (torch.randn(12, 6),), (torch.rand(12, 3),), loss)


def language(dropout: float = 0.0) -> Workload:
    ids = torch.randint(16, (6, 8))
    targets = torch.where(torch.rand(6, 8) < 0.3, -100, torch.randint(16, (6, 8)))
    weights = torch.rand(16).double() + 0.5

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weights)

    return _step(Language(dropout), (ids,), (targets,), loss)


def planes() -> Workload:
    return _step(Planes(), (torch.randn(6, 3, 8, 8),), (torch.randint(4, (6, 8, 8)),), F.cross_entropy)


def normalised() -> Workload:
    return _step(Normalised(), (torch.randn(6, 3, 8, 8),), (torch.randint(5, (6,)),), F.cross_entropy)


STEPS: dict[str, Callable[[], Workload]] = {
    "perceptron": perceptron,
    "perceptron-l1": lambda: perceptron(F.l1_loss),
    "perceptron-smooth-l1": lambda: perceptron(F.smooth_l1_loss),
    "perceptron-logits": lambda: perceptron(F.binary_cross_entropy_with_logits),
    "perceptron-dropout": lambda: perceptron(dropout=0.25),
    "language": language,
    "language-dropout": lambda: language(0.25),
    "planes": planes,
    "normalised": normalised,
}


def _step(
    model: nn.Module, args: tuple[Tensor, ...], targets: tuple[Tensor, ...], loss: Callable[..., Tensor]
) -> Workload:
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, args=_doubled(args), targets=_doubled(targets), loss=loss, optimizer=optimizer)


def _doubled(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors)


def captured(name: str) -> Program:
    """The program of a small step, with its optimizer's state in place."""
    torch.manual_seed(3)
    program = capture(STEPS[name]())
    program.ensure_state()
    return program


def outcome(program: Program, graph: Graph) -> list[Tensor]:
    """What one step leaves: the results, then all floating tensors of the caller, on copies."""
    workload = program.workload
    inputs: dict[int, Any] = {
        value: tensor.detach().clone()
        for value, tensor in program.bind(workload.args, workload.kwargs, workload.targets).items()
    }
    inputs.update(program.scalars())
    torch.manual_seed(11)
    outputs = run_graph(graph, inputs)
    state = [t for t in inputs.values() if isinstance(t, Tensor) and t.is_floating_point()]
    return [*(outputs[value] for value in graph.outputs), *state]
