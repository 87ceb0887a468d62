"""From names to live tensors, and the comparison with what capture saw.

`Binding` holds facts (addresses, shapes, flags), no tensors of the model: the live ones are looked up anew
in the workload for each step.  Constants are the exception, as nothing names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.guards import Guards
from lowtide.capture.internals import FakeTensor, storage_key
from lowtide.capture.recorder import meta_of
from lowtide.capture.recording import modules_of, name_leaves
from lowtide.capture.trace import Trace
from lowtide.capture.twins import Named, module_slots, walk_modules
from lowtide.capture.update import Updates
from lowtide.errors import ShapeMismatch, Stale
from lowtide.ir.graph import Role, TensorMeta
from lowtide.workload import Workload

__all__ = ["Binding", "bind_trace"]


@dataclass(frozen=True)
class Seen:
    """What capture saw of a parameter or buffer."""

    meta: TensorMeta
    address: int
    requires_grad: bool

    def describes(self, tensor: Tensor) -> bool:
        """Whether nothing has changed (the fast way to the common answer)."""
        return (
            address_of(tensor) == self.address
            and tensor.shape == self.meta.shape
            and tensor.stride() == self.meta.stride
            and tensor.dtype == self.meta.dtype
            and tensor.requires_grad == self.requires_grad
        )


@dataclass(frozen=True, eq=False)
class Binding:
    """Facts about a workload at capture.

    `leaves` are the names and contents of arguments that are no tensors, `inputs` the metas of those that
    are.
    """

    names: Mapping[str, int]
    owned_names: Mapping[str, Seen]
    inputs: Mapping[str, TensorMeta]
    leaves: Mapping[str, Any]
    constants: Mapping[int, Tensor]
    training: Mapping[str, bool]
    groups: tuple[tuple[int, ...], ...]
    guards: Guards = field(default_factory=Guards)

    # -- the model --------------------------------------------------------------------------------------

    def check(self, workload: Workload, updates: Updates | None) -> dict[str, Tensor]:
        """The live parameters and buffers by name.

        Raises Stale, with the first difference, if model or optimizer are not what was captured.
        """
        found = owned_tensors(workload)
        for name, seen in self.owned_names.items():
            if name not in found:
                raise Stale(f"{name} no longer exists", remedy="capture again")
            if not seen.describes(found[name]):
                _compare(name, seen, found[name])
        extra = next((name for name in found if name not in self.owned_names), None)
        if extra is not None:
            raise Stale(f"{extra} is new since capture", remedy="capture again")
        for name, flag in training_flags(workload).items():
            if self.training.get(name) != flag:
                raise Stale(
                    f"module {name or 'model'} has training={flag}, captured with training={not flag}",
                    remedy=f"call .{'eval' if flag else 'train'}() or capture again",
                )
        if updates is not None:
            self._check_groups(updates)
        change = self.guards.first_change()
        if change is not None:
            raise Stale(f"{change} since capture", remedy="set it back, or capture again")
        return found

    def _check_groups(self, updates: Updates) -> None:
        groups = group_members(updates)
        if len(groups) != len(self.groups):
            raise Stale(
                f"the optimizer has {len(groups)} parameter groups, captured with {len(self.groups)}",
                remedy="capture again",
            )
        for number, (now, then) in enumerate(zip(groups, self.groups, strict=True)):
            if now != then:
                raise Stale(
                    f"parameter group {number} of the optimizer holds other parameters than at capture",
                    remedy="capture again",
                )

    def owned(self, found: Mapping[str, Tensor], updates: Updates | None) -> dict[int, Tensor]:
        """Value id -> live tensor for parameters, buffers (what `check` found), state and constants."""
        tensors = dict(self.constants)
        tensors.update({self.names[name]: tensor for name, tensor in found.items()})
        if updates is not None:
            tensors.update({self.names[name]: tensor for name, tensor in updates.state().items()})
        return tensors

    # -- the arguments ----------------------------------------------------------------------------------

    def arguments(self, args: Any, kwargs: Any, targets: Any) -> dict[int, Tensor]:
        """Value id -> tensor for arguments and targets.  Raises ShapeMismatch."""
        given = dict(name_leaves(args, kwargs, targets))
        expected = {**self.inputs, **self.leaves}
        for name in expected:
            if name not in given:
                raise ShapeMismatch(f"argument {name} is missing", remedy="call as captured")
        for name in given:
            if name not in expected:
                raise ShapeMismatch(f"argument {name} is new since capture", remedy="call as captured")
        for name, content in self.leaves.items():
            if type(given[name]) is not type(content) or given[name] != content:
                raise ShapeMismatch(
                    f"argument {name} is {given[name]!r}, captured with {content!r}",
                    remedy="numbers and strings are part of the plan: make one plan for each",
                )
        tensors: dict[int, Tensor] = {}
        for name, meta in self.inputs.items():
            found = _as_captured(name, meta, given[name])
            value = self.names[name]
            if value in tensors and tensors[value].data_ptr() != found.data_ptr():
                raise ShapeMismatch(
                    f"argument {name} was the same tensor as another argument at capture",
                    remedy="pass one tensor twice, as captured, or capture with two",
                )
            tensors[value] = found
        return tensors


def _compare(name: str, seen: Seen, tensor: Tensor) -> None:
    meta = meta_of(tensor)
    differences = (
        ("shape", seen.meta.shape, meta.shape),
        ("dtype", seen.meta.dtype, meta.dtype),
        ("device", seen.meta.device, meta.device),
        ("strides", seen.meta.stride, meta.stride),
        ("requires_grad", seen.requires_grad, tensor.requires_grad),
    )
    for what, then, now in differences:
        if then != now:
            raise Stale(f"{name} has {what} {now}, captured with {then}", remedy="capture again")
    if seen.address != address_of(tensor):
        raise Stale(f"{name} lies in other memory than at capture", remedy="capture again")


def _as_captured(name: str, meta: TensorMeta, given: Any) -> Tensor:
    """An argument, with the strides of capture where one is only called otherwise (axes of one element)."""
    if not isinstance(given, Tensor):
        raise ShapeMismatch(f"argument {name} is a {type(given).__name__}, captured as a tensor")
    if given.layout != torch.strided:
        raise ShapeMismatch(
            f"argument {name} is a {given.layout} tensor", remedy="pass it dense (.to_dense())"
        )
    now = meta_of(given)
    if now.shape != meta.shape:
        raise ShapeMismatch(
            f"argument {name} has shape {list(now.shape)}, the plan is for {list(meta.shape)}",
            remedy="make a plan for this shape (lt.PlanCache keeps several), or drop the last partial batch",
        )
    if now.dtype != meta.dtype or now.device != meta.device:
        raise ShapeMismatch(
            f"argument {name} is {now.dtype} on {now.device}, the plan is for {meta.dtype} on {meta.device}",
            remedy="convert it",
        )
    if now.stride != meta.stride:
        steps = zip(meta.shape, meta.stride, now.stride, strict=True)
        if all(size == 1 or then == step for size, then, step in steps):
            return given.as_strided(meta.shape, meta.stride)
        raise ShapeMismatch(
            f"argument {name} has strides {now.stride}, the plan is for {meta.stride}",
            remedy="copy it into that layout (.contiguous(), or memory_format=torch.channels_last)",
        )
    return given


def address_of(tensor: Tensor) -> int:
    """Where a tensor's memory is; its storage record's address if it has no memory."""
    return storage_key(tensor) if isinstance(tensor, FakeTensor) or tensor.is_meta else tensor.data_ptr()


def training_flags(workload: Workload) -> dict[str, bool]:
    """Training flag by module path, the loss's modules included."""
    return {path: module.training for path, module in walk_modules(modules_of(workload))}


def owned_tensors(workload: Workload) -> dict[str, Tensor]:
    """Live parameters and buffers by the first of their names (``param:enc.0.weight``)."""
    names: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    for slot in module_slots(modules_of(workload)):
        tensor = slot.table[slot.key]
        if tensor is not None and id(tensor) not in names:
            names[id(tensor)] = name = f"{slot.role.value}:{slot.path}"
            tensors[name] = tensor
    return tensors


def group_members(updates: Updates) -> tuple[tuple[int, ...], ...]:
    """The identities of the parameters in each of the optimizer's groups."""
    return tuple(tuple(id(p) for p in group["params"]) for group in updates.optimizer.param_groups)


def bind_trace(
    workload: Workload,
    trace: Trace,
    names: Mapping[str, int],
    leaves: Sequence[tuple[str, Any]],
    named: Sequence[Named],
    updates: Updates | None,
    guards: Guards,
) -> Binding:
    """The facts of a fresh capture."""
    return Binding(
        names=dict(names),
        owned_names={
            f"{n.role.value}:{n.names[0]}": Seen(
                meta_of(n.tensor), address_of(n.tensor), n.tensor.requires_grad
            )
            for n in named
        },
        inputs={name: meta_of(leaf) for name, leaf in leaves if isinstance(leaf, Tensor)},
        leaves={name: leaf for name, leaf in leaves if not isinstance(leaf, Tensor)},
        constants={
            names[resident.names[0]]: resident.tensor
            for resident in trace.residents
            if resident.role is Role.CONST and resident.names[0] in names
        },
        training=training_flags(workload),
        groups=group_members(updates) if updates is not None else (),
        guards=guards,
    )
