"""One run of a workload's step under fake tensors: the stage on which both modes are recorded.

Problem.  The model, its loss, arguments and targets all have to be replaced by twins, run with the user's
autocast and gradient mode but nothing else of the surroundings, and left as they were.

Method.  `Stage` collects everything that exists before the step and enters, in this order, the swapped
modules, the fake mode and the recorder.  Whatever the user's code raises inside becomes a CaptureError at the
user's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.capture.internals import flatten, outside_modes, pytree, without_addresses
from lowtide.capture.origins import Origins
from lowtide.capture.recorder import Recorder
from lowtide.capture.refusals import RandomGuard, explain
from lowtide.capture.result import CONSTANT_TYPES, Returned
from lowtide.capture.trace import Trace, Window
from lowtide.capture.twins import (
    Named,
    Twins,
    check_plain,
    module_slots,
    module_tensors,
    swapped,
    walk_modules,
)
from lowtide.errors import CaptureError
from lowtide.ir.graph import Role
from lowtide.workload import Workload

__all__ = ["Stage", "argument_leaves", "modules_of", "named_tensors"]


def modules_of(workload: Workload) -> dict[str, nn.Module]:
    """The modules that take part, by the prefix of their names: the model itself and a loss module."""
    modules: dict[str, nn.Module] = {"": workload.model}
    if isinstance(workload.loss, nn.Module):
        taken = {name for name, _ in workload.model.named_children()}
        modules["loss" if "loss" not in taken else "loss_fn"] = workload.loss
    return modules


def named_tensors(workload: Workload) -> list[Named]:
    """The distinct parameters and buffers that take part, with all their names."""
    return module_tensors(module_slots(modules_of(workload)))


def argument_leaves(workload: Workload) -> list[tuple[str, Any]]:
    """All leaves of arguments and targets, named ``arg:0``, ``arg:kw.ids``, ``target:0``."""
    return name_leaves(workload.args, workload.kwargs, workload.targets)


def name_leaves(args: Any, kwargs: Any, targets: Any) -> list[tuple[str, Any]]:
    """The same for any call."""
    trees = (("arg", tuple(args)), ("arg", dict(kwargs)), ("target", tuple(targets)))
    return [(f"{kind}:{path}", leaf) for kind, tree in trees for path, leaf in flatten(tree)[0]]


class Stage:
    """The stand-ins of everything that a step of `workload` finds."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._modules = modules_of(workload)
        self._slots = module_slots(self._modules)
        self.named = module_tensors(self._slots)
        leaves = _check_leaves(argument_leaves(workload))
        owned = [named.tensor for named in self.named]
        self.twins = Twins(without_addresses(), [*owned, *(tensor for _, tensor in leaves)])
        self.guard = RandomGuard()
        self.recorder = Recorder(self._origins(), self.twins, self.guard.check_draw)
        for named in self.named:
            names = tuple(f"{named.role.value}:{name}" for name in named.names)
            self.recorder.add_resident(names, named.role, named.tensor, self.twins.of(named.tensor))
        for name, tensor in leaves:
            self.recorder.add_resident((name,), Role.INPUT, tensor, self.twins.of(tensor))

    def _origins(self) -> Origins:
        owners = {id(module): path for path, module in walk_modules(self._modules)}
        parameters = {
            id(self.twins.of(named.tensor)): named.names[0].rpartition(".")[0] for named in self.named
        }
        return Origins(owners, parameters)

    def stand_in(self, tree: Any) -> Any:
        """Arguments with tensors replaced by their twins."""
        return pytree.tree_map(lambda leaf: self.twins.of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    @contextmanager
    def running(self, grad: bool) -> Iterator[dict[str, Tensor]]:
        """Inside, the step may run; yields what `swapped` yields."""
        with ExitStack() as stack:
            stack.enter_context(outside_modes())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            rebound = stack.enter_context(swapped(self._slots, self.twins))
            stack.enter_context(explain(self.recorder.origins))
            stack.enter_context(self.twins.mode)
            stack.enter_context(self.recorder)
            yield rebound
            self.guard.check_seed()
            self.guard.check_python()

    def autocast(self) -> torch.autocast:
        """The workload's autocast region; switched off if it has none, whatever surrounds the caller."""
        device = next((named.tensor.device.type for named in self.named), "cpu")
        dtype = self.workload.autocast
        return torch.autocast(device, dtype=dtype, enabled=dtype is not None)

    def trace(
        self, results: Mapping[str, Window], returned: Returned, rebound: Mapping[str, Tensor]
    ) -> Trace:
        """What was recorded."""
        windows = {path: self.recorder.window(tensor) for path, tensor in rebound.items()}
        return self.recorder.trace(results, returned, windows)


def _check_leaves(leaves: list[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    tensors = []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            check_plain(f"argument {name}", leaf)
            if leaf.requires_grad:
                raise CaptureError(
                    f"argument {name} requires a gradient, which a plan would not compute",
                    remedy="detach it, or make it a parameter of the model",
                )
            tensors.append((name, leaf))
        elif not isinstance(leaf, CONSTANT_TYPES):
            raise CaptureError(
                f"argument {name} is a {type(leaf).__name__}",
                remedy="pass tensors, numbers, strings, None, or lists, tuples and dictionaries of them",
            )
    return tensors
