"""The frozen graph: nodes, values, and the storages that values view.

Problem.  Memory is held by storages, not by tensors: a view costs nothing, and a tensor that looks
small may keep a large storage alive.  Order is constrained by data *and* by writes: an optimizer
update must come after every reader of the old weight.

Method.  A Value is a strided window (meta, offset) on a Storage; a view is simply a Value that shares
a Storage with an input of its node.  `Graph.nodes` is a valid program order and gives writes their
meaning: a reader sees the last write that precedes it there.  `Graph.dependencies` is the partial
order that every other schedule has to respect (data edges and the three hazards per storage).

Invariants are numbered in `lowtide.ir.verify`.  Schedules, placements, costs and measurements are
values beside the graph, never fields of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType

import torch

from lowtide.ir.ops import Op

__all__ = ["Graph", "Node", "Origin", "Role", "Storage", "TensorMeta", "Value"]


class Role(Enum):
    """Who owns a storage."""

    PARAM = "param"
    BUFFER = "buffer"
    STATE = "state"
    INPUT = "input"
    CONST = "const"
    GRAD = "grad"
    TEMP = "temp"
    OUTPUT = "output"
    HOST = "host"  # a Python number, no bytes

    @property
    def resident(self) -> bool:
        """Whether the storage exists before and after the step, owned by the caller."""
        return self in _RESIDENT


_RESIDENT = frozenset({Role.PARAM, Role.BUFFER, Role.STATE, Role.INPUT, Role.CONST})


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and strides in elements, element type, device type (``cpu``, ``cuda:0``)."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to one past the last element that the strides reach."""
        if self.numel == 0:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the strides are row-major without gaps."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of bytes that Values view."""

    id: int
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True)
class Value:
    """A strided window on a storage; `offset` is in elements of `meta.dtype`."""

    id: int
    meta: TensorMeta
    storage: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from in the user's program, for reports and errors.

    `module` is the dotted module path, `source` is ``file.py:line``, `phase` one of
    forward, loss, backward, clip, update; backward nodes carry the module of their forward.
    """

    module: str = ""
    source: str = ""
    phase: str = "forward"


@dataclass(frozen=True, slots=True)
class Node:
    """An operation on values.

    `writes` lists the inputs whose storage the node overwrites in place; a node that only writes has
    no outputs.
    """

    id: int
    op: Op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()
    origin: Origin = field(default_factory=Origin)


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in a valid program order, with the values and storages that they mention.

    Equality and hash are by content (`lowtide.analysis.key` gives the cheaper, id-independent key).
    """

    nodes: tuple[Node, ...]
    values: Mapping[int, Value]
    storages: Mapping[int, Storage]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        object.__setattr__(self, "storages", MappingProxyType(dict(self.storages)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return (
            self.nodes == other.nodes
            and self.inputs == other.inputs
            and self.outputs == other.outputs
            and dict(self.values) == dict(other.values)
            and dict(self.storages) == dict(other.storages)
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.nodes, self.inputs, self.outputs))

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    @cached_property
    def node(self) -> Mapping[int, Node]:
        """Node by id."""
        return MappingProxyType({node.id: node for node in self.nodes})

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """Value id -> id of the node that produces it; graph inputs are absent."""
        return MappingProxyType({out: node.id for node in self.nodes for out in node.outputs})

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Value id -> ids of the nodes that take it as an input, in program order, once each."""
        found: dict[int, list[int]] = {value: [] for value in self.values}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found[value].append(node.id)
        return MappingProxyType({value: tuple(nodes) for value, nodes in found.items()})

    @cached_property
    def views_of(self) -> Mapping[int, tuple[int, ...]]:
        """Storage id -> ids of the values on it."""
        found: dict[int, list[int]] = {storage: [] for storage in self.storages}
        for value in self.values.values():
            found[value.storage].append(value.id)
        return MappingProxyType({storage: tuple(values) for storage, values in found.items()})

    @cached_property
    def written(self) -> frozenset[int]:
        """Ids of the storages that some node overwrites."""
        return frozenset(self.values[value].storage for node in self.nodes for value in node.writes)

    def storage_of(self, value: int) -> Storage:
        """The storage that a value views."""
        return self.storages[self.values[value].storage]

    def is_view(self, node: Node) -> bool:
        """Whether a node only makes new windows on its inputs' storages (no bytes, no work)."""
        if node.writes or not node.outputs:
            return False
        ours = {self.values[value].storage for value in node.inputs}
        return all(self.values[out].storage in ours for out in node.outputs)

    @cached_property
    def dependencies(self) -> Mapping[int, tuple[int, ...]]:
        """Node id -> ids of the nodes that must run before it.

        Data edges, and per storage: read after write, write after read, write after write, as the
        program order in `nodes` defines them.
        """
        last_write: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        result: dict[int, tuple[int, ...]] = {}
        for node in self.nodes:
            before: dict[int, None] = {}
            written = {self.values[value].storage for value in node.writes}
            for value in node.inputs:
                if value in self.producer:
                    before[self.producer[value]] = None
                storage = self.values[value].storage
                if storage in last_write:
                    before[last_write[storage]] = None
            for storage in written:
                before.update(dict.fromkeys(readers.get(storage, ())))
            before.pop(node.id, None)
            result[node.id] = tuple(before)
            for value in node.inputs:
                readers.setdefault(self.values[value].storage, []).append(node.id)
            for out in node.outputs:
                readers.setdefault(self.values[out].storage, []).append(node.id)
            for storage in written:
                last_write[storage] = node.id
                readers[storage] = [node.id]
        return MappingProxyType(result)

    @cached_property
    def dependents(self) -> Mapping[int, tuple[int, ...]]:
        """Node id -> ids of the nodes that must run after it (the inverse of `dependencies`)."""
        found: dict[int, list[int]] = {node.id: [] for node in self.nodes}
        for node, before in self.dependencies.items():
            for earlier in before:
                found[earlier].append(node)
        return MappingProxyType({node: tuple(after) for node, after in found.items()})

    @cached_property
    def memo(self) -> dict[object, object]:
        """What analyses have derived from this graph alone, by the analysis that did; dies with the graph.

        For indices that do not depend on an order, and only for those: nothing here is a fact of
        the program.
        """
        return {}

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the storages that the caller owns: weights, buffers, state, arguments."""
        return sum(storage.nbytes for storage in self.storages.values() if storage.role.resident)
