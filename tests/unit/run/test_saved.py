"""Saved plans: the same numbers after loading, and one clear error for a file that is not right."""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.errors import PlanFileError, ShapeMismatch, Stale, UsageError
from lowtide.run.archive import FORMAT
from lowtide.run.plan import Plan, build_plan
from lowtide.run.saved import inspect_plan, load_for, load_plan
from lowtide.workload import Workload
from lowtide.workloads import TINY, load_workload


def network(seed: int = 0, width: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, 3)
    )


def training(seed: int = 0, **changes: Any) -> Workload:
    model = network(seed)
    settings: dict[str, Any] = {
        "args": (torch.linspace(0, 1, 30).reshape(5, 6),),
        "targets": (torch.tensor([0, 1, 2, 1, 0]),),
        "loss": F.cross_entropy,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
    }
    return Workload(model, **{**settings, **changes})


def losses(plan: Plan, workload: Workload, steps: int = 3) -> list[Tensor]:
    found = []
    for seed in range(steps):
        torch.manual_seed(seed)
        found.append(plan.step(*workload.args, *workload.targets))
    return found


def saved(workload: Workload, path: Path) -> Plan:
    plan = build_plan(capture(workload), moves={"remat": 2})
    plan.save(path)
    return plan


def test_training_continues_on_a_loaded_plan(tmp_path: Path) -> None:
    first, second = training(), training()
    plan = saved(first, tmp_path / "net.lt")
    assert second.optimizer is not None
    loaded = load_plan(tmp_path / "net.lt", second.model, second.optimizer)
    assert losses(loaded, second) == losses(plan, first)
    for mine, other in zip(
        first.model.state_dict().values(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)
    assert loaded.predicted_peak_bytes == plan.predicted_peak_bytes
    assert loaded.graph == plan.graph and loaded.program.graph == plan.program.graph
    assert loaded.facts == plan.facts and loaded.placement == plan.placement
    assert loaded.moves == {"remat": 2}


def test_loading_onto_a_model_that_has_trained(tmp_path: Path) -> None:
    first, second = training(), training()
    plan = saved(first, tmp_path / "net.lt")
    losses(plan, first)
    for seed in range(3):
        torch.manual_seed(seed)
        F.cross_entropy(second.model(*second.args), *second.targets).backward()
        assert second.optimizer is not None
        second.optimizer.step()
        second.optimizer.zero_grad(set_to_none=True)
    loaded = load_plan(tmp_path / "net.lt", second.model, second.optimizer)
    assert losses(loaded, second) == losses(plan, first)


@pytest.mark.parametrize("name", ["unet", "gpt2"])
def test_bundled_for_their_workload(name: str, tmp_path: Path) -> None:
    first, second = load_workload(TINY[name]), load_workload(TINY[name])
    plan = saved(first, tmp_path / "net.lt")
    loaded = load_for(tmp_path / "net.lt", second)
    for _ in range(2):
        ours = loaded.step(*second.args, *second.targets, **second.kwargs)
        assert torch.equal(ours, plan.step(*first.args, *first.targets, **first.kwargs))


Pair = namedtuple("Pair", ["left", "right"])


class Shapes(nn.Module):
    """A buffer, a constant tensor, and results in every container."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.plain = torch.arange(4.0)  # neither parameter nor buffer: a constant of the program

    def forward(self, x: Tensor, *, power: float = 1.5, name: str | None = None) -> dict[str, Any]:
        y = (x * self.scale + self.plain) ** power
        return {"pair": (y, y[1:]), "list": [None, 3, x], "name": name, "nan": float("inf")}


def test_inference_with_containers_and_constants(tmp_path: Path) -> None:
    x = torch.rand(4)
    workload = Workload(Shapes().eval(), args=(x,), kwargs={"power": 2.5, "name": "a"})
    saved(workload, tmp_path / "shapes.lt")
    other = Shapes().eval()
    loaded = load_plan(tmp_path / "shapes.lt", other)
    found, expected = loaded(x, power=2.5, name="a"), other(x, power=2.5, name="a")
    assert found.keys() == expected.keys() and found["list"][:2] == [None, 3] and found["nan"] == float("inf")
    assert torch.equal(found["pair"][0], expected["pair"][0])
    assert torch.equal(found["pair"][1], expected["pair"][1])
    with pytest.raises(ShapeMismatch):
        loaded(x, power=1.0, name="a")


def test_file_holds_no_pickle(tmp_path: Path) -> None:
    saved(training(), tmp_path / "net.lt")
    with zipfile.ZipFile(tmp_path / "net.lt") as archive:
        names = archive.namelist()
        for name in names:
            with pytest.raises((ValueError, IndexError, KeyError)):
                list(pickletools.genops(archive.read(name)))
    assert {"plan.json", "recipe.json", "graph.txt", "captured.txt", "program.json"} <= set(names)


def test_inspection_needs_no_model(tmp_path: Path) -> None:
    plan = saved(training(), tmp_path / "net.lt")
    seen = inspect_plan(tmp_path / "net.lt")
    assert seen.predicted_peak_bytes == plan.predicted_peak_bytes
    assert seen.timeline == plan.timeline
    assert seen.program.workload.name == "Sequential"


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="there is no plan"):
        load_plan(tmp_path / "none.lt", network())
    with pytest.raises(PlanFileError, match="cannot be read"):
        load_plan(tmp_path, network())


def test_cut_off_at_any_byte_or_foreign(tmp_path: Path) -> None:
    workload = training()
    saved(workload, tmp_path / "net.lt")
    whole = (tmp_path / "net.lt").read_bytes()
    assert workload.optimizer is not None
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.lt").write_bytes(whole[:length])
        with pytest.raises(PlanFileError, match="is no plan of Lowtide, or cut off"):
            load_plan(tmp_path / "cut.lt", workload.model, workload.optimizer)
    with zipfile.ZipFile(tmp_path / "foreign.lt", "w") as archive:
        archive.writestr("plan.json", "[]")
    with pytest.raises(PlanFileError, match="is damaged or no plan"):
        load_plan(tmp_path / "foreign.lt", workload.model, workload.optimizer)


def _edit(path: Path, part: str, change: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    content = json.loads(parts[part])
    change(content)
    parts[part] = json.dumps(content).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in parts.items():
            archive.writestr(name, raw)


def test_newer_format_and_damaged_contents(tmp_path: Path) -> None:
    workload, path = training(), tmp_path / "net.lt"
    assert workload.optimizer is not None
    saved(workload, path)
    _edit(path, "recipe.json", lambda content: content.pop("order"))
    with pytest.raises(PlanFileError, match="damaged"):
        load_plan(path, workload.model, workload.optimizer)
    _edit(path, "plan.json", lambda content: content.update(format=FORMAT + 1))
    with pytest.raises(PlanFileError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        load_plan(path, workload.model, workload.optimizer)


def test_unwritable_path(tmp_path: Path) -> None:
    plan = build_plan(capture(training()))
    with pytest.raises(UsageError, match="cannot be written"):
        plan.save(tmp_path / "missing" / "net.lt")
    assert list(tmp_path.iterdir()) == []


def test_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.lt"
    saved(training(), path)
    wide = network(width=9)
    with pytest.raises(Stale, match=r"0\.weight has shape"):
        load_plan(path, wide, torch.optim.AdamW(wide.parameters()))
    with pytest.raises(PlanFileError, match="needs the model's optimizer"):
        load_plan(path, network())
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        model = network()
        with pytest.raises(Stale, match="by other operators than the plan"):
            load_plan(path, model, optimizer(model.parameters(), lr=0.1))
    short = nn.Sequential(nn.Linear(6, 8))
    with pytest.raises(Stale, match="updates 2 of the plan's 6 parameters"):
        load_plan(path, short, torch.optim.AdamW(short.parameters()))
    saved(Workload(network().eval(), args=(torch.rand(5, 6),)), tmp_path / "infer.lt")
    with pytest.raises(Stale, match=r"the model has no param:1\.weight"):
        load_plan(tmp_path / "infer.lt", short)
    with pytest.raises(PlanFileError, match="another workload"):
        load_for(path, training(args=(torch.rand(7, 6),), targets=(torch.zeros(7, dtype=torch.long),)))
