"""Convolutional rows of the fusion benchmark: a depthwise block, MobileNetV2 (arXiv 1801.04381), a U-Net."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowtide.workloads.unet import UNet

__all__ = ["depthwise", "mobilenet", "unet"]

Made = tuple[nn.Module, tuple[Tensor, ...]]


def _settled(model: nn.Module) -> nn.Module:
    """Normalisations as after training: statistics and factors of their own per channel."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    return model.eval()


def _block(before: int, after: int, size: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(),
    )


class _Inverted(nn.Module):
    """Expand, filter each channel, project; a residual where shapes allow."""

    def __init__(self, before: int, after: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = before * expand
        self.residual = stride == 1 and before == after
        layers: list[nn.Module] = [_block(before, inner)] if expand > 1 else []
        layers += [_block(inner, inner, 3, stride, inner)]
        layers += [nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)]
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if self.residual else y  # type: ignore[no-any-return]


class _MobileNet(nn.Module):
    """(n, 3, 224, 224) -> (n, 1000)."""

    def __init__(self) -> None:
        super().__init__()
        stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
                  (6, 320, 1, 1))  # fmt: skip
        layers: list[nn.Module] = [_block(3, 32, 3, 2)]
        before = 32
        for expand, after, count, stride in stages:
            for number in range(count):
                layers.append(_Inverted(before, after, stride if number == 0 else 1, expand))
                before = after
        self.features = nn.Sequential(*layers, _block(before, 1280))
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))  # type: ignore[no-any-return]


def depthwise() -> Made:
    """3 x 3 per channel, BatchNorm, ReLU6 on 144 channels of 56 x 56."""
    torch.manual_seed(0)
    return _settled(_block(144, 144, 3, groups=144)), (torch.randn(1, 144, 56, 56),)


def mobilenet() -> Made:
    """MobileNetV2 at 224."""
    torch.manual_seed(0)
    return _settled(_MobileNet()), (torch.randn(1, 3, 224, 224),)


def unet() -> Made:
    """Four levels from 32 channels, 256 x 256."""
    torch.manual_seed(0)
    return _settled(UNet(32, 4, 4, 0.0)), (torch.randn(1, 3, 256, 256),)
