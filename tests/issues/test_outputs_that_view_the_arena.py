"""Outputs that are views of intermediates, of inputs, of each other, from a plan (pytorch PR#187678).

They share memory as eager's do, none of it with the plan, and the next call does not change them.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.issues.ladder import build, climb, rungs
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.run.plan import build_plan
from lowtide.workload import Workload


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        y = self.layer(x)
        early = y[1]
        y[0] = 7.0
        z = y.exp()
        self.seen.copy_(x[0])
        parts = z.split(2)
        return (
            early, y, y.t(), y.t()[2:], x.view(-1), x, self.layer.weight.t(), self.seen, self.seen[:2],
            parts, z[:, ::2], z.expand(2, *z.shape), torch.view_as_complex(y.view(-1, 2, 2)), z.detach(), y,
            z.sum(), {"same": z, "none": None},
        )  # fmt: skip


def storages(result: Any) -> list[int]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, Tensor)]


def sharing(result: Any) -> list[list[int]]:
    found = storages(result)
    return [[i for i, other in enumerate(found) if other == one] for one in found]


def test_every_rung() -> None:
    torch.manual_seed(0)
    climb(Workload(Views().double(), (torch.randn(6, 4).double(),)))


def test_sharing_is_eagers() -> None:
    torch.manual_seed(0)
    model, x = Views(), torch.randn(6, 4)
    program = capture(Workload(model, (x,)))
    with torch.no_grad():
        theirs = model(x)
    for rung in rungs(program):
        ours = build(program, rung)(x)
        assert sharing(ours) == sharing(theirs), rung.name
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, Tensor):
                assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
        assert storages(ours)[5:8] == [t.data_ptr() for t in (x, model.layer.weight, model.seen)]


def test_results_stay_what_they_were() -> None:
    """A later call with other arguments, and the end of the plan, change nothing handed out before."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Unflatten(1, (2, 2))), torch.randn(6, 4)
    program = capture(Workload(model, (x,)))
    for rung in rungs(program):
        plan = build(program, rung)
        first = plan(x)
        copied = first.clone()
        first_again = plan(x + 1)
        assert torch.equal(first, copied) and not torch.equal(first_again, copied), rung.name
        plan.release()
        del plan
        noise = [torch.rand(4096) for _ in range(8)]
        assert torch.equal(first, copied) and noise


def test_a_result_may_be_changed_and_trained_on() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    plan = build_plan(capture(Workload(model, (x,))), poison=True)
    result = plan(x)
    assert not result.is_inference() and not result.requires_grad
    result.add_(1.0)
    weight = torch.ones(4, requires_grad=True)
    (result @ weight).sum().backward()
    assert torch.equal(weight.grad, result.sum(0))
    assert torch.equal(plan(x), model(x).detach())


def test_an_argument_elsewhere_in_its_memory() -> None:
    """The captured argument was alone in its memory, later ones are slices; the model reads its windows."""

    class Windows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.as_strided((3, 2), (4, 1)) + x.as_strided((3, 2), (4, 1), x.storage_offset() + 2)
            z = x.clone()
            z.t().reshape(-1)
            z.as_strided((2, 3), (4, 1)).mul_(2.0)
            z.t()[1:3].add_(1.0)
            return y + z.unfold(1, 2, 2).sum((1, 2))[:3, None]

    torch.manual_seed(0)
    model, x = Windows(), torch.randn(4, 4)
    program = capture(Workload(model, (x,)))
    moved = torch.randn(9, 4)[3:7]
    for rung in rungs(program, ()):
        plan = build(program, rung)
        assert torch.equal(plan(x), model(x))
        assert torch.equal(plan(moved), model(moved)), rung.name
