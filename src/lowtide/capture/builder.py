"""Collects nodes, values and storages while a graph is being made.

Invariants.  Ids count up from zero.  A node never lists an input twice.  A fake re-run of each node that
capture itself invents gives the shapes and strides of its results; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.fidelity import run_faithfully
from lowtide.capture.internals import FakeTensorMode, outside_modes
from lowtide.capture.recorder import meta_of
from lowtide.ir.aten import bound, renumber, resolve, tensors_of
from lowtide.ir.graph import Graph, Node, Origin, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Aten, Op

__all__ = ["Builder"]


class Builder:
    """A graph under construction."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.storages: dict[int, Storage] = {}
        self.inputs: list[int] = []
        self._mode = FakeTensorMode()

    def storage(self, nbytes: int, role: Role) -> int:
        """A new storage's id."""
        identity = len(self.storages)
        self.storages[identity] = Storage(identity, nbytes, role)
        return identity

    def value(self, meta: TensorMeta, storage: int, offset: int = 0) -> int:
        """A new value's id."""
        identity = len(self.values)
        self.values[identity] = Value(identity, meta, storage, offset)
        return identity

    def input(self, meta: TensorMeta, storage: int, offset: int = 0) -> int:
        """A new value that the graph does not produce."""
        identity = self.value(meta, storage, offset)
        self.inputs.append(identity)
        return identity

    def node(
        self,
        op: Op,
        inputs: Sequence[int],
        outputs: Sequence[int],
        writes: Sequence[int] = (),
        origin: Origin | None = None,
    ) -> None:
        """Append a node; equal inputs are merged."""
        unique = tuple(dict.fromkeys(inputs))
        if isinstance(op, Aten) and len(unique) < len(inputs):
            op = renumber(op, [unique.index(value) for value in inputs])
        self.nodes.append(
            Node(len(self.nodes), op, unique, tuple(outputs), tuple(writes), origin or Origin())
        )

    def compute(self, op: Aten, inputs: Sequence[int], origin: Origin | None = None) -> tuple[int, ...]:
        """Append a node that makes fresh results; their metas come from a fake run."""
        results = self.predict(op, inputs)
        outputs = tuple(self._fresh(tensor) for tensor in results)
        self.node(op, inputs, outputs, origin=origin)
        return outputs

    def _fresh(self, tensor: Tensor) -> int:
        storage = self.storage(int(tensor.untyped_storage().nbytes()), Role.TEMP)
        return self.value(meta_of(tensor), storage)

    def view(self, op: Aten, value: int, origin: Origin) -> int:
        """Append an operator that makes a view of `value` at the same offset."""
        base = self.values[value]
        result = self.value(self.predict_chain((op,), value), base.storage, base.offset)
        self.node(op, (value,), (result,), origin=origin)
        return result

    def predict(self, op: Aten, inputs: Sequence[int]) -> tuple[Tensor, ...]:
        """The fake results of an operator on values of the graph."""
        with outside_modes(), torch.no_grad(), self._mode:
            return self._run(op, [self._fake(value) for value in inputs])

    def predict_chain(self, ops: Sequence[Aten], value: int) -> TensorMeta:
        """The meta after operators that take one tensor each."""
        with outside_modes(), torch.no_grad(), self._mode:
            tensor = self._fake(value)
            for op in ops:
                (tensor,) = self._run(op, [tensor])
            return meta_of(tensor)

    def _run(self, op: Aten, operands: Sequence[Any]) -> tuple[Tensor, ...]:
        args, kwargs = bound(op, operands)
        return tensors_of(run_faithfully(resolve(op.overload), args, kwargs, self._mode))

    def _fake(self, value: int) -> Any:
        meta = self.values[value].meta
        if meta.device == "host":
            return 1.0
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)

    def storage_of(self, value: int) -> Storage:
        """The storage that a value views."""
        return self.storages[self.values[value].storage]

    def change_role(self, storage: int, role: Role) -> None:
        """Give a storage that is not resident another role."""
        self.storages[storage] = replace(self.storages[storage], role=role)

    def graph(self, outputs: Sequence[int]) -> Graph:
        """The finished graph."""
        return Graph(tuple(self.nodes), self.values, self.storages, tuple(self.inputs), tuple(outputs))
