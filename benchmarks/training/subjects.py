"""The training steps of the comparison, and how an expert would checkpoint each of them by hand.

Problem.  "Checkpoint per block" is a family: where a block begins decides what is saved.  A weak choice
would flatter us.

Method.  A Subject has named cuts, each a forward pass written out with `torch.utils.checkpoint`; all are
measured, the least peak stands in the table.  A written-out forward cannot drift from its model unnoticed:
every row's gradients are compared with eager's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide.workload import Workload
from lowtide.workloads import load_workload

__all__ = ["SUBJECTS", "Forward", "Subject"]

Forward = Callable[[Any, Tensor], Tensor]
GPT = "gpt2:layers=4,dim=256,heads=4,seq=256,batch=8,vocab=4096"

_recomputed = functools.partial(checkpoint, use_reentrant=False)


@dataclass(frozen=True)
class Subject:
    """One model's training step; `workload` is what `load_workload` reads, or `build` makes it.

    `cuts` are forward passes with checkpoints, by what is one block, the first as in the published table.
    `linear_head`: the whole model is one matrix product, so that a fused loss applies.
    """

    key: str
    title: str
    workload: str = ""
    build: Callable[[], Workload] | None = None
    cuts: Mapping[str, Forward] = field(default_factory=dict)
    budgets: bool = True
    auto_chunker: bool = False
    linear_head: bool = False

    def make(self) -> Workload:
        """The step, with the same weights and data at every call."""
        return self.build() if self.build is not None else load_workload(self.workload)


def gpt_blocks(model: Any, ids: Tensor) -> Tensor:
    """GPT-2, every transformer block recomputed."""
    places = torch.arange(ids.shape[1], device=ids.device)
    x = model.drop(model.tokens(ids) + model.positions(places))
    for block in model.blocks:
        x = _recomputed(block, x)
    return model.head(model.norm(x))  # type: ignore[no-any-return]


def unet_levels(model: Any, x: Tensor) -> Tensor:
    """U-Net, every level recomputed: on the way up with the upsampling and the concatenation."""
    skips = []
    for level in model.down:
        skips.append(_recomputed(level, x))
        x = functional.max_pool2d(skips[-1], 2)
    return _climb(model, _recomputed(model.bottom, x), skips)


def unet_pooled_levels(model: Any, x: Tensor) -> Tensor:
    """U-Net, every level recomputed, on the way down with its pooling."""

    def down(level: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = level(x)
        return skip, functional.max_pool2d(skip, 2)

    skips = []
    for level in model.down:
        skip, x = _recomputed(down, level, x)
        skips.append(skip)
    return _climb(model, _recomputed(model.bottom, x), skips)


def unet_convolutions(model: Any, x: Tensor) -> Tensor:
    """U-Net, every double convolution recomputed, nothing else."""
    skips = []
    for level in model.down:
        skips.append(_recomputed(level, x))
        x = functional.max_pool2d(skips[-1], 2)
    x = _recomputed(model.bottom, x)
    for up, merge in zip(model.up, model.merge, strict=True):
        x = _recomputed(merge, torch.cat([skips.pop(), up(x)], dim=1))
    return model.head(x)  # type: ignore[no-any-return]


def _climb(model: Any, x: Tensor, skips: list[Tensor]) -> Tensor:
    def level(up: nn.Module, merge: nn.Module, skip: Tensor, x: Tensor) -> Tensor:
        return merge(torch.cat([skip, up(x)], dim=1))  # type: ignore[no-any-return]

    for up, merge in zip(model.up, model.merge, strict=True):
        x = _recomputed(level, up, merge, skips.pop(), x)
    return model.head(x)  # type: ignore[no-any-return]


class Head(nn.Module):
    """() -> (tokens, vocab) logits.  The features are trained: a trunk below wants their gradient."""

    def __init__(self, tokens: int, dim: int, vocab: int, generator: torch.Generator) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(tokens, dim, generator=generator))
        self.weight = nn.Parameter(0.02 * torch.randn(vocab, dim, generator=generator))

    def forward(self) -> Tensor:
        return functional.linear(self.features, self.weight)


def linear_cross_entropy(tokens: int = 4096, dim: int = 128, vocab: int = 8192) -> Workload:
    """A language model's last layer and its loss, with plain SGD, which adds nothing to the peak."""
    generator = torch.Generator().manual_seed(0)
    model = Head(tokens, dim, vocab, generator)
    return Workload(
        model,
        targets=(torch.randint(0, vocab, (tokens,), generator=generator),),
        loss=functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        name="linear-cross-entropy",
    )


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        subject.key: subject
        for subject in (
            Subject(
                "gpt",
                "GPT 4 layers, d256, h4, T256, B8, vocab 4096, SDPA",
                f"{GPT},mode=train",
                cuts={"blocks": gpt_blocks},
            ),
            Subject(
                "gpt-explicit",
                "the same GPT, explicit softmax attention",
                f"{GPT},attention=explicit,mode=train",
                cuts={"blocks": gpt_blocks},
            ),
            Subject(
                "unet",
                "U-Net c16 depth 3, 8x3x128x128, BatchNorm",
                "unet:batch=8,size=128,width=16,mode=train",
                cuts={
                    "levels": unet_levels,
                    "levels with pooling": unet_pooled_levels,
                    "convolutions": unet_convolutions,
                },
            ),
            Subject(
                "linear",
                "linear + cross-entropy, 4096x128x8192",
                build=linear_cross_entropy,
                budgets=False,
                auto_chunker=True,
                linear_head=True,
            ),
            Subject(
                "gpt-vocab",
                "GPT 1 layer, d128, h4, T256, B16, vocab 16384",
                "gpt2:layers=1,dim=128,heads=4,seq=256,batch=16,vocab=16384,mode=train",
                cuts={"blocks": gpt_blocks},
                budgets=False,
                auto_chunker=True,
            ),
        )
    }
)
