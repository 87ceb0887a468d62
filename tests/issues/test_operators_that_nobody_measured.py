"""Wrong numbers from facts that nobody measured.

Two faults in one: an operator was served from the arena by requests that were only guessed, so that a
temporary as large as its result could lie over an input that was still read; and the workspace of an update
was the sum of what its body holds, without the padding between, so that it reached into its neighbour.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.issues.ladder import assert_traces, eager_trace, plan_trace
from torch import Tensor, nn

from lowtide.analysis.facts import OperatorFacts
from lowtide.capture import capture
from lowtide.ir.ops import Aten
from lowtide.run.plan import build_plan
from lowtide.run.probe import FactsTree, probe_tree, variant_of
from lowtide.workload import Workload


class Dying(nn.Module):
    """Every result may lie where its input dies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).softmax(-1).masked_fill(x[:, :5] > 0.5, 0.25)
        return torch.linalg.solve(y @ y.T + 9 * torch.eye(len(x)), y).cumsum(0).sigmoid()


def step() -> Workload:
    torch.manual_seed(0)
    model = Dying()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Workload(model, (torch.rand(6, 7),), loss=torch.mean, optimizer=optimizer)


def without_workspace(tree: FactsTree) -> FactsTree:
    """The facts of updates forget what their bodies need."""
    bodies = {path[0] for path in tree if path}
    nodes = {
        node: replace(facts, transient_bytes=sum(facts.output_bytes)) if node in bodies else facts
        for node, facts in tree[()].items()
    }
    return {**tree, (): nodes}


def test_bodies_that_need_more_than_their_node_has_are_refused() -> None:
    workload = step()
    program = capture(workload)
    tree = without_workspace(probe_tree(program.graph, "assumed"))
    plan = build_plan(program, facts=tree)
    with pytest.raises(ValueError, match=r"bytes of workspace, its body needs \d+: .*probe them together"):
        plan_trace(plan, workload, 1)


def test_requests_that_were_guessed_are_not_served() -> None:
    workload = step()
    program, eager = capture(workload), eager_trace(workload, 2)
    plan = build_plan(program, facts=probe_tree(program.graph, "assumed"), poison=True)
    assert_traces(plan_trace(plan, workload, 2), eager, 0.0, "assumed")
    kinds = {
        variant_of(node.op, plan.facts[node.id])
        for node in plan.graph
        if isinstance(node.op, Aten) and plan.facts[node.id] != OperatorFacts((0,), 0)
    }
    assert kinds == {"copied"}
