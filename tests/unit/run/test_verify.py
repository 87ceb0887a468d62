"""The judge of plans: what is equal, what is not, and that nothing is changed by judging."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.capture import Program, capture
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten, Fused, Ref
from lowtide.run.plan import build_plan
from lowtide.run.verify import relative_error, verify
from lowtide.workload import Workload


def test_relative_error_is_relative_to_eager_or_the_floor() -> None:
    b = torch.tensor([2.0, -4.0])
    assert relative_error(b + 0.4, b) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1e-9]), torch.tensor([0.0]), floor=1e-3) == pytest.approx(1e-6)
    assert relative_error(torch.tensor([1e-9]), torch.tensor([0.0])) == math.inf
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_relative_error_of_what_is_not_finite() -> None:
    nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])
    assert relative_error(nan, nan.clone()) == 0.0
    assert relative_error(nan, one) == relative_error(one, nan) == math.inf
    assert relative_error(torch.tensor([math.inf]), torch.tensor([-math.inf])) == math.inf


def workload(training: bool = True) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if not training:
        return Workload(model.eval(), args=(torch.rand(5, 6),))
    return Workload(
        model,
        args=(torch.rand(5, 6),),
        targets=(torch.randint(0, 3, (5,)),),
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


class Clamps(nn.Linear):
    """Changes its weight in the forward; a buffer is its bias's own memory."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("seen", self.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("eager_fits", [True, False])
def test_weights_that_the_forward_changes_are_changed_before_the_update(eager_fits: bool) -> None:
    torch.manual_seed(0)
    model = Clamps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = Workload(model, (torch.rand(5, 6),), loss=torch.mean, optimizer=optimizer)
    program = capture(step)
    verdict = verify(program, build_plan(program), eager_fits=eager_fits)
    assert verdict.bit_equal, verdict.explain()
    wrong = changed(program, {"aten.clamp.default": Aten("aten.clamp.default", (Ref(0), -0.1, 0.2))})
    assert not verify(program, build_plan(program, wrong), eager_fits=eager_fits).passed


def changed(program: Program, wrong: dict[str, Aten]) -> Graph:
    """The program's graph with the first node of each named overload replaced by another operation."""
    left = dict(wrong)

    def change(node: Node) -> Node:
        if isinstance(node.op, Aten) and node.op.overload in left:
            return replace(node, op=left.pop(node.op.overload))
        return node

    nodes = tuple(change(node) for node in program.graph.nodes)
    assert not left, f"the program has no {left}"
    return replace(program.graph, nodes=nodes)


def gelu_of(program: Program, approximate: str) -> Aten:
    op = next(
        n.op for n in program.graph.nodes if isinstance(n.op, Aten) and n.op.overload == "aten.gelu.default"
    )
    return replace(op, kwargs=(("approximate", approximate),))


@pytest.mark.parametrize("training", [True, False])
def test_another_activation_is_found(training: bool) -> None:
    program = capture(workload(training))
    graph = changed(program, {"aten.gelu.default": gelu_of(program, "tanh")})
    verdict = verify(program, build_plan(program, graph))
    assert not verdict.passed and not verdict.bit_equal
    assert 1e-5 < verdict.max_rel_error < 1.0
    assert verdict.worst in ("loss", "output 0") or verdict.worst.startswith(("gradient of", "buffer"))
    assert verdict.worst in verdict.explain()


def test_wrong_update_is_found_although_gradients_are_right() -> None:
    program = capture(workload())
    nodes = []
    for node in program.graph.nodes:
        if isinstance(node.op, Fused) and node.id == max(program.updates.values()):
            body = replace(node.op.body, nodes=node.op.body.nodes[:-1])  # the parameter itself stays
            node = replace(node, op=replace(node.op, body=body))
        nodes.append(node)
    verdict = verify(program, build_plan(program, replace(program.graph, nodes=tuple(nodes))))
    assert verdict.max_rel_error == 0.0 and not verdict.passed and not verdict.bit_equal
    assert any("differs from eager's optimizer" in fault for fault in verdict.faults)


def test_missing_draw_is_found() -> None:
    program = capture(workload())
    graph = program.graph
    index, draw = next((i, n) for i, n in enumerate(graph.nodes) if "bernoulli" in str(n.op))
    ones = replace(draw, op=Aten("aten.ones_like.default", draw.op.args[:1]))  # type: ignore[union-attr]
    nodes = (*graph.nodes[:index], ones, *graph.nodes[index + 1 :])
    verdict = verify(program, build_plan(program, replace(graph, nodes=nodes)))
    assert "the random generator ends in another state" in verdict.faults


def test_all_is_as_before_also_after_a_failure() -> None:
    given = workload()
    assert given.optimizer is not None
    for parameter in given.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in given.model.parameters()]
    for parameter in given.model.parameters():
        parameter.grad = None
    program = capture(given)
    plan = build_plan(program)
    for parameter, gradient in zip(given.model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    objects = [id(tensor) for tensor in (*given.model.parameters(), *given.model.buffers())]
    state = torch.get_rng_state()
    assert verify(program, plan).passed
    given.model.eval()
    with pytest.raises(Exception, match="training"):
        verify(program, plan)
    assert [id(tensor) for tensor in (*given.model.parameters(), *given.model.buffers())] == objects
    assert all(torch.equal(before[name], tensor) for name, tensor in given.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    for parameter, gradient in zip(given.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
    assert not given.optimizer.state


@pytest.mark.parametrize("half", [False, True])
def test_the_tolerance_is_that_of_the_coarsest_type_in_the_step(half: bool) -> None:
    """A model may enter autocast by itself; the workload does not say so."""

    class Enters(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                return super().forward(x)

    program = capture(Workload(Enters(4, 4), (torch.rand(2, 4),)))
    assert verify(program, build_plan(program)).tolerance == (1e-2 if half else 1e-5)
