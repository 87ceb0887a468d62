"""Guests: values in the place of a result that has not been made yet."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.analysis.lifetime import Buffer
from lowtide.capture import capture
from lowtide.run.layout import guests_of, placement_problem
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
    guests = guests_of(buffers)
    assert guests == {0: (1, 0), 1: (1, 0), 2: (1, 1024)}
    assert {block.id for block in placement_problem(buffers).blocks} == {3, 4, 5, 6}
    assert {block.id for block in placement_problem(buffers, {}).blocks} == {0, 1, 2, 3, 4, 5, 6}


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
