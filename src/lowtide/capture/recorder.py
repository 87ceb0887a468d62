"""Records every operator call of a step, with the true storages of its tensors.

Problem.  A graph that is to be right about memory and about in-place effects has to see what eager runs,
not what a functionalising tracer makes of it.

Method.  A dispatch mode below autograd, above fake tensors: each ATen call arrives as the CPU would get it,
with fake tensors that alias as the real ones do.  Windows are noted before the call (an in-place view changes
its argument), outputs after it.  Real tensors that turn up are the user's constants: literals, closures,
attributes that are no parameters.

Invariants.  No tensor is kept alive, only storages, so that their addresses are not used twice.
Not done: operators with sparse, quantised or nested tensors (refused).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.fidelity import run_faithfully, settle_arguments
from lowtide.capture.internals import FakeTensor, TorchDispatchMode, outside_modes, storage_key
from lowtide.capture.origins import Origins
from lowtide.capture.result import Returned
from lowtide.capture.trace import Call, Resident, Trace, Window
from lowtide.capture.twins import Twins, check_plain
from lowtide.errors import CaptureError
from lowtide.ir.aten import overload_name, tensors_of
from lowtide.ir.graph import Role, TensorMeta
from lowtide.ir.ops import Arg, Aten, Ref

__all__ = ["Recorder", "meta_of"]

_IGNORED = frozenset({"prim", "profiler"})
_LAZY = frozenset({"aten._conj.default", "aten._neg_view.default"})
_LITERALS = frozenset({"aten.lift_fresh.default", "aten.lift_fresh_copy.default"})
_IDENTITIES = frozenset({"aten.detach.default", "aten.detach_.default", "aten.alias.default"})
_PLAIN = (int, float, bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape, strides, dtype and device of a tensor."""
    device = tensor.device
    name = device.type if device.type == "cpu" else str(device)
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, name)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the Calls of one run.

    `guard(name)` is called before each operator runs.
    """

    def __init__(self, origins: Origins, twins: Twins, guard: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins = origins
        self.calls: list[Call] = []
        self.residents: list[Resident] = []
        self._twins = twins
        self._guard = guard
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._nbytes: list[int] = []
        self._known: dict[int, Tensor] = {}
        self._held: list[Tensor] = []

    # -- storages ---------------------------------------------------------------------------------------

    def window(self, tensor: Tensor) -> Window:
        """The window that a fake tensor is; new storages get the next number."""
        if tensor.layout != torch.strided:
            raise CaptureError(
                f"an operator makes a {tensor.layout} tensor",
                source=self.origins.source(),
                remedy="use the dense form (sparse=False in embeddings)",
            )
        if tensor.is_conj() or tensor.is_neg():
            raise self._lazy()
        key = storage_key(tensor)
        if key not in self._numbers:
            storage = tensor.untyped_storage()
            self._numbers[key] = len(self._nbytes)
            self._alive.append(storage)
            self._nbytes.append(int(storage.nbytes()))
        return Window(self._numbers[key], meta_of(tensor), int(tensor.storage_offset()))

    def _lazy(self) -> CaptureError:
        return CaptureError(
            "an operator makes a lazily conjugated or negated view, which is more than strided memory",
            source=self.origins.source(),
            remedy="compute with real and imaginary parts (gradients of complex products conjugate, too)",
        )

    def add_resident(self, names: tuple[str, ...], role: Role, tensor: Tensor, twin: Tensor) -> None:
        """Declare that `twin` stands for the user's `tensor`, which exists before the step."""
        self._known[id(tensor)] = twin
        self._held.append(tensor)
        self.residents.append(Resident(names, self.window(twin), role, tensor))

    def trace(
        self, results: Mapping[str, Window], returned: Returned, rebound: Mapping[str, Window]
    ) -> Trace:
        """Everything recorded so far."""
        return Trace(
            tuple(self.calls),
            tuple(self._nbytes),
            tuple(self.residents),
            dict(results),
            returned,
            dict(rebound),
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Calls inside belong to this phase of the step."""
        before, self.origins.phase = self.origins.phase, name
        try:
            yield
        finally:
            self.origins.phase = before

    # -- dispatch ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _IGNORED:
            return func(*args, **kwargs)
        name = overload_name(func)
        if name in _LITERALS and not self._is_twin(args[0]):
            return self._lift(func, args[0])
        if name in _LAZY:  # of a number, too, where the fake result does not show it
            raise self._lazy()
        inputs: list[Window] = []
        self._guard(name)
        args, kwargs = settle_arguments(name, self._replace(args)), self._replace(kwargs)
        op = Aten(name, self._encode(args, inputs), self._encode_kwargs(kwargs, inputs))
        result = run_faithfully(func, args, kwargs, self._twins.mode)
        outputs = tuple(self.window(tensor) for tensor in tensors_of(result))
        if name not in _IDENTITIES and (outputs or func._schema.is_mutable):
            self.calls.append(Call(op, tuple(inputs), outputs, self.origins.find()))
        return result

    def _lift(self, func: Any, literal: Tensor) -> Tensor:
        """``torch.tensor(...)`` in the program's text: a constant that is new in every step."""
        with outside_modes():
            kept = literal.clone()
        lifted: Tensor = func(literal)
        self.residents.append(Resident(self._constant_name(), self.window(lifted), Role.CONST, kept, True))
        return lifted

    def _constant_name(self) -> tuple[str, ...]:
        count = sum(resident.role is Role.CONST for resident in self.residents)
        return (f"const:{count}",)

    def _replace(self, tree: Any) -> Any:
        """`tree` with real tensors replaced by their twins."""
        if isinstance(tree, Tensor):
            return tree if self._is_twin(tree) else self._stand_in(tree)
        if isinstance(tree, list | tuple):
            return type(tree)(self._replace(item) for item in tree)
        if isinstance(tree, dict):
            return {name: self._replace(item) for name, item in tree.items()}
        return tree

    def _is_twin(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._twins.mode

    def returned_window(self, tensor: Tensor) -> Window:
        """The window of a tensor that the step returns, which no operator may have touched."""
        return self.window(tensor if self._is_twin(tensor) else self._stand_in(tensor))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """The twin of a tensor that the program found by itself: in a closure, an attribute, a global."""
        if id(tensor) not in self._known or tensor.requires_grad:
            self._check_constant(tensor)
            self.add_resident(self._constant_name(), Role.CONST, tensor, self._twins.of(tensor))
        return self._known[id(tensor)]

    def _check_constant(self, tensor: Tensor) -> None:
        with outside_modes():
            check_plain("a tensor that the model reads from outside", tensor)
            if tensor.requires_grad:
                what, remedy = "requires a gradient", "reach it as an attribute of the module that owns it"
            elif self._twins.shares_memory(tensor):
                what, remedy = "is a view of a parameter, buffer or argument", "make the view inside forward"
            else:
                return
        raise CaptureError(
            f"a tensor of shape {list(tensor.shape)} that the model reads from outside {what}",
            source=self.origins.source(),
            remedy=remedy,
        )

    def _encode(self, args: Any, inputs: list[Window]) -> tuple[Arg, ...]:
        return tuple(self._encode_one(arg, inputs) for arg in args)

    def _encode_kwargs(self, kwargs: dict[str, Any], inputs: list[Window]) -> tuple[tuple[str, Arg], ...]:
        return tuple(
            (name, self._encode_one(kwargs[name], inputs))
            for name in sorted(kwargs)
            if not (name == "generator" and kwargs[name] is None)
        )

    def _encode_one(self, arg: Any, inputs: list[Window]) -> Arg:
        if isinstance(arg, Tensor):
            window = self.window(arg)
            if window not in inputs:
                inputs.append(window)
            return Ref(inputs.index(window))
        if isinstance(arg, float) and math.isnan(arg):
            return math.nan  # the one object, so that equal calls compare equal
        if arg is None or isinstance(arg, _PLAIN):
            return arg
        if isinstance(arg, list | tuple):
            return self._encode(arg, inputs)
        if isinstance(arg, torch.Generator):
            raise CaptureError(
                "a random operator draws from its own torch.Generator",
                source=self.origins.source(),
                remedy="draw from the default generator inside the model",
            )
        raise CaptureError(
            f"an operator takes a {type(arg).__name__}, which no graph can hold",
            source=self.origins.source(),
            remedy="pass the model before it was quantised or packed, or keep the operator outside of it",
        )
