"""Frozen training graphs: optimise one file under a limit, or print the table of all against the baselines.

    python bench/frozen.py FILE.json (--latency 1.10 | --memory 0.40) [--seconds 60] [--seed 0] -o OUT.json
    python bench/frozen.py --table DIR [--seconds 60] [--only NAME,...]

DIR holds the files and their judges: `simulate.py` scores what was written, `check.py` refuses what is not
the same step or is priced wrongly.  `--numbers` also runs base and best at reduced size and compares every
weight's update.  `--fuse` lets masks and products run as one kernel, which the published tables do not
have.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from bench.training_graphs.baselines import BASELINES, published_row  # noqa: E402
from bench.training_graphs.equality import largest_difference  # noqa: E402
from bench.training_graphs.files import graph_of, read, record_of, write  # noqa: E402
from bench.training_graphs.optimise import Best, Goal, optimise, warm_up  # noqa: E402

TOLERANCE = 1e-9
GOALS = (("latency", 1.10), ("latency", 1.05), ("memory", 0.40))
TARGETS = {
    "bert_b32": (0.15, 0.22, 1.005),
    "vit_b64": (0.15, 0.22, 1.03),
    "resnet50_b64": (0.28, 0.45, 1.07),
    "unet_b32": (0.055, 0.11, 1.005),
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path)
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--latency", type=float, help="at most this many times the recorded latency")
    limit.add_argument("--memory", type=float, help="at most this part of the recorded peak")
    limit.add_argument("--table", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--fuse", action="store_true")
    options = parser.parse_args()
    warm_up()
    if options.table:
        return table(options)
    if options.file is None or (options.latency is None and options.memory is None):
        parser.error("give FILE with --latency or --memory, or --table DIR")
    record = read(options.file)
    best, result = solve(record, options, latency=options.latency, memory=options.memory)
    print(describe(record, best))
    if options.numbers:
        difference = largest_difference(graph_of(record["base"]), best.graph)
        print(f"largest difference of an update at reduced size: {difference:.1e}")
        if difference > TOLERANCE:
            return 1
    if options.output:
        write(options.output, result)
    return 0 if best.met else 3


def solve(
    record: dict[str, Any], options: argparse.Namespace, **limit: float | None
) -> tuple[Best, dict[str, Any]]:
    """The best result and its record."""
    base = record["base"]["sim"]
    goal = Goal(base["latency_ms"], base["peak_bytes"], **limit)
    best = optimise(graph_of(record["base"]), record["hw"], goal, options.seconds, options.seed, options.fuse)
    sim = {"latency_ms": best.latency_ms, "peak_bytes": best.peak_bytes}
    return best, {**record, "best": {**record_of(best.graph, record["hw"]), "sim": sim}}


def describe(record: dict[str, Any], best: Best) -> str:
    """One line about a result."""
    base = record["base"]["sim"]
    latency, peak = best.latency_ms / base["latency_ms"], best.peak_bytes / base["peak_bytes"]
    moves = " ".join(f"{name}={count}" for name, count in best.decisions.items())
    speed = best.states / best.seconds
    return f"{record['workload']}: {latency:.4f}x {peak:.4f} | {moves} | {best.states} states, {speed:.0f}/s"


def table(options: argparse.Namespace) -> int:
    """Baselines and our results, each judged by the folder's judges."""
    faults = 0
    for name in options.only.split(","):
        record = read(options.table / f"{name}.json")
        print(f"\n## {name}\n\n| | latency | peak | target | judged |\n|---|---|---|---|---|")
        print("\n".join(_baseline_rows(record)), flush=True)
        for (kind, bound), target in zip(GOALS, TARGETS.get(name, (None,) * 3), strict=True):
            best, result = solve(record, options, **{kind: bound})
            out = Path(options.output or "/tmp") / f"{name}.{kind}{bound}.json"
            write(out, result)
            verdict = judged(options.table, out, options.table / f"{name}.json")
            faults += verdict != "ok"
            print(f"| {kind} <= {bound} | {_pair(record, best)} | {target} | {verdict} |", flush=True)
            print(f"<!-- {describe(record, best)} {best.structure} -->", flush=True)
    return int(faults > 0)


def _pair(record: dict[str, Any], best: Best) -> str:
    base = record["base"]["sim"]
    return f"{best.latency_ms / base['latency_ms']:.4f} | {best.peak_bytes / base['peak_bytes']:.4f}"


def _baseline_rows(record: dict[str, Any]) -> Iterator[str]:
    for name, run in BASELINES.items():
        latency, peak = run(record)
        yield f"| {name} | {latency:.3f} | {peak:.3f} | {published_row(record['workload'], name)} | |"


def judged(folder: Path, result: Path, base: Path) -> str:
    """What the judges say: ok, or their words."""
    calls = (["simulate.py", result], ["check.py", result, base])
    for call in calls:
        done = subprocess.run(
            [
                sys.executable,
                *map(str, [(folder / str(call[0])).resolve(), *map(Path.resolve, map(Path, call[1:]))]),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return (done.stdout + done.stderr).strip().splitlines()[-1]
    return "ok"


if __name__ == "__main__":
    sys.exit(main())
