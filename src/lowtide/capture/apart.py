"""Tensors of a call that share memory where those of the capture did not.

Problem.  A model that writes into one argument changes another that views the same memory; a graph that was
captured with two separate ones does not know, and may read before the write or after it.

Method.  Of two tensors that overlap now, neither may be on a storage that the graph writes, unless capture
saw them on one storage.  Weights are written by every training step.

Not done here: shapes and element types (`binding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from lowtide.capture.internals import FakeTensor
from lowtide.errors import ShapeMismatch
from lowtide.ir.graph import Graph

__all__ = ["check_apart"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a resident input lies: its storage in the graph, and its addresses."""

    value: int
    home: int
    start: int
    stop: int


def check_apart(
    graph: Graph, names: Mapping[str, int], owned: Mapping[str, Tensor], given: Mapping[int, Tensor]
) -> None:
    """Raises ShapeMismatch if an argument overlaps what it did not at capture, and one of both is written."""
    written = graph.written
    if not written or any(isinstance(tensor, FakeTensor) for tensor in given.values()):
        return
    arguments = list(_places(graph, given))
    others = list(_places(graph, {names[name]: tensor for name, tensor in owned.items()}))
    for position, one in enumerate(arguments):
        for other in (*arguments[:position], *others):
            changed = one.home in written or other.home in written
            if changed and one.home != other.home and one.start < other.stop and other.start < one.stop:
                called = {value: name for name, value in names.items()}
                raise ShapeMismatch(
                    f"argument {called[one.value]} shares memory with {called[other.value]}, which it did "
                    "not at capture, and the step writes there",
                    remedy="pass a copy (.clone())",
                )


def _places(graph: Graph, tensors: Mapping[int, Tensor]) -> Iterator[_Place]:
    for value, tensor in tensors.items():
        if value in graph.values and not tensor.is_meta:
            start = tensor.data_ptr()
            span_bytes = graph.values[value].meta.span_bytes
            if start and span_bytes:
                yield _Place(value, graph.values[value].storage, start, start + span_bytes)
