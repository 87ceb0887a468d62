"""What it costs to make kernels for BERT-base: CPU seconds, cold and from the cache, stage by stage.

    python bench/compiling.py [WORKLOAD]

Each run is a fresh process; the first has an empty cache folder, the second the first one's.  CPU seconds of
the process and its children (the compiler).  Imports and capture are apart: they are not compilation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKLOAD = "bert-base:batch=1,seq=128,mode=infer"


def cpu_seconds() -> float:
    """User and system time of this process and the children it waited for."""
    return sum(os.times()[:4])


def stages(text: str) -> dict[str, float]:
    """CPU seconds of capture, rewriting, planning and compiling."""
    from bench.steps import fused_graph
    from lowtide.capture.door import capture
    from lowtide.fusion.codegen.library import compile_bodies
    from lowtide.ir.ops import Fused
    from lowtide.transforms.rewriting.derived import split_derived
    from lowtide.transforms.rewriting.rewrite import RewriteOptions, rewrite
    from lowtide.workloads.parse import load_workload

    workload = load_workload(text)
    marks = [("start", cpu_seconds())]
    program = capture(workload)
    marks.append(("capture", cpu_seconds()))
    plain = split_derived(rewrite(program.graph, RewriteOptions(derive=True)).graph).graph
    marks.append(("rewrite", cpu_seconds()))
    graph = fused_graph(plain)
    marks.append(("plan", cpu_seconds()))
    compile_bodies([node.op.body for node in graph.nodes if isinstance(node.op, Fused)], keep=True)
    marks.append(("compile", cpu_seconds()))
    return {name: now - before for (_, before), (name, now) in pairwise(marks)}


def main() -> None:
    text = sys.argv[1] if len(sys.argv) > 1 else WORKLOAD
    if "--one" in sys.argv:
        print(json.dumps(stages(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "cached"):
            path = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
            environment = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPATH": path}
            command = [sys.executable, __file__, "--one", text]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            took = json.loads(done.stdout.splitlines()[-1])
            made = sum(took[stage] for stage in ("rewrite", "plan", "compile"))
            print(f"{name:7} {made:6.2f} CPU-s  " + "  ".join(f"{k} {v:.2f}" for k, v in took.items()))


if __name__ == "__main__":
    main()
