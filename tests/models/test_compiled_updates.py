"""Compiled optimizer updates are bit-equal to the user's optimizer, in a plan, over several steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowtide.capture import capture
from lowtide.fusion.kernels import kernels_for
from lowtide.run.plan import build_plan
from lowtide.workload import Workload

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_a_changed_rate(name: str) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8))
    theirs = copy.deepcopy(ours)
    mine, eager = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    x, y = torch.randn(4, 256), torch.randint(8, (4,))
    loss = nn.CrossEntropyLoss()
    program = capture(Workload(ours, args=(x,), targets=(y,), loss=loss, optimizer=mine))
    plan = build_plan(program)
    kernels = kernels_for(program.graph)
    assert kernels
    plan.use_kernels(kernels)
    before = plan.step_count
    plan.use_kernels({})
    assert before < plan.step_count  # the large parameters' updates were one step each
    plan.use_kernels(kernels)
    for step in range(4):
        for optimizer in (mine, eager):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        plan.step(x, y)
        loss(theirs(x), y).backward()
        eager.step()
        eager.zero_grad(set_to_none=True)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
