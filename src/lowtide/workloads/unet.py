"""U-Net (Ronneberger et al. 2015) and U-Net++ (Zhou et al. 2018) for per-pixel classification.

Long skip connections keep early, large activations alive across the whole network: the classical case
where order and rematerialisation decide the peak.  Level l has ``width * 2**l`` channels.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from lowtide.workload import Workload
from lowtide.workloads.seeded import Mode, adamw, check_multiple, fixed_seed, set_mode

__all__ = ["UNet", "UNetPlusPlus", "unet", "unetpp"]


class DoubleConv(nn.Sequential):
    """Twice 3x3 convolution, batch normalisation and ReLU; dropout, where asked for, at the end."""

    def __init__(self, channels_in: int, channels_out: int, dropout: float) -> None:
        layers: list[nn.Module] = []
        for channels in (channels_in, channels_out):
            layers += [
                nn.Conv2d(channels, channels_out, 3, padding=1),
                nn.BatchNorm2d(channels_out),
                nn.ReLU(),
            ]
        if dropout > 0:
            layers.append(nn.Dropout2d(dropout))
        super().__init__(*layers)


class UNet(nn.Module):
    """Max-pool down, transposed convolution up, skips concatenated.

    (batch, 3, size, size) -> (batch, classes, size, size); size is a multiple of ``2**depth``.
    """

    def __init__(self, width: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        channels = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            DoubleConv(before, after, dropout)
            for before, after in zip([3, *channels[:-2]], channels[:-1], strict=True)
        )
        self.bottom = DoubleConv(channels[-2], channels[-1], dropout)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * wide, wide, 2, stride=2) for wide in reversed(channels[:-1])
        )
        self.merge = nn.ModuleList(DoubleConv(2 * wide, wide, dropout) for wide in reversed(channels[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class UNetPlusPlus(nn.Module):
    """U-Net with nested, dense skips: node (l, j) reads all earlier nodes of level l and node (l + 1, j - 1).

    Same shapes as UNet; upsampling is bilinear, as in the authors' code.
    """

    def __init__(self, width: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        channels = [width << level for level in range(depth + 1)]
        self.depth = depth
        self.nodes = nn.ModuleDict()
        for column in range(depth + 1):
            for level in range(depth + 1 - column):
                before = 3 if level == 0 else channels[level - 1]
                if column > 0:
                    before = column * channels[level] + channels[level + 1]
                self.nodes[f"{level}_{column}"] = DoubleConv(before, channels[level], dropout)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: list[list[torch.Tensor]] = []
        for level in range(self.depth + 1):
            if level > 0:
                x = functional.max_pool2d(x, 2)
            x = self.nodes[f"{level}_0"](x)
            rows.append([x])
            # The diagonal that this level completes, upwards.
            for above in reversed(range(level)):
                deeper = functional.interpolate(
                    rows[above + 1][-1], scale_factor=2, mode="bilinear", align_corners=True
                )
                node = self.nodes[f"{above}_{level - above}"]
                rows[above].append(node(torch.cat([*rows[above], deeper], dim=1)))
        return self.head(rows[0][-1])  # type: ignore[no-any-return]


def unet(
    *,
    mode: Mode = "train",
    batch: int = 8,
    size: int = 128,
    width: int = 16,
    depth: int = 3,
    classes: int = 4,
    dropout: float = 0.0,
) -> Workload:
    """U-Net with BatchNorm, transposed convolutions up, per-pixel cross-entropy."""
    check_multiple("size", size, 1 << depth, f"2**depth, depth={depth}")
    with fixed_seed():
        return _segmentation(UNet(width, depth, classes, dropout), mode, batch, size, classes)


def unetpp(
    *,
    mode: Mode = "train",
    batch: int = 8,
    size: int = 128,
    width: int = 16,
    depth: int = 3,
    classes: int = 4,
    dropout: float = 0.0,
) -> Workload:
    """U-Net++ with nested skips, bilinear upsampling, per-pixel cross-entropy."""
    check_multiple("size", size, 1 << depth, f"2**depth, depth={depth}")
    with fixed_seed():
        return _segmentation(UNetPlusPlus(width, depth, classes, dropout), mode, batch, size, classes)


def _segmentation(model: nn.Module, mode: Mode, batch: int, size: int, classes: int) -> Workload:
    set_mode(model, mode)
    x, y = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch, size, size))
    if mode == "infer":
        return Workload(model, args=(x,))
    return Workload(
        model, args=(x,), targets=(y,), loss=functional.cross_entropy, optimizer=adamw(model, mode)
    )
