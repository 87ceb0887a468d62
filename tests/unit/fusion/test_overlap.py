"""Results that take the place of an operand: allowed where the kernel reads it no more, and then right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.analysis.key import graph_key
from lowtide.capture import capture
from lowtide.fusion.codegen.lower import lower
from lowtide.fusion.codegen.overlap import overlaps
from lowtide.fusion.kernels import Foundry
from lowtide.ir.aten import call
from lowtide.ir.extract import extract
from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten
from lowtide.run.kernels import KernelCall
from lowtide.workload import Workload

ROWS, COLS = 37, 130


class Case(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(*inputs)


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepared(function: Callable[..., object], *inputs: Tensor) -> tuple[Graph, list[Tensor]]:
    """All of a function as one body, and copies of its operands."""
    program = capture(Workload(Case(function), inputs))  # type: ignore[arg-type]
    graph, values = program.graph, dict(program.bind(inputs))
    for node in graph.nodes:
        if graph.is_view(node) and isinstance(node.op, Aten) and all(v in values for v in node.inputs):
            values[node.outputs[0]] = call(node.op, [values[value] for value in node.inputs])
    body = extract(graph, [node.id for node in graph.nodes if not graph.is_view(node)]).body
    return body, [values[value].clone() for value in body.inputs]


def run(kernel: KernelCall, tensors: Sequence[Tensor]) -> None:
    addresses = (ctypes.c_void_p * len(tensors))(*[each.data_ptr() for each in tensors])
    scratch = torch.empty(kernel.scratch_bytes + 64, dtype=torch.uint8)
    kernel.bind(addresses, (ctypes.c_double * 1)(), (scratch.data_ptr() + 63) // 64 * 64)()


X, Y, TARGET = tensor(0, ROWS, COLS), tensor(1, ROWS, COLS), torch.arange(ROWS) % COLS
SAFE = {
    "softmax": (lambda x: torch.softmax(x * 2, -1), (X,)),
    "norm": (lambda x, y: functional.layer_norm(x + y, (COLS,)), (X, Y)),
    "over rows": (lambda x: torch.log_softmax(x, 0) * 2, (X,)),
    "two results of one pass": (lambda x, y: (x * y, x + y), (X, Y)),
    "picked before": (lambda x, t: (torch.softmax(x, -1), x.gather(1, t[:, None])), (X, TARGET)),
    "column sums along": (lambda x, y: (x.sum(-1, keepdim=True) + y, (x * y).sum(0)), (X, Y)),
    "summed before": (lambda x: x / x.sum(), (X,)),
    "sums of columns beside what columns are shifted by": (
        lambda x, m: (x - x.sum(0) - m, x.sum(0) * 3),
        (X, tensor(3, COLS)),
    ),
    "sums of rows beside what rows are shifted by": (
        lambda x, m: (x - x.sum(1, keepdim=True) - m, x.sum(1, keepdim=True) * 3),
        (X, tensor(3, ROWS, 1)),
    ),
}
UNSAFE = {
    "transposed": (lambda x: (y := x * 3) + y.t(), (tensor(2, COLS, COLS),)),
    "picked in the same pass": (lambda x, t: x - x.gather(1, t[:, None]), (X, TARGET)),
    "read again by a later pass": (lambda x: (x * 2, x - x.sum(-1, keepdim=True)), (X,)),
    "read by a later stage": (lambda x: (x * 2, x / x.sum()), (X,)),
    "picked after": (lambda x, t: (x * 2, x.gather(1, t[:, None]) - x.sum(-1, keepdim=True)), (X, TARGET)),
    "shifted": (lambda x: x[:, 1:] + x[:, :-1], (X,)),
}


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("threads", [1, 3])
def test_results_in_place_of_operands(name: str, threads: int) -> None:
    function, inputs = SAFE[name]
    body, operands = prepared(function, *inputs)
    foundry = Foundry(threads)
    foundry.make([body])
    kernel = foundry.made[graph_key(body)]
    pairs = overlaps(lower(body))
    assert pairs and kernel is not None and kernel.inplace == pairs
    expected = function(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for output, source in pairs:
        given = [each.clone() for each in operands]
        results = [torch.full_like(each, float("nan")) for each in expected]
        results[output] = given[source]
        run(kernel, [*given, *results])
        for mine, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNSAFE)
def test_operands_that_are_read_later_or_elsewhere(name: str) -> None:
    function, inputs = UNSAFE[name]
    body, _ = prepared(function, *inputs)
    read_twice = {source for output, source in overlaps(lower(body)) if output == 0}
    assert 0 not in read_twice
