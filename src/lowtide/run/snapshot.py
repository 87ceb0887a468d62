"""A workload's state on disk, and its exact return.

Problem.  Measuring and verifying run real steps, which change weights, statistics, optimizer state and the
random generators; afterwards everything has to be as before, and no second copy may sit in memory.

Method.  Tensor contents go to files of a temporary directory, byte by byte (`Spill`); objects (which tensor
is which buffer, which gradient belongs to whom, which entries the optimizer's state has) are remembered by
reference, which costs nothing.  `restore` copies the bytes back into the same tensors and rebinds the rest.

Invariant.  After `restore`: equal bits, same tensor objects, same random states (PyTorch, NumPy, Python).

Not done.  Attributes that a model changes in Python.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.run.native import owned_modules
from lowtide.workload import Workload

__all__ = ["Snapshot", "Spill", "bytes_of", "preserved"]


class Spill:
    """Tensors by name, in files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: dict[str, tuple[Path, torch.dtype, torch.Size]] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Write the contents of `tensor`; one contiguous copy of it exists meanwhile."""
        known = self._kept.get(name)
        path = known[0] if known else self._directory / f"{len(self._kept)}.bin"
        bytes_of(tensor).tofile(path)
        self._kept[name] = (path, tensor.dtype, tensor.shape)

    def get(self, name: str) -> Tensor:
        """The tensor again, contiguous; KeyError if there is none of that name."""
        path, dtype, shape = self._kept[name]
        raw = torch.from_numpy(np.fromfile(path, dtype=np.uint8))
        return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)

    def names(self) -> tuple[str, ...]:
        """What was put, in order."""
        return tuple(self._kept)


def bytes_of(tensor: Tensor) -> Any:
    """The elements in row-major order as a uint8 array; contiguous tensors are not copied."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


class Snapshot:
    """One workload's state, remembered."""

    def __init__(self, workload: Workload, directory: Path) -> None:
        self._workload = workload
        self._spill = Spill(directory)
        self._tensors: dict[str, Tensor] = {}
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._state: dict[Any, dict[str, Any]] = {}
        self._random = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._remember_modules()
        self._remember_optimizer()

    def _remember_modules(self) -> None:
        for module in owned_modules(self._workload):
            for part in module.modules():
                for slots in (part._parameters, part._buffers):
                    for name, tensor in slots.items():
                        self._slots.append((slots, name, tensor))
                        self._keep(tensor)
            for parameter in module.parameters():
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def _remember_optimizer(self) -> None:
        optimizer = self._workload.optimizer
        if optimizer is None:
            return
        for parameter, entries in optimizer.state.items():
            self._state[parameter] = {
                name: entry if isinstance(entry, Tensor) else copy.deepcopy(entry)
                for name, entry in entries.items()
            }
            for entry in entries.values():
                self._keep(entry)

    def _keep(self, tensor: Any) -> None:
        if isinstance(tensor, Tensor) and str(id(tensor)) not in self._tensors:
            self._tensors[str(id(tensor))] = tensor
            self._spill.put(str(id(tensor)), tensor)

    def restore(self) -> None:
        """Put everything back; may be called more than once."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._spill.get(name))
        for slots, name, tensor in self._slots:
            slots[name] = tensor
        if self._workload.optimizer is not None:
            self._workload.optimizer.state.clear()
            for parameter, entries in self._state.items():
                self._workload.optimizer.state[parameter] = copy.copy(entries)
        self.clear_gradients()
        self.restore_random()

    def restore_random(self) -> None:
        """The random generators as they were."""
        torch.set_rng_state(self._random[0])
        np.random.set_state(self._random[1])
        random.setstate(self._random[2])

    def clear_gradients(self) -> None:
        """No parameter has a gradient."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def leave(self) -> None:
        """`restore`, and the user's gradients again."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


@contextmanager
def preserved(workload: Workload) -> Iterator[Snapshot]:
    """Inside, steps may run, with no gradients at the start; afterwards all is as it was.

    `restore` of what is yielded returns to the start any number of times.
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-") as directory:
        snapshot = Snapshot(workload, Path(directory))
        try:
            yield snapshot
        finally:
            snapshot.leave()
