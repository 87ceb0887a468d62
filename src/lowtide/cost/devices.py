"""Named devices for the analytic cost: peak rates and a fixed cost per launch.

The numbers are published peaks times the share that dense kernels reach in practice (`efficiency`).
Not done here: measuring (`profiled.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import UsageError

__all__ = ["DEVICES", "Device", "device_named"]


@dataclass(frozen=True)
class Device:
    """Peak rates of a device.

    flops: floating-point operations per second by element type, already derated; `bandwidth` in
    bytes per second, likewise; `launch_s` is the fixed cost of an operator; `memory_bytes` its
    memory; `link` the bytes per second to the host.
    """

    name: str
    flops: tuple[tuple[torch.dtype, float], ...]
    bandwidth: float
    launch_s: float
    memory_bytes: int
    link: float

    def flops_for(self, dtype: torch.dtype) -> float:
        """Operations per second in `dtype`; the first entry stands for types not listed."""
        return dict(self.flops).get(dtype, self.flops[0][1])


GIB = 2**30
DEVICES: tuple[Device, ...] = (
    Device(
        "rtx3090",
        ((torch.float32, 35.6e12 * 0.70), (torch.bfloat16, 71.0e12 * 0.70), (torch.float16, 71.0e12 * 0.70)),
        936e9 * 0.85,
        5e-6,
        24 * GIB,
        12e9,
    ),
    Device(
        "h200",
        ((torch.float32, 495e12 * 0.60), (torch.bfloat16, 989e12 * 0.70), (torch.float16, 989e12 * 0.70)),
        4.8e12 * 0.85,
        4e-6,
        141 * GIB,
        50e9,
    ),
    Device("cpu", ((torch.float32, 1.5e11), (torch.bfloat16, 1.5e11)), 2.0e10, 5e-6, 16 * GIB, 1e9),
)


def device_named(name: str) -> Device:
    """The device called `name`; a UsageError names those that exist."""
    for device in DEVICES:
        if device.name == name:
            return device
    known = ", ".join(device.name for device in DEVICES)
    raise UsageError(f"no device {name!r}: the known devices are {known}")
