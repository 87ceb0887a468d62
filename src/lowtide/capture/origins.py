"""Which module and which source line an operator call comes from.

Problem.  Reports and errors speak of ``encoder.3.attention`` and ``model.py:41``, while operators arrive one
by one below autograd, backward ones without any user code on the stack.

Method.  Forward: walk the Python stack outwards.  The innermost `Module.__call__` frame gives the module, the
innermost frame outside of PyTorch and the standard library gives the line.  Backward: autograd numbers
its nodes, and while an operator of the forward runs, the next free number is known; a backward node takes the
origin of the forward operator that was recorded under its number.

Not done here: lines inside C++ or generated code.
"""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.capture.internals import current_autograd_node, sequence_number
from lowtide.ir.graph import Origin

__all__ = ["Origins"]

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STDLIB = sysconfig.get_path("stdlib")
_CALL = nn.Module._call_impl.__code__
_UNNUMBERED = 1 << 62
"""Autograd gives gradient accumulation the largest sequence number there is."""


class Origins:
    """Finds origins during one recording; `owners` names modules, `parameters` their parameters' modules."""

    def __init__(self, owners: Mapping[int, str], parameters: Mapping[int, str]) -> None:
        self.phase = "forward"
        self._owners = owners
        self._parameters = parameters
        self._numbers: list[int] = []
        self._found: list[Origin] = []
        self._files: dict[str, str | None] = {}

    def find(self) -> Origin:
        """The origin of the operator that is being dispatched now."""
        node = current_autograd_node()
        if node is not None:
            return self._of_backward(node)
        module, source = self._walk()
        origin = Origin(module, source, self.phase)
        self._remember(origin)
        return origin

    def source(self) -> str:
        """The user's line that is running now; empty if there is none."""
        return self._walk()[1]

    def _remember(self, origin: Origin) -> None:
        # Autograd makes its node, then runs the operator: the first one under a number is that node's.
        number = sequence_number() - 1
        if self._numbers and number <= self._numbers[-1]:
            return
        self._numbers.append(number)
        self._found.append(origin)

    def _of_backward(self, node: Any) -> Origin:
        number = int(node._sequence_nr())
        if number > _UNNUMBERED:
            owner = self._parameters.get(id(getattr(node, "variable", None)), "")
            return Origin(owner, "", "backward")
        index = bisect_right(self._numbers, number) - 1
        if index < 0:
            return Origin("", "", "backward")
        forward = self._found[index]
        return Origin(forward.module, forward.source, "backward")

    def _walk(self) -> tuple[str, str]:
        module: str | None = None
        source = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and not _is_ours(frame.f_code.co_filename):
            if module is None and frame.f_code is _CALL:
                module = self._owners.get(id(frame.f_locals["self"]))
            if not source:
                name = self._file(frame.f_code.co_filename)
                source = f"{name}:{frame.f_lineno}" if name else ""
            if source and module is not None:
                break
            frame = frame.f_back
        return module or "", source

    def _file(self, path: str) -> str | None:
        if path not in self._files:
            self._files[path] = user_file(path)
        return self._files[path]


def _is_ours(path: str) -> bool:
    return path.startswith(_HERE)


def user_file(path: str) -> str | None:
    """How a user's file is called in messages; None for PyTorch, the standard library, generated code.

    A file of an installed package is named from the package on, any other by its last component.
    """
    if path.startswith((_TORCH, "<")):
        return None
    for site in _SITE:
        if path.startswith(site):
            return path[len(site) + 1 :]
    return None if path.startswith(_STDLIB) else Path(path).name
