"""Under a hard limit that kills eager, a plan completes the step and is verified all the same.

The limit is a control group of the memory controller where this system grants one, else RLIMIT_AS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowtide.analysis.timeline import timeline
from lowtide.capture import capture
from lowtide.run.plan import build_plan
from lowtide.run.probe import probe
from lowtide.run.room import free_bytes, out_of_memory
from lowtide.transforms.fission import apply, candidates
from lowtide.workloads import load_workload

TRAINING = "mlp:batch=262144,dim=32,layers=8,mode=train"

# Sixteen results of 64 MiB are alive at once, no operator takes more than three.
WIDE = """
import torch
from lowtide import Workload

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(16))

    def forward(self, x):
        found = [branch(x) for branch in self.branches]
        whole = found.pop()
        while found:
            whole = whole + found.pop()
        return whole.mean(1)

def wide():
    torch.manual_seed(0)
    return Workload(Wide().eval(), (torch.randn(524288, 32),))
"""

CHILD = """
import json, resource, sys
import torch
import lowtide.search.replay, lowtide.report  # what is imported later would count as the step's
from lowtide.cli import run_command
from lowtide.workloads import load_workload
folder, limit, used, room, threads, *command = json.loads(sys.argv[1])
torch.set_num_threads(threads)
torch.randn(64, 64) @ torch.randn(64, 64)
if folder:
    with open(f"{folder}/{limit}", "w") as file:
        file.write(str(int(open(f"{folder}/{used}").read()) + room))
else:
    size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (size * 1024 + room,) * 2)
sys.exit(run_command(command))
"""


@dataclass(frozen=True)
class Group:
    """A control group, or none: then the child limits its own address space."""

    folder: str = ""
    limit: str = ""
    used: str = ""


@contextmanager
def memory_group() -> Iterator[Group]:
    """A fresh group for one process; one without a folder if this system does not grant it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        folder = top / path.lstrip("/") / f"lowtide-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / names[0]).exists():
                yield Group(str(folder), *names)
                return
        finally:
            folder.rmdir()
    yield Group()


def run_limited(room_bytes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """`lowtide COMMAND` in a process that may take `room_bytes` more than it has after its imports."""
    with memory_group() as group:

        def enter() -> None:
            if group.folder:
                Path(group.folder, "cgroup.procs").write_text(str(os.getpid()))

        order = json.dumps([group.folder, group.limit, group.used, room_bytes, 1, *command])
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return subprocess.run(
            [sys.executable, "-c", CHILD, order],
            preexec_fn=enter,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_plan_completes_where_eager_cannot(mode: str, tmp_path: Path) -> None:
    spec, file = TRAINING, tmp_path / "plan.lt"
    if mode == "infer":
        (tmp_path / "wide.py").write_text(WIDE)
        spec = f"{tmp_path / 'wide.py'}:wide"
    program = capture(load_workload(spec))
    parts = max(candidates(program.graph, (16,)), key=lambda each: len(each.axes))
    plan = build_plan(program, apply(program.graph, parts).graph)
    plan.save(file)
    state_bytes, plan_bytes = plan.resident_bytes, plan.predicted_peak_bytes - plan.resident_bytes
    order = [node.id for node in program.graph]
    eager_bytes = timeline(program.graph, order, probe(program.graph, "reference")).peak_above_bytes
    room = state_bytes + (eager_bytes + plan_bytes) // 2

    alone = run_limited(room, "measure", spec)
    assert alone.returncode in (-9, 2), alone.stderr
    record = tmp_path / "run.json"
    ours = run_limited(room, "run", str(file), spec, "--json", str(record))
    assert ours.returncode == 0, ours.stderr
    found = json.loads(record.read_text())
    assert found["verified"] == "reference"
    assert found["eager"]["predicted"] is True
    assert found["plan"]["bit_equal"] or found["plan"]["max_rel_error"] < 1e-5
    assert found["eager"]["peak_bytes"] - state_bytes > room - state_bytes > plan_bytes


def test_what_may_still_be_taken_is_the_least_that_the_kernel_tells(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert free_bytes(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert free_bytes(proc, groups) == 8000 * 1024
    (proc / "self" / "cgroup").write_text("4:memory:/a/b\n2:cpu:/\n0::/c\n")
    outer, inner, new = groups / "memory" / "a", groups / "memory" / "a" / "b", groups / "c"
    inner.mkdir(parents=True)
    new.mkdir()
    (outer / "memory.limit_in_bytes").write_text("5000000\n")
    (outer / "memory.usage_in_bytes").write_text("4000000\n")
    (outer / "memory.stat").write_text("total_inactive_file 300000\ntotal_active_file 200000\n")
    (inner / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (inner / "memory.usage_in_bytes").write_text("4000000\n")
    assert free_bytes(proc, groups) == 1_500_000
    (new / "memory.max").write_text("max\n")
    (new / "memory.current").write_text("7\n")
    assert free_bytes(proc, groups) == 1_500_000
    (new / "memory.max").write_text("1000\n")
    assert free_bytes(proc, groups) == 993


def test_errors_that_say_that_memory_is_out() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."))
    assert not out_of_memory(RuntimeError("shapes differ"))
    assert not out_of_memory(ValueError("out of memory"))
