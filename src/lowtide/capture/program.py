"""A captured step: the graph, what its inputs and outputs are called, and the live tensors behind them.

Problem.  A graph speaks of value ids.  A step needs the user's parameters, buffers, optimizer state,
arguments and today's learning rate, and has to notice when they are no longer what was captured.

Method.  `bind` looks everything up by name, anew each time, and compares it with what capture saw:
arguments must have the captured shape (`ShapeMismatch`), everything owned by model and optimizer must be the
very memory that was captured (`Stale`).  `scalars` asks the user's optimizer for the coming step's numbers.

One step, for an executor:

    tensors = program.bind(args, kwargs, targets)      # creates missing optimizer state
    numbers = program.scalars()
    ...                                                # run the graph's nodes in any valid order
    program.advance()                                  # the step has happened
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.capture.apart import check_apart
from lowtide.capture.binding import Binding
from lowtide.capture.result import Result
from lowtide.capture.update import Updates
from lowtide.ir.graph import Graph
from lowtide.ir.philox import KEY_BITS, node_key
from lowtide.workload import Workload

__all__ = ["Program"]


@dataclass(frozen=True, eq=False)
class Program:
    """A workload as a graph.

    `names` maps resident inputs and host scalars to value ids: ``param:enc.0.weight``,
    ``buffer:bn.running_mean``, ``state:enc.0.weight:exp_avg``, ``arg:0.ids``, ``target:0``, ``const:0``,
    ``scalar:update[0].scalar[2]``.
    `gradients` maps parameters to the values of their (clipped) gradients, `updates` to their update nodes;
    both are empty for inference.  `opaque` lists the operators that no table knows.  `draws` are the host
    numbers that hold the keys of draws by counter, by offset (`capture.counted`).
    """

    graph: Graph
    mode: Literal["train", "infer"]
    workload: Workload
    names: Mapping[str, int]
    gradients: Mapping[str, int]
    updates: Mapping[str, int]
    result: Result
    binding: Binding
    optimizer: Updates | None = None
    opaque: tuple[str, ...] = ()
    rng: Literal["eager", "philox"] = "eager"
    draws: tuple[int, ...] = ()

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, targets: tuple[Any, ...] = ()
    ) -> dict[int, Tensor]:
        """Value id -> the user's live tensor, for every resident input.

        Creates missing optimizer state.  Raises ShapeMismatch (which input, expected and actual shape) or
        Stale (the first difference from what was captured).
        """
        found = self.binding.check(self.workload, self.optimizer)
        given = self.binding.arguments(args, kwargs or {}, targets)
        check_apart(self.graph, self.names, found, given)
        self.ensure_state()
        return {**self.binding.owned(found, self.optimizer), **given}

    def ensure_state(self) -> None:
        """Create the optimizer state that is missing, as eager's first step would."""
        if self.optimizer is not None:
            self.optimizer.ensure_state()

    def scalars(self) -> dict[int, float]:
        """Value id -> number, for every host scalar of the coming step.  Raises Stale.

        Draws by counter take one number from PyTorch's generator.
        """
        found = self._keys()
        if self.optimizer is None:
            return found
        for index, numbers in enumerate(self.optimizer.numbers()):
            for number, value in enumerate(numbers):
                found[self.names[f"scalar:update[{index}].scalar[{number}]"]] = value
        return found

    def _keys(self) -> dict[int, float]:
        if not self.draws:
            return {}
        step_key = int(torch.randint(0, 1 << KEY_BITS, (), device="cpu"))
        return {value: float(node_key(step_key, offset)) for offset, value in enumerate(self.draws)}

    def advance(self) -> None:
        """Note that a step has happened (call it after the last update ran)."""
        if self.optimizer is not None:
            self.optimizer.advance()
