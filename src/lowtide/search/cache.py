"""One plan per input shape, bounded in number and in bytes.

Problem.  A model meets many shapes (the last batch, sequence lengths); a plan is for one.  Keeping a plan
and an arena per shape would grow without end.

Method.  Plans are kept by the shapes and types of the call's tensors, least recently used first out.  Only
the plan that ran last keeps its arena: the limit is on the total, so two arenas would break it.

Not done here: searching; sharing one arena between plans.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.errors import UsageError
from lowtide.run.plan import Plan
from lowtide.workload import Workload

__all__ = ["PlanCache", "Planner"]

Planner = Callable[[Workload], Plan]
"""Makes a verified plan for a workload."""


class PlanCache:
    """`cache(*args, **kwargs)` and `cache.step(*args, *targets, **kwargs)` run the plan for their shapes.

    `make_workload` is called with the arguments of a call whose shapes are new and returns the Workload to
    plan; it has to use the same model and optimizer each time.  `planner` makes the plan.  At most
    `max_plans` are kept.
    """

    def __init__(self, make_workload: Callable[..., Workload], planner: Planner, max_plans: int = 8) -> None:
        if max_plans < 1:
            raise UsageError(f"max_plans is {max_plans}", remedy="keep at least one plan")
        self._make_workload = make_workload
        self._planner = planner
        self._max_plans = max_plans
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._plans)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        with self._lock:
            return self.plan_for(*args, **kwargs)(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One training step; returns the loss."""
        with self._lock:
            return self.plan_for(*args, **kwargs).step(*args, **kwargs)

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes, made now if there is none; others give up their arenas."""
        key = _key(args, kwargs)
        with self._lock:
            current = self._plans.get(key)
            for known, plan in self._plans.items():
                if known != key:
                    plan.release()
            if current is None:
                current = self._planner(self._make_workload(*args, **kwargs))
                self._plans[key] = current
            self._plans.move_to_end(key)
            while len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
            return current


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return str(spec), tuple(_describe(leaf) for leaf in leaves)


def _describe(leaf: Any) -> object:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, str(leaf.device)
    return type(leaf), leaf
