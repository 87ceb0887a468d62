"""Architectures of `transformers`, from their published configurations with random weights.

The package is optional (``pip install 'lowtide[hf]'``) and imported only when one of these is built;
nothing is ever downloaded.  The models are used as they come: keyword arguments in, `ModelOutput`s
out, the loss inside (`Workload.loss` is None).  The options that shrink a network exist for tests; the
defaults are the published sizes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

import torch

from lowtide.errors import UsageError
from lowtide.workload import Workload
from lowtide.workloads.seeded import Mode, adamw, check_multiple, fixed_seed, set_mode

__all__ = ["bert_base", "gptneo", "mobilenetv2", "resnet50", "vit_base"]

Attention = Literal["sdpa", "eager"]
IGNORED_LABEL = -100  # what the losses of `transformers` skip
MASKED_SHARE = 0.15  # of the tokens are to be predicted (Devlin et al. 2019)


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "this workload needs the package transformers, which is not installed",
            remedy="pip install 'lowtide[hf]'",
        ) from error


def _step(model: Any, mode: Mode, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Workload:
    set_mode(model, mode)
    if mode == "infer":
        return Workload(model, kwargs=inputs)
    return Workload(model, kwargs={**inputs, "labels": labels}, optimizer=adamw(model, mode))


def _classification(model: Any, mode: Mode, batch: int, size: int, classes: int) -> Workload:
    pixels = {"pixel_values": torch.randn(batch, 3, size, size)}
    return _step(model, mode, pixels, torch.randint(0, classes, (batch,)))


def resnet50(
    *,
    mode: Mode = "train",
    batch: int = 32,
    size: int = 224,
    width: int = 64,
    stages: int = 4,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Workload:
    """ResNet-50 image classifier (transformers); width and stages (1 to 4) shrink it."""
    _refuse_dropout("resnet50", dropout)
    if stages > 4:
        raise UsageError(f"stages={stages} is more than ResNet-50 has", remedy="use 1 to 4")
    package = _transformers()
    config = package.ResNetConfig(
        embedding_size=width,
        hidden_sizes=[4 * width << stage for stage in range(stages)],
        depths=[3, 4, 6, 3][:stages],
        num_labels=classes,
        problem_type="single_label_classification",
    )
    with fixed_seed():
        model = package.ResNetForImageClassification(config)
        return _classification(model, mode, batch, size, classes)


def mobilenetv2(
    *,
    mode: Mode = "train",
    batch: int = 32,
    size: int = 224,
    width: float = 1.0,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Workload:
    """MobileNetV2 image classifier (transformers); width multiplies the channels."""
    package = _transformers()
    config = package.MobileNetV2Config(
        depth_multiplier=width,
        image_size=size,
        classifier_dropout_prob=dropout,
        num_labels=classes,
        problem_type="single_label_classification",
    )
    with fixed_seed():
        model = package.MobileNetV2ForImageClassification(config)
        return _classification(model, mode, batch, size, classes)


def vit_base(
    *,
    mode: Mode = "train",
    batch: int = 32,
    size: int = 224,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    classes: int = 1000,
    attention: Attention = "sdpa",
    dropout: float = 0.0,
) -> Workload:
    """ViT-Base/16 image classifier (transformers)."""
    check_multiple("dim", dim, heads, f"heads={heads}")
    check_multiple("size", size, 16, "the 16 pixel patches")
    package = _transformers()
    config = package.ViTConfig(
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        image_size=size,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=classes,
        problem_type="single_label_classification",
        attn_implementation=attention,
    )
    with fixed_seed():
        return _classification(package.ViTForImageClassification(config), mode, batch, size, classes)


def bert_base(
    *,
    mode: Mode = "train",
    batch: int = 8,
    seq: int = 128,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    vocab: int = 30522,
    attention: Attention = "sdpa",
    dropout: float = 0.0,
) -> Workload:
    """BERT-Base masked language model (transformers), 15% of the tokens to be predicted."""
    check_multiple("dim", dim, heads, f"heads={heads}")
    package = _transformers()
    config = package.BertConfig(
        vocab_size=vocab,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        max_position_embeddings=max(512, seq),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation=attention,
    )
    with fixed_seed():
        model = package.BertForMaskedLM(config)
        ids = torch.randint(0, vocab, (batch, seq))
        labels = ids.masked_fill(torch.rand(batch, seq) >= MASKED_SHARE, IGNORED_LABEL)
        labels[:, 0] = ids[:, 0]  # never a mean over no token at all
        return _step(model, mode, {"input_ids": ids}, labels)


def gptneo(
    *,
    mode: Mode = "train",
    batch: int = 1,
    seq: int = 512,
    layers: int = 24,
    dim: int = 2048,
    heads: int = 16,
    vocab: int = 50257,
    dropout: float = 0.0,
) -> Workload:
    """GPT-Neo 1.3B language model (transformers), alternating global and local explicit attention."""
    check_multiple("dim", dim, heads, f"heads={heads}")
    package = _transformers()
    kinds = [[["global", "local"], layers // 2]] + ([[["global"], 1]] if layers % 2 else [])
    config = package.GPTNeoConfig(
        vocab_size=vocab,
        hidden_size=dim,
        num_layers=layers,
        num_heads=heads,
        attention_types=[kind for kind in kinds if kind[1]],
        max_position_embeddings=max(2048, seq),
        embed_dropout=dropout,
        attention_dropout=dropout,
        resid_dropout=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with fixed_seed():
        model = package.GPTNeoForCausalLM(config)
        ids = torch.randint(0, vocab, (batch, seq))
        return _step(model, mode, {"input_ids": ids}, ids.clone())


def _refuse_dropout(name: str, dropout: float) -> None:
    if dropout:
        raise UsageError(
            f"{name} has no dropout layer, so dropout={dropout} means nothing", remedy="leave it out"
        )
