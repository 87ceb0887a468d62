"""Guests: values in the place of a result that has not been made yet."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.analysis.facts import OperatorFacts, Temp
from lowtide.analysis.lifetime import Buffer
from lowtide.capture import capture
from lowtide.ir.text import parse_graph
from lowtide.place.problem import Block
from lowtide.run.layout import Location, Tenants, guests_of, lay_out, problem_of
from lowtide.run.measure import measure_eager, measure_plan
from lowtide.run.plan import build_plan
from lowtide.run.saved import load_plan
from lowtide.workload import Workload


def buffer(number: int, nbytes: int, start: int, stop: int, kind: str = "value") -> Buffer:
    return Buffer(number, (number,), nbytes, start, stop, kind)  # type: ignore[arg-type]


def test_who_is_a_guest() -> None:
    buffers = (
        buffer(0, 1024, 0, 2),  # the first guest
        buffer(1, 1024, 2, 4),  # the same place, later
        buffer(2, 512, 1, 3),  # beside both
        buffer(3, 1024, 3, 5),  # is read when the result is made
        buffer(4, 4096, 0, 2),  # too large
        buffer(5, 64, 0, 2),  # too small to be worth it
        buffer(6, 1024, 1, 2, "workspace"),
        buffer(7, 2048, 4, 9, "output"),
    )
    tenants = Tenants(buffers, (), {b.id: Block(b.id, b.nbytes, b.start, b.stop) for b in buffers})
    guests = guests_of(tenants)
    assert guests == {0: (1, 0), 1: (1, 0), 2: (1, 1024)}
    assert {block.id for block in problem_of(tenants, guests).blocks} == {3, 4, 5, 6}
    assert {block.id for block in problem_of(tenants, {}).blocks} == {0, 1, 2, 3, 4, 5, 6}


SUMS = """
input %0: f32[64]
%1: f32[64] = aten.cumsum.default(%0, 0)
%2: f32[64] = aten.cumsum.default(%1, 0)
return %2
"""


def reordering(nbytes: int) -> OperatorFacts:
    """An operator that takes `nbytes`, gives them back, and then asks for its result of 256 bytes."""
    return OperatorFacts((256,), max(256, nbytes), (Temp(nbytes, 0, 1),), ((nbytes, -1), (256, 0)))


def test_a_temporary_lies_over_the_result_that_it_is_larger_than() -> None:
    graph = parse_graph(SUMS)
    first, second = (node.id for node in graph)
    layout = lay_out(graph, [first, second], {first: reordering(512), second: OperatorFacts((256,), 256)})
    assert layout.nbytes == 512
    assert layout.temps([first, second]) == {first: (Location("arena", 0, 0),)}


def test_a_temporary_is_a_guest_of_the_result_of_the_program() -> None:
    graph = parse_graph(SUMS)
    first, second = (node.id for node in graph)
    facts = {first: OperatorFacts((256,), 256), second: reordering(256)}
    layout = lay_out(graph, [first, second], facts)
    assert (layout.nbytes, layout.output_bytes) == (256, 256)
    assert layout.temps([first, second]) == {second: (Location("output", 1, 0),)}


class Wide(nn.Module):
    """A large value that is gone before a result of the same size comes, and a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(self.up(x).sin()).tanh()
        return self.up(y), y.argmax(1)


def workload() -> Workload:
    torch.manual_seed(0)
    return Workload(Wide(), (torch.randn(32, 8),))


def test_a_large_result_does_not_come_on_top(tmp_path: Path) -> None:
    step = workload()
    program = capture(step)
    plan = build_plan(program, poison=True)
    layout = plan.recipe.layout
    assert layout.guests and plan.arena_bytes < layout.output_bytes
    measured = measure_plan(plan, step, seconds=0.0)
    assert measured.peak_bytes == plan.predicted_peak_bytes
    assert measured.peak_bytes <= measure_eager(step, seconds=0.0).peak_bytes
    plan.save(tmp_path / "plan.lt")
    again = load_plan(tmp_path / "plan.lt", step.model)
    assert again.recipe.layout.guests == layout.guests
    for each in (plan, again):
        first, other = each(*step.args), torch.randn(32, 8)
        kept = [tensor.clone() for tensor in first]
        for ours, theirs in zip(each(other), step.model(other), strict=True):
            assert torch.equal(ours, theirs)
        assert all(map(torch.equal, first, kept))  # the guests of the second call lie elsewhere
