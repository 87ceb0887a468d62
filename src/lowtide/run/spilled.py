"""The reference executor for steps that do not fit: what is large waits in files.

Problem.  A plan is wanted most where eager cannot run, and there it has to be verified too.

Method.  As `lowtide.run.eager`, one operator after the other in program order, but a storage above
`SMALL_BYTES` is written to a file when it has been made, and read again for each operator that needs it.  So
memory holds the operands and results of one operator at a time.  A view is no work: it is a window on what
was read.

Invariants.  Equal bits to `run_graph`: the same operators on operands of the same layout.  Files lie in the
given directory and go with their last reader.

Not done.  Speed; files on other disks than the temporary directory's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.ir.graph import Graph, Node, Value
from lowtide.run.eager import Tap, last_uses, run_node
from lowtide.run.operands import window

__all__ = ["SMALL_BYTES", "run_spilled"]

SMALL_BYTES = 1 << 20


class _Storages:
    """Storages of a running graph: the caller's and small ones in memory, large ones in files."""

    def __init__(self, graph: Graph, inputs: Mapping[int, Any], directory: Path, small_bytes: int) -> None:
        self._graph = graph
        self._inputs = inputs
        self._owners = {graph.values[value].storage: value for value in graph.inputs}
        self._directory = directory
        self._small_bytes = small_bytes
        self._held: dict[int, torch.UntypedStorage] = {}

    def put(self, value: Value, tensor: Tensor) -> None:
        """Keep the storage under `value`, a fresh result."""
        whole = self._whole(value, tensor)
        if whole.nbytes() <= self._small_bytes:
            self._held[value.storage] = whole
        else:
            _bytes_in(whole).tofile(self._file(value.storage))

    def operands(self, values: Sequence[int]) -> dict[int, Any]:
        """The tensors of these values; a storage that several of them view is read once."""
        read: dict[int, torch.UntypedStorage] = {}
        return {value: self._operand(value, read) for value in values}

    def _operand(self, value: int, read: dict[int, torch.UntypedStorage]) -> Any:
        if value in self._inputs:
            return self._inputs[value]
        described = self._graph.values[value]
        if described.storage in self._owners:
            owner = self._owners[described.storage]
            whole = self._inputs[owner]
            shift = whole.storage_offset() * whole.dtype.itemsize - _start(self._graph.values[owner])
            return window(whole.untyped_storage(), _start(described) + shift, described.meta)
        if described.storage not in read:
            read[described.storage] = self._get(described.storage)
        return window(read[described.storage], _start(described), described.meta)

    def _get(self, storage: int) -> torch.UntypedStorage:
        held = self._held.get(storage)
        if held is not None:
            return held
        file = self._file(storage)
        whole = torch.empty(
            file.stat().st_size, dtype=torch.uint8
        )  # aligned as results are: sums depend on it
        with file.open("rb") as stream:
            read = stream.readinto(whole.numpy().data)
        if read != whole.numel():
            raise OSError(f"{file} holds {whole.numel()} bytes, {read} could be read")
        return whole.untyped_storage()

    def drop(self, storage: int) -> None:
        """The storage has had its last reader."""
        if self._held.pop(storage, None) is None:
            self._file(storage).unlink(missing_ok=True)

    def _whole(self, value: Value, tensor: Tensor) -> torch.UntypedStorage:
        """The storage as the graph describes it; only a result with another layout is copied."""
        meta, nbytes = value.meta, self._graph.storages[value.storage].nbytes
        given = tensor.untyped_storage()
        starts = tensor.storage_offset() == value.offset
        if starts and tensor.stride() == meta.stride and given.nbytes() >= nbytes:
            return given
        whole = torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()
        window(whole, _start(value), meta).copy_(tensor)
        return whole

    def _file(self, storage: int) -> Path:
        return self._directory / f"storage-{storage}.bin"


def _start(value: Value) -> int:
    """Byte offset of a value in its storage."""
    return value.offset * value.meta.dtype.itemsize


def _bytes_in(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def run_spilled(
    graph: Graph,
    inputs: Mapping[int, Any],
    directory: Path,
    tap: Tap | None = None,
    small_bytes: int = SMALL_BYTES,
) -> dict[int, Tensor]:
    """Run all nodes of `graph` in program order; the outputs by value id, in memory.

    `inputs` as for `run_graph`.  `tap` is called before each node but views, with its operands by value id.
    `directory` has to hold what lives across operators; an OSError names the file that could not be written.
    """
    kept = _Storages(graph, inputs, directory, small_bytes)
    dies = last_uses(graph, [node.id for node in graph.nodes])
    with torch.no_grad():
        for step, node in enumerate(graph.nodes):
            if not graph.is_view(node):
                _run_one(graph, node, kept, tap)
            for storage in dies.get(step, ()):
                kept.drop(storage)
        return kept.operands(graph.outputs)


def _run_one(graph: Graph, node: Node, kept: _Storages, tap: Tap | None) -> None:
    operands = kept.operands(node.inputs)
    if tap is not None:
        tap(node, operands)
    fresh: Sequence[Tensor] = run_node(node, operands)
    for value, tensor in zip(node.outputs, fresh, strict=True):
        if not _known(graph, value, node):
            kept.put(graph.values[value], tensor)


def _known(graph: Graph, value: int, node: Node) -> bool:
    """Whether a result lies on an operand's storage."""
    storage = graph.values[value].storage
    return any(graph.values[each].storage == storage for each in node.inputs)
