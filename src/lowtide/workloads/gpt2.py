"""GPT-2 (Radford et al. 2019), written out: pre-norm blocks, learned positions, head tied to the embedding.

Attention is either `scaled_dot_product_attention` or the explicit softmax, whose (seq x seq) weights are
what fission splits.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from lowtide.workload import Workload
from lowtide.workloads.seeded import Mode, adamw, check_multiple, fixed_seed, set_mode

__all__ = ["Gpt2", "gpt2"]

Attention = Literal["sdpa", "explicit"]


class CausalAttention(nn.Module):
    """Multi-head attention to earlier positions: (batch, seq, dim) -> the same."""

    mask: torch.Tensor

    def __init__(self, dim: int, heads: int, seq: int, dropout: float, attention: Attention) -> None:
        super().__init__()
        self.heads, self.dropout, self.attention = heads, dropout, attention
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        if attention == "explicit":
            later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
            self.register_buffer("mask", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.mix(q, k, v, self.dropout if self.training else 0.0)
        return self.project(y.transpose(1, 2).reshape(batch, seq, dim))  # type: ignore[no-any-return]

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
        """Attention proper, per head: three times (batch, heads, seq, dim / heads) -> one of these."""
        if self.attention == "sdpa":
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
        scores = scores.masked_fill(self.mask[: q.shape[-2], : q.shape[-2]], -math.inf)
        return functional.dropout(scores.softmax(dim=-1), dropout) @ v


class Block(nn.Module):
    """Attention and a four times wider perceptron, each added to the residual stream."""

    def __init__(self, dim: int, heads: int, seq: int, dropout: float, attention: Attention) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = CausalAttention(dim, heads, seq, dropout, attention)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_attention(x)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))  # type: ignore[no-any-return]


class Gpt2(nn.Module):
    """Token ids (batch, seq) -> next-token logits (batch, seq, vocab)."""

    def __init__(
        self, layers: int, dim: int, heads: int, seq: int, vocab: int, dropout: float, attention: Attention
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(seq, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, seq, dropout, attention) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_token_loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (batch, seq, vocab) logits against (batch, seq) ids."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def gpt2(
    *,
    mode: Mode = "train",
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    seq: int = 1024,
    batch: int = 1,
    vocab: int = 50257,
    attention: Attention = "sdpa",
    dropout: float = 0.0,
) -> Workload:
    """GPT-2 with a tied head, next-token cross-entropy; the defaults are the published 124M model."""
    check_multiple("dim", dim, heads, f"heads={heads}")
    with fixed_seed():
        model = set_mode(Gpt2(layers, dim, heads, seq, vocab, dropout, attention), mode)
        ids, following = torch.randint(0, vocab, (2, batch, seq)).unbind(0)
    if mode == "infer":
        return Workload(model, args=(ids.clone(),))
    return Workload(
        model,
        args=(ids.clone(),),
        targets=(following.clone(),),
        loss=next_token_loss,
        optimizer=adamw(model, mode),
    )
