"""What cannot be captured, said clearly: before the run, while it runs, and of what it raises.

Every message names the thing, the user's line where there is one, and what to do instead.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.capture.internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    outside_modes,
)
from lowtide.capture.origins import Origins, user_file
from lowtide.capture.twins import Named, walk_modules
from lowtide.errors import CaptureError, LowtideError
from lowtide.ir.aten import resolve

__all__ = ["RandomGuard", "check_hooks", "check_no_gradients", "check_python", "explain"]

_MODULES = "torch/nn/modules/"
_CHECKPOINT = "torch/utils/checkpoint.py"


def check_no_gradients(parameters: list[Named]) -> None:
    """Raises CaptureError if a parameter already carries a gradient."""
    full = [named.names[0] for named in parameters if named.tensor.grad is not None]
    if full:
        raise CaptureError(
            f"{len(full)} parameters have a gradient at the start of the step, first {full[0]}",
            remedy="call optimizer.zero_grad(set_to_none=True) before",
        )


def check_hooks(parameters: list[Named], modules: dict[str, nn.Module]) -> None:
    """Raises CaptureError for gradient hooks, which a plan would not run."""
    for named in parameters:
        if named.tensor._backward_hooks or _post_accumulate_hooks(named.tensor):
            raise CaptureError(
                f"parameter {named.names[0]} has a gradient hook", remedy="remove it before capture"
            )
    for path, module in walk_modules(modules):
        if module._backward_hooks or module._backward_pre_hooks:
            where = path or type(module).__name__
            raise CaptureError(f"module {where} has a backward hook", remedy="remove it before capture")


def check_python(modules: dict[str, nn.Module]) -> None:
    """Raises CaptureError for modules that do not run as Python."""
    for path, module in walk_modules(modules):
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {path or type(module).__name__} is compiled by torch.jit",
                remedy="pass the module that it was made of",
            )


def _post_accumulate_hooks(tensor: Tensor) -> bool:
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


class RandomGuard:
    """Watches the generators during one recording, in which nothing may really be drawn.

    Fake operators leave PyTorch's generator alone, so a state that differs was set by the program itself, and
    draws after that would not be the ones that eager makes.
    """

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def check_draw(self, overload: str) -> None:
        """Raises CaptureError for a random operator whose draw would not be eager's."""
        if torch.Tag.nondeterministic_seeded not in resolve(overload).tags:
            return
        if _inside_checkpoint():
            raise CaptureError(
                "torch.utils.checkpoint runs a region with dropout twice, from one state of the generator",
                remedy="take the checkpoint out: a plan recomputes by itself",
            )
        self.check_seed()

    def check_seed(self) -> None:
        """Raises CaptureError if the program has set PyTorch's seed."""
        with outside_modes():
            same = torch.equal(self._torch, torch.get_rng_state())
        if not same:
            raise CaptureError(
                "the step sets the seed of PyTorch's generator", remedy="set it before the step, not inside"
            )

    def check_python(self) -> None:
        """Raises CaptureError if Python's or NumPy's generator has been drawn from."""
        for name, same in (
            ("random", random.getstate() == self._python),
            ("numpy.random", _numpy_state() == self._numpy),
        ):
            if not same:
                raise CaptureError(
                    f"the step draws from Python's {name}, and a plan would repeat one outcome for ever",
                    remedy="switch the random choice off (layerdrop=0), or draw with torch, for torch.where",
                )


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=True)
    return tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in state)


def _inside_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_CHECKPOINT):
            return True
        frame = frame.f_back
    return False


@contextmanager
def explain(origins: Origins) -> Iterator[None]:
    """Turns what the user's code or the fake tensors raise inside into a CaptureError at the user's line."""
    try:
        yield
    except LowtideError as error:
        if not error.source and isinstance(error, CaptureError):
            raise CaptureError(
                error.what, source=_source(error.__traceback__), remedy=error.remedy
            ) from error.__cause__
        raise
    except DynamicOutputShapeException as error:
        raise CaptureError(
            f"the shape of the result of {_operator(error)} depends on the data",
            source=_source(error.__traceback__),
            remedy="use a form of fixed shape (torch.where, masked_fill, topk) or keep it outside the model",
        ) from error
    except DataDependentOutputException as error:
        raise CaptureError(
            f"the program needs the value of a tensor ({_operator(error)}), which only exists when it runs",
            source=_source(error.__traceback__),
            remedy="replace .item(), bool() and if on tensors by tensor operations (torch.where)",
        ) from error
    except UnsupportedOperatorException as error:
        raise CaptureError(
            f"{_operator(error)} cannot run without data",
            source=_source(error.__traceback__),
            remedy="keep it outside the model, or register a fake for it (torch.library.register_fake)",
        ) from error
    except Exception as error:
        text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        raise CaptureError(
            f"the step fails when run for capture: {text}",
            source=_source(error.__traceback__),
            remedy="check that the eager step runs; if it does, this operation needs real data",
        ) from error


def _operator(error: Exception) -> str:
    return str(getattr(error, "func", None) or error.args[0])


def _source(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code in a traceback, else of PyTorch's modules."""
    found = module = ""
    for frame, line in traceback.walk_tb(trace):
        path = frame.f_code.co_filename.replace("\\", "/")
        name = user_file(frame.f_code.co_filename)
        if name and "lowtide/capture/" not in path:
            found = f"{name}:{line}"
        elif _MODULES in path:
            module = f"{path[path.rindex(_MODULES) :]}:{line}"
    return found or module
