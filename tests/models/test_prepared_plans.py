"""Weights that a plan derives and keeps: right whatever changes the model, counted to the byte, saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide as lt
from lowtide.analysis.timeline import timeline
from lowtide.capture import capture
from lowtide.ir.verify import verify as check_graph
from lowtide.run.measure import measure_plan
from lowtide.run.plan import Plan, build_plan
from lowtide.run.verify import verify
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Realised
from lowtide.search.preparing import PreparedForm, Preparer, simplified
from lowtide.workloads.parse import load_workload


class Images(nn.Module):
    """Two normalised convolutions, a residual, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.one(x)))
        x = x + torch.relu(self.norm2(self.two(x)))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Three projections of one input, and a scale between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) * 0.25) @ self.k(x).transpose(-1, -2)
        return torch.softmax(scores, -1) @ self.v(x)


def images() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Images().eval()
    for norm in (model.norm1, model.norm2):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    return model, torch.randn(2, 3, 20, 20)


def attention() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attention().eval(), torch.randn(2, 24, 32)


MODELS = {"images": images, "attention": attention}
RULES = {"images": "folded-norm", "attention": "merged-products"}


def prepared(model: nn.Module, x: Tensor) -> tuple[Plan, PreparedForm]:
    program = capture(lt.Workload(model, (x,)))
    graph, estimator = program.graph, Estimator()
    order = tuple(node.id for node in graph.nodes)
    realised = Realised(graph, order, timeline(graph, order, estimator.facts(graph), inplace=True), 0.0)
    form = Preparer.beside(estimator).prepared(realised, 1 << 30)
    assert form is not None
    plan = build_plan(
        program,
        form.realised.graph,
        form.realised.order,
        kernels=form.estimator.kernels,
        derivation=form.derivation,
        poison=True,
    )
    return plan, form


def close(ours: Tensor, eager: Tensor) -> bool:
    return bool((ours - eager).abs().max() <= 2e-6 * eager.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_poisoned_arena_gives_the_numbers_of_eager_within_the_predicted_bytes(name: str) -> None:
    model, x = MODELS[name]()
    plan, form = prepared(model, x)
    check_graph(plan.graph)
    assert RULES[name] in {move.detail for move in form.moves}
    verdict = verify(plan.program, plan)
    assert verdict.passed, verdict.explain()
    assert plan.kept_bytes == form.derivation.nbytes > 0
    assert measure_plan(plan, plan.program.workload).peak_bytes == plan.predicted_peak_bytes


def _through_state(model: nn.Module) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def _behind_the_version(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)


def _one_bias(model: nn.Module) -> None:
    with torch.no_grad():
        next(p for p in model.parameters() if p.dim() == 1)[3] += 1.0


CHANGES = [_through_state, _in_place, _behind_the_version, _one_bias]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_changed_weights_are_never_stale(name: str, change: Callable[[nn.Module], None]) -> None:
    model, x = MODELS[name]()
    plan, _ = prepared(model, x)
    with torch.no_grad():
        before = plan(x)
        assert close(before, model(x))
        for _ in range(2):
            change(model)
            assert close(plan(x), model(x))
            assert not close(before, model(x))


def test_statistics_are_weights_too() -> None:
    model, x = images()
    plan, _ = prepared(model, x)
    with torch.no_grad():
        plan(x)
        model.norm1.running_var.mul_(3.0)
        assert close(plan(x), model(x))


def test_nothing_is_made_again_while_nothing_changes() -> None:
    model, x = images()
    plan, _ = prepared(model, x)
    made: list[int] = []
    plan(x)
    upkeep = plan._executor._upkeep
    assert upkeep is not None
    make = upkeep._make
    upkeep._make = lambda: (made.append(1), make())[1]
    plan(x)
    assert not made
    plan.refresh()
    plan(x)
    assert len(made) == 1


def test_saved_and_loaded_onto_other_weights(tmp_path: Path) -> None:
    model, x = images()
    plan, form = prepared(model, x)
    plan.save(tmp_path / "plan.lt")
    _in_place(model)
    loaded = lt.load(tmp_path / "plan.lt", model)
    assert loaded.arena_bytes == plan.arena_bytes
    assert loaded.predicted_peak_bytes == plan.predicted_peak_bytes
    assert loaded.kept_bytes == form.derivation.nbytes
    with torch.no_grad():
        assert close(loaded(x), model(x))


def test_without_kernels_only_derived_weights_are_kept() -> None:
    model, x = images()
    plan, form = prepared(model, x)
    plan.use_kernels({})
    assert 0 < plan.kept_bytes < form.derivation.nbytes
    with torch.no_grad():
        assert close(plan(x), model(x))
    assert measure_plan(plan, plan.program.workload).peak_bytes == plan.predicted_peak_bytes


def test_a_limit_that_kept_weights_would_break_refuses_them() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    x = torch.randn(8, 256)
    plan = lt.optimize(lt.Workload(model, (x,)), memory="100%", seconds=1)
    assert plan.kept_bytes == 0


def test_optimize_prepares_and_says_so() -> None:
    model, x = images()
    plan = lt.optimize(lt.Workload(model, (x,)), memory="400%", seconds=1)
    assert plan.kept_bytes > 0
    assert plan.outcome is not None
    assert plan.outcome.count("rewrite") == 1  # the other convolution is one for Winograd
    text = plan.explain()
    assert "folded-norm" in text and "derived weights" in text


def test_training_keeps_nothing() -> None:
    model = nn.Linear(8, 8)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = lt.Workload(model, (x,), targets=(y,), loss=functional.mse_loss, optimizer=optimizer)
    assert lt.optimize(workload, memory="100%", seconds=1).kept_bytes == 0


def test_rules_without_prepared_weights_are_applied_to_training_steps() -> None:
    text = "gptneo-1.3b:batch=2,seq=16,layers=1,dim=32,heads=4,vocab=64,mode=train"
    program = capture(load_workload(text))
    done = simplified(program.graph, Estimator())
    assert {each.rule for each in done.applied} == {"common-term", "shared-factor"}
    check_graph(done.graph)
    verdict = verify(program, build_plan(program, done.graph, poison=True))
    assert verdict.passed, verdict.explain()


def test_rewrites_are_moves_that_the_report_names() -> None:
    text = "gptneo-1.3b:batch=2,seq=16,layers=1,dim=32,heads=4,vocab=64,mode=infer"
    plan = lt.optimize(load_workload(text), memory="100%", seconds=1)
    assert plan.outcome is not None
    assert plan.outcome.count("rewrite") >= 2
    assert dict(plan.recipe.rules)["common-term"] >= 2
    assert "common-term" in plan.explain()
