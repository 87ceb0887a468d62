"""The pure parts of the comparison with peers: figures, choices, the table, the picture."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import peers
from benchmarks.training.gauge import (
    Time,
    gradient_error,
    half_width,
    measure_above_bytes,
    measure_rounds,
    summarise,
)
from benchmarks.training.markdown import render
from benchmarks.training.picture import Box, draw, place_names, ticks
from benchmarks.training.process import Failed, worker
from benchmarks.training.record import (
    Comparison,
    Figures,
    Panel,
    Row,
    least,
    read_comparison,
    write_comparison,
)
from benchmarks.training.rows import _why
from benchmarks.training.subjects import SUBJECTS, Subject
from benchmarks.training.variants import Variant, loss_of
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.workloads import load_workload

SVG = "{http://www.w3.org/2000/svg}"
MIB = 1 << 20
TINY = {
    "gpt": "gpt2:layers=2,dim=16,heads=2,seq=16,batch=2,vocab=32",
    "gpt-explicit": "gpt2:layers=2,dim=16,heads=2,seq=16,batch=2,vocab=32,attention=explicit",
    "unet": "unet:batch=2,size=16,width=4,depth=2",
    "gpt-vocab": "gpt2:layers=1,dim=16,heads=2,seq=16,batch=2,vocab=64",
}


def figures(mebibytes: float, ratio: float = 1.0, error: float = 0.0) -> Figures:
    return Figures(int(mebibytes * MIB), 0.5, ratio, 0.01, ratio, 31, error)


def comparison() -> Comparison:
    sweep = (("0", figures(168.2, 1.1)), ("0.05", figures(100.5, 1.2)), ("0.1", None))
    rows = (
        Row("eager", "eager", figures(228.3)),
        Row("torch.compile", "peer", figures(168.2, 0.9, 3e-7)),
        Row("compile, best memory budget", "peer", figures(100.5, 1.2), "0.05", others=sweep),
        Row("compile + auto_chunker", "peer", problem="Failed: no <compiler> & no luck"),
        Row("ours, memory 40%", "ours", replace(figures(80, 1.05), detail="1 fission")),
        Row("ours, memory 1%", "ours", problem="Infeasible: memory 1 MiB is under the floor 70.0 MiB"),
    )
    return Comparison((Panel("gpt", "GPT", rows), Panel("lin", "linear", rows[:2])), "2 cores", ("shared",))


# -- figures ------------------------------------------------------------------------------------------------


def test_the_ratio_is_to_the_mean_of_both_eager_steps_and_the_noise_is_eager_against_itself() -> None:
    rounds = summarise([(Time(1, 2), Time(3, 5), Time(2, 3))] * 9)
    assert rounds.ratio == 2.0
    assert rounds.processor_ratio == 2.0
    assert rounds.noise == 0.0  # nine times the same
    assert rounds.latency_s == 3
    assert summarise([(Time(1, 1), Time(1, 1), Time(1 + k / 10, 1)) for k in range(9)]).noise > 0.1


def test_the_half_width_shrinks_with_more_runs() -> None:
    few, many = ([0.9 + 0.2 * k / (n - 1) for k in range(n)] for n in (9, 101))
    assert 0 < half_width(many) < half_width(few) <= 0.1


def test_rounds_end_with_their_time_but_never_before_the_third() -> None:
    calls = []
    rounds = measure_rounds(lambda: calls.append("e"), lambda: calls.append("o"), rounds=100, seconds=0.0)
    assert rounds.rounds == 3
    assert "".join(calls) == "eo" + "eoe" * 3


def test_the_peak_is_what_lives_at_once_above_the_start() -> None:
    kept = torch.zeros(1000)

    def step() -> torch.Tensor:
        large = kept + 1
        return (large + kept).sum()

    assert measure_above_bytes(step) == pytest.approx(8000, abs=256)


def test_small_gradients_are_judged_against_the_largest_of_the_model() -> None:
    eager = {"w": torch.tensor([100.0, 1.0]), "b": torch.tensor([1e-9])}
    assert gradient_error(eager, eager) == 0
    assert gradient_error({**eager, "b": torch.tensor([1e-6])}, eager) == pytest.approx(1e-5, rel=0.01)
    assert gradient_error({**eager, "w": torch.tensor([50.0, 1.0])}, eager) == 0.5
    assert gradient_error({"w": eager["w"]}, eager) == math.inf
    assert gradient_error({**eager, "w": torch.tensor([math.nan, 1.0])}, eager) == math.inf
    assert gradient_error({}, {}) == math.inf


# -- choices and records ------------------------------------------------------------------------------------


def test_the_least_peak_with_right_gradients_is_chosen() -> None:
    tried = [("a", figures(50)), ("b", figures(40, 1.2)), ("c", figures(40, 1.1)), ("d", None)]
    assert least(tried) == "c"
    assert least([*tried, ("wrong", figures(10, error=1.0))]) == "c"
    assert least([("d", None)]) is None


def test_a_row_measured_again_keeps_its_place() -> None:
    panel = comparison().panels[0]
    again = panel.with_row(Row("torch.compile", "peer", figures(1)))
    assert [row.label for row in again.rows] == [row.label for row in panel.rows]
    assert again.rows[1].figures == figures(1)
    assert panel.with_row(Row("new", "ours")).rows[-1].label == "new"


def test_the_json_file_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    write_comparison(comparison(), file)
    assert read_comparison(file) == comparison()
    file.write_text('{"panels": [{}]}')
    with pytest.raises(ValueError, match="not a comparison"):
        read_comparison(file)


def test_a_missing_part_of_ours_is_said_as_such() -> None:
    assert "not available in this version" in _why("ModuleNotFoundError: No module named 'lowtide.x'")
    assert _why("Infeasible: too little") == "Infeasible: too little"


# -- table --------------------------------------------------------------------------------------------------


def test_the_table_has_every_row_and_marks_the_least_peak() -> None:
    lines = render(comparison()).splitlines()
    assert lines[0] == "2 cores"
    peaks = next(line for line in lines if line.startswith("| GPT |"))
    assert peaks == "| GPT | 228.3 | 168.2 | 100.5 (0.05) | - | **80.0**, 1.05x | refused |"
    assert "| linear | 228.3 | **168.2** |  |  |  |  |" in lines
    row = next(line for line in lines if line.startswith("| compile, best memory budget (0.05)"))
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["100.5", "44%", "1.20x"]
    assert all(line.count("|") == lines[4].count("|") for line in lines[4:8] if line.startswith("|"))


def test_the_table_says_what_did_not_run_and_what_was_tried() -> None:
    text = render(comparison())
    assert "- compile + auto_chunker: Failed: no <compiler> & no luck" in text
    assert "all choices: 0: 168.2 at 1.10x; 0.05: 100.5 at 1.20x; 0.1: did not run" in text
    assert "- ours, memory 40%: 1 fission" in text


def test_wrong_gradients_are_never_the_least() -> None:
    rows = (Row("eager", "eager", figures(9)), Row("broken", "peer", figures(1, error=0.9)))
    text = render(Comparison((Panel("m", "m", rows),)))
    assert "| m | **9.0** | 1.0 wrong gradients |" in text


# -- picture ------------------------------------------------------------------------------------------------


def test_the_picture_has_a_dot_for_every_row_that_ran_inside_its_panel() -> None:
    root = ElementTree.fromstring(draw(comparison(), "a < b"))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 2
    classes = [dot.get("class") for dot in panels[0].findall(f"{SVG}circle")]
    assert sorted(classes) == ["eager", "other", "other", "ours", "peer", "peer"]
    for dot in (dot for panel in panels for dot in panel.findall(f"{SVG}circle")):
        assert 50 < float(dot.get("cx", "")) < 560
        assert 40 < float(dot.get("cy", "")) < 360
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"a < b", "GPT", "eager", "compile", "compile, best budget 0.05", "ours, 40%"} <= texts


def test_further_right_is_more_memory_and_higher_is_slower() -> None:
    root = ElementTree.fromstring(draw(comparison()))
    dots = {dot.get("class"): dot for dot in root.find(f"{SVG}g").iter(f"{SVG}circle")}  # type: ignore[union-attr]
    eager, ours = dots["eager"], dots["ours"]
    assert float(eager.get("cx", "")) > float(ours.get("cx", ""))
    assert float(eager.get("cy", "")) > float(ours.get("cy", ""))


def test_names_touch_neither_dots_nor_each_other() -> None:
    dots = [(200.0, 200.0), (206.0, 202.0), (200.0, 212.0), (540.0, 60.0), (530.0, 64.0)]
    names = ["eager", "eager, tuned malloc", "compile", "compile + checkpoint", "ours, 50%"]
    inside = Box(58, 30, 556, 354)
    nameless = [(230.0, 200.0), (180.0, 203.0)]
    boxes = place_names(dots, names, inside, nameless)
    assert all(inside.holds(box) for box in boxes)
    marks = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in (*dots, *nameless)]
    for index, box in enumerate(boxes):
        assert not any(box.overlap(mark) for mark in marks)
        assert not any(box.overlap(other) for other in boxes[:index])


@pytest.mark.parametrize(("low", "high"), [(0.0, 246.0), (0.93, 1.27), (0.0, 8.0), (0.4, 12.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
    steps = {round(after - before, 9) for before, after in itertools.pairwise(found)}
    assert len(steps) == 1


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(Comparison((Panel("m", "m", (Row("eager", "eager", problem="broken"),)),)))


# -- what is compared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "cut"), [(key, cut) for key, one in SUBJECTS.items() for cut in one.cuts])
def test_hand_checkpoints_compute_the_models_gradients(key: str, cut: str) -> None:
    subject = replace(SUBJECTS[key], workload=f"{TINY[key]},mode=train")
    assert gradient_error(_gradients(subject, Variant(cut=cut)), _gradients(subject, Variant())) <= 1e-6


@pytest.mark.parametrize(("key", "cut"), [(key, cut) for key, one in SUBJECTS.items() for cut in one.cuts])
def test_hand_checkpoints_recompute(key: str, cut: str) -> None:
    subject = replace(SUBJECTS[key], workload=f"{TINY[key]},mode=train")

    def operators(variant: Variant) -> int:
        with _Count() as count:
            _gradients(subject, variant)
        return count.calls

    assert operators(Variant(cut=cut)) > 1.1 * operators(Variant())


class _Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(
        self, operator: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        assert callable(operator)
        self.calls += 1
        return operator(*args, **(kwargs if isinstance(kwargs, Mapping) else {}))


def _gradients(subject: Subject, variant: Variant) -> dict[str, torch.Tensor]:
    workload = subject.make()
    loss_of(subject, variant, workload)().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in workload.model.named_parameters() if p.grad is not None}


def test_the_subjects_are_those_of_the_published_table() -> None:
    for subject in SUBJECTS.values():
        if subject.workload:
            assert load_workload(f"{TINY[subject.key]},mode=train").training
    workload = SUBJECTS["linear"].make()
    assert workload.model().shape == (4096, 8192)
    assert {name for name, _ in workload.model.named_parameters()} == {"features", "weight"}


# -- process and command line -------------------------------------------------------------------------------


class Echo:
    """A bench for the worker process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def say(self) -> str:
        return self.text

    def fail(self) -> str:
        raise RuntimeError(f"\n{self.text} is wrong\nand more")

    def die(self) -> None:
        import os

        os._exit(3)


def test_a_worker_answers_and_its_errors_are_one_line() -> None:
    with worker(Echo, "tide") as bench:
        assert bench.call("say") == "tide"
        with pytest.raises(Failed, match=r"\ARuntimeError: tide is wrong\Z"):
            bench.call("fail")
        assert bench.call("say") == "tide"
        with pytest.raises(Failed, match="ended with status 3"):
            bench.call("die")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt,bert"], "no model 'bert'"),
        (["--ours", "half"], "--ours: memory 'half'"),
        (["--ours-latency", "1.1"], "--ours-latency: latency '1.1' has no unit"),
        (["--budgets", "0.1,x"], "--budgets"),
    ],
)
def test_mistakes_on_the_command_line_are_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        peers.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_files_are_written_from_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, svg, markdown = (tmp_path / name for name in ("a.json", "b.svg", "new/c.md"))
    write_comparison(comparison(), earlier)
    given = ["--peers", str(earlier), "--ours", "", "--ours-latency", ""]
    assert peers.main([*given, "--svg", str(svg), "--markdown", str(markdown)]) == 0
    assert markdown.read_text() == render(comparison())
    assert capsys.readouterr().out.startswith(render(comparison()))
    ElementTree.parse(svg)
