"""Draws by counter in whole plans: bits of the reference, whatever was moved, split or recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.issues.ladder import Rung, rungs
from tests.issues.test_recomputed_dropout_mask import Attends, Planes, Rows, step_of
from torch import Tensor, nn
from torch.nn import functional

import lowtide as lt
from lowtide.capture import Program, capture
from lowtide.capture.counted import draw_by_counter
from lowtide.capture.recording import named_tensors
from lowtide.ir import Fission, Graph
from lowtide.ir.ops import Aten
from lowtide.ir.philox import KEY_BITS, PHILOX, node_key
from lowtide.ir.random import is_random
from lowtide.ir.verify import verify as verify_graph
from lowtide.run.eager import run_reference
from lowtide.run.plan import Plan, build_plan
from lowtide.run.snapshot import preserved
from lowtide.run.verify import relative_error, verify
from lowtide.workload import Workload

MODELS = {
    "planes": lambda: step_of(Planes(), torch.randn(6, 2, 4, 5)),
    "rows": lambda: step_of(Rows(), torch.randn(6, 6)),
    "attends": lambda: step_of(Attends(), torch.randn(6, 5, 8)),
}


def counted(graph: Graph) -> int:
    """Nodes that draw by counter, bodies included."""
    found = 0
    for node in graph:
        if isinstance(node.op, Fission):
            found += sum(counted(body) for body in node.op.bodies)
        found += isinstance(node.op, Aten) and node.op.overload == PHILOX
    return found


def two_steps(program: Program, plan: Plan | None, seed: int = 3) -> dict[str, Tensor]:
    """Losses and everything owned after two steps from here, by the plan or by the reference executor."""
    workload, found = program.workload, {}
    with preserved(workload):
        torch.manual_seed(seed)
        for step in range(2):
            if plan is None:
                loss = run_reference(program, workload.args, workload.kwargs, workload.targets)
            else:
                loss = plan.step(*workload.args, *workload.targets, **workload.kwargs)
            found[f"loss {step}"] = loss.clone()
        found.update({named.names[0]: named.tensor.detach().clone() for named in named_tensors(workload)})
        found["generator"] = torch.get_rng_state()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_rung_has_the_references_bits(name: str) -> None:
    torch.manual_seed(0)
    program = draw_by_counter(capture(MODELS[name]()))
    verify_graph(program.graph)
    assert counted(program.graph) >= 2
    assert name != "planes" or not any(is_random(node.op) for node in program.graph)
    reference = two_steps(program, None)
    seen: list[Rung] = []
    for rung in rungs(program, parts=(3,)):
        verify_graph(rung.graph)
        plan = build_plan(program, rung.graph, rung.order, poison=True)
        ours = two_steps(program, plan)
        assert torch.equal(ours.pop("generator"), reference["generator"]), rung.name
        for key, tensor in ours.items():
            if rung.exact:
                assert torch.equal(tensor, reference[key]), (rung.name, key)
            else:
                assert relative_error(tensor, reference[key]) < 1e-10, (rung.name, key)
        seen.append(rung)
    again = [rung for rung in seen if rung.exact and counted(rung.graph) > counted(program.graph)]
    assert again, "no mask was drawn a second time"
    assert any(not rung.exact for rung in seen), "nothing was split"


class Masks(nn.Module):
    """Element by element, so that parts have to give the very bits of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x.exp(), 0.4, training=True).sin()
        x = x + torch.rand_like(x) * torch.randn_like(x)
        return functional.dropout(x.tanh(), 0.2, training=True).neg()


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_draw_the_wholes_bits(parts: int) -> None:
    from lowtide.transforms import fission

    program = draw_by_counter(capture(Workload(Masks(), (torch.randn(6, 4, 8),))))
    found = [c for c in fission.candidates(program.graph, (parts,)) if len(c.sizes) == parts]
    assert len(found) >= 2, "batch and another dimension"
    torch.manual_seed(5)
    whole = run_reference(program, program.workload.args)
    for candidate in found:
        graph = fission.apply(program.graph, candidate).graph
        assert counted(graph) >= 4
        for nested in list(fission.candidates(graph, (2,)))[:1] or [None]:
            plan = build_plan(program, graph if nested is None else fission.apply(graph, nested).graph)
            torch.manual_seed(5)
            assert torch.equal(plan(*program.workload.args), whole), candidate.label


def test_steps_and_seeds_differ_and_a_restored_generator_repeats() -> None:
    program = draw_by_counter(capture(Workload(Masks(), (torch.randn(4, 8),))))
    plan = build_plan(program)
    torch.manual_seed(1)
    first = plan(*program.workload.args)
    state = torch.get_rng_state()
    second = plan(*program.workload.args)
    torch.set_rng_state(state)
    assert torch.equal(plan(*program.workload.args), second)
    torch.manual_seed(1)
    assert torch.equal(plan(*program.workload.args), first)
    torch.manual_seed(2)
    other = plan(*program.workload.args)
    assert not torch.equal(first, second) and not torch.equal(first, other)


class Sometimes(nn.Module):
    """The deterministic rest: with the masks of one in the place of the other's, nothing differs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = functional.dropout(torch.ones_like(x), 0.25, training=True)
        return kept, (x * kept).cumsum(0).tanh()


def test_against_eager_only_the_draw_differs() -> None:
    x = torch.randn(512, 64)
    program = draw_by_counter(capture(Workload(Sometimes(), (x,))))
    kept, rest = build_plan(program)(x)
    assert torch.equal(kept.unique(), torch.tensor([0.0, 1 / 0.75]))
    share = (kept > 0).double().mean().item()
    assert abs(share - 0.75) < 4.5 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert torch.equal(rest, (x * kept).cumsum(0).tanh())


def test_masks_are_those_of_seed_offset_and_place() -> None:
    """What a plan draws, told from the seed alone: k-th draw, row-major index."""
    program = draw_by_counter(capture(Workload(Masks(), (torch.zeros(3, 4, 40),))))
    torch.manual_seed(11)
    step_key = int(torch.randint(0, 1 << KEY_BITS, ()))
    place = ([torch.arange(480)], [0], [480], [1], [0])
    by_hand = [
        torch.ops.lowtide.philox(float(node_key(step_key, k)), *place, "bernoulli", p, 0.0, torch.float32)
        for k, p in ((0, 0.6), (3, 0.8))
    ]
    torch.manual_seed(11)
    (drawn,) = build_plan(program)(*program.workload.args).reshape(1, -1)
    assert torch.equal(drawn == 0.0, by_hand[1] == 0.0)
    inner = torch.equal(by_hand[0].reshape(3, 4, 40)[1], by_hand[0].reshape(3, 4, 40)[2])
    assert not inner, "rows repeat"


def test_optimize_verifies_against_the_reference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.GELU()) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(512, 64), torch.randint(64, (512,))
    workload = Workload(model, (x,), targets=(y,), loss=functional.cross_entropy, optimizer=optimizer)
    state = torch.get_rng_state()
    plan = lt.optimize(workload, memory="60%", seconds=2, rng="philox")
    assert torch.equal(state, torch.get_rng_state()), "optimize draws from the user's generator"
    outcome = plan.outcome
    assert outcome is not None and outcome.met and outcome.verified == "reference"
    assert outcome.settings["rng"] == "philox"
    assert verify(plan.program, plan).against == "reference"
    file = tmp_path / "p.lt"
    plan.save(file)
    loaded = lt.load(file, model, optimizer)
    assert loaded.program.rng == "philox"
    with preserved(workload):
        torch.manual_seed(9)
        ours = plan.step(x, y)
    with preserved(workload):
        torch.manual_seed(9)
        assert torch.equal(loaded.step(x, y), ours)
