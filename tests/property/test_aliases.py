"""Random programs of views and in-place writes: the functional graph gives eager's bits.

A program works on a pool of tensors that starts with an argument and a fresh tensor.  Each step either adds
a view (or copy) of one of them, or writes into one of them; at the end all are returned, so that every alias
is looked at after every write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.capture.interpreter import laid_out, run_graph
from torch import Tensor, nn

from lowtide.capture.assemble import assemble
from lowtide.capture.inference import record_inference
from lowtide.capture.recorder import meta_of
from lowtide.ir.verify import verify
from lowtide.workload import Workload

Step = tuple[str, int, int, int]

VIEWS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "transpose": lambda t, a, b: t.transpose(a % t.dim(), b % t.dim()) if t.dim() else t,
    "select": lambda t, a, b: t.select(a % t.dim(), b % t.shape[a % t.dim()]) if t.dim() else t,
    "narrow": lambda t, a, b: t.narrow(a % t.dim(), 0, 1 + b % t.shape[a % t.dim()]) if t.dim() else t,
    "strided": lambda t, a, b: t[a % 2 :: 2] if t.dim() and t.shape[0] > 1 else t,
    "flat": lambda t, a, b: t.reshape(-1),
    "unsqueeze": lambda t, a, b: t.unsqueeze(a % (t.dim() + 1)) if t.dim() < 4 else t,
    "half": lambda t, a, b: t.chunk(2, a % t.dim())[b % len(t.chunk(2, a % t.dim()))] if t.dim() else t,
    "diagonal": lambda t, a, b: t.diagonal() if t.dim() >= 2 else t,
    "expand": lambda t, a, b: t.unsqueeze(0).expand(2, *t.shape)[1],
    "copy": lambda t, a, b: t.clone(),
    "detach": lambda t, a, b: t.detach(),
    "computed": lambda t, a, b: t * 0.5 + a,
}

WRITES: dict[str, Callable[[Tensor, Tensor, int], Any]] = {
    "add": lambda t, other, a: t.add_(a + 1),
    "mul": lambda t, other, a: t.mul_(0.5),
    "fill": lambda t, other, a: t.fill_(a),
    "zero": lambda t, other, a: t.zero_(),
    "assign": lambda t, other, a: t.copy_(other.reshape(-1)[0]),
    "assign row": lambda t, other, a: t.copy_(other.sum(0)) if broadcasts(other.sum(0), t) else t,
    "relu": lambda t, other, a: t.sub_(1).relu_(),
    "masked": lambda t, other, a: t.masked_fill_(t > 1, -1.0),
    "indexed": lambda t, other, a: t.index_fill_(0, torch.zeros(1, dtype=torch.long), 3.0) if t.dim() else t,
    "out": lambda t, other, a: torch.mul(t, 2, out=t),
    "slice": lambda t, other, a: t.__setitem__(slice(0, 1), 2.0) if t.dim() else t,
    "metadata": lambda t, other, a: t.unsqueeze_(0).squeeze_(0),
    "with itself": lambda t, other, a: t.add_(t.flatten()[0].clone()),
}


def broadcasts(source: Tensor, target: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(source.shape, target.shape) == target.shape
    except RuntimeError:
        return False


class Program(nn.Module):
    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> list[Tensor]:
        pool = [x, x * 2, torch.zeros(3, 4)]
        for name, which, a, b in self.steps:
            tensor, other = pool[which % len(pool)], pool[a % len(pool)]
            if name in VIEWS:
                pool.append(VIEWS[name](tensor, a, b))
            elif not torch._debug_has_internal_overlap(tensor):
                WRITES[name](tensor, other.clone(), a)
        return pool


steps = st.lists(
    st.tuples(st.sampled_from([*VIEWS, *WRITES]), st.integers(0, 20), st.integers(0, 3), st.integers(0, 3)),
    max_size=14,
)
layouts = st.sampled_from(["contiguous", "transposed", "sliced"])


def argument(layout: str) -> Tensor:
    torch.manual_seed(0)
    if layout == "transposed":
        return torch.randn(4, 3).t()
    return torch.randn(3, 8)[:, ::2] if layout == "sliced" else torch.randn(3, 4)


@settings(max_examples=120, deadline=None)
@given(steps=steps, layout=layouts)
def test_every_alias_sees_every_write(steps: list[Step], layout: str) -> None:
    model = Program(steps)
    trace = record_inference(Workload(model, (argument(layout),)))
    built = assemble(trace, None)
    verify(built.graph)
    ours, theirs = argument(layout), argument(layout)
    tensors = {
        built.names[name]: r.tensor for r in trace.residents for name in r.names if name in built.names
    }
    tensors[built.names["arg:0"]] = ours
    run_graph(built.graph, tensors)
    expected = model(theirs)
    assert torch.equal(ours, theirs)
    for position, tensor in enumerate(expected):
        found = tensors[built.results[f"out:{position}"]]
        assert torch.equal(found, tensor), position
        assert laid_out(meta_of(found)) == laid_out(meta_of(tensor))
