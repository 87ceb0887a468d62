"""Peak memory and latency of a training step: what PyTorch offers, and plans of Lowtide beside it.

Run ``make bench-peers``, or ``python -m benchmarks.peers --help``.  A full run compiles some thirty variants,
20 to 40 processor seconds each; ``--quick`` sweeps 3 budgets instead of 11 and one hand checkpoint instead of
all.  ``--peers FILE`` takes the peers from the JSON of an earlier run, and measures ours only.

The JSON file is written after every row, so an interrupt loses one row.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.training.bench import Effort
from benchmarks.training.markdown import render
from benchmarks.training.picture import draw
from benchmarks.training.record import Comparison, Panel, Row, read_comparison, write_comparison
from benchmarks.training.rows import Asked, our_rows, peer_rows
from benchmarks.training.subjects import SUBJECTS
from benchmarks.training.variants import BUDGETS, QUICK_BUDGETS
from lowtide.errors import UsageError
from lowtide.units import parse_latency, parse_memory

__all__ = ["main"]

DEFAULT_MODELS = "gpt,gpt-explicit,unet,linear"
MODELS_HELP = f"of {', '.join(SUBJECTS)}; default {DEFAULT_MODELS}"


@dataclass(frozen=True)
class Request:
    """The command line, checked."""

    models: tuple[str, ...]
    asked: Asked
    earlier: Path | None
    cache: Path | None
    markdown: Path | None
    json: Path | None
    svg: Path | None
    note: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the Markdown, write the files; the exit status."""
    request = _request(arguments)
    machine = _machine(request.asked.effort.threads)
    comparison = Comparison(machine=machine, notes=(request.note,) if request.note else ())
    if request.earlier is not None:
        comparison = read_comparison(request.earlier)
    try:
        with _inductor_cache(request.cache):
            for panel in _panels(comparison, request):
                comparison = comparison.with_panel(panel)
                if request.json is not None:
                    write_comparison(comparison, request.json)
    except KeyboardInterrupt:
        print("interrupted: the table holds what was measured so far", file=sys.stderr)
    _write(comparison, request)
    return 0


def _panels(comparison: Comparison, request: Request) -> Iterator[Panel]:
    """The panels, each again after every row."""
    known = {panel.key: panel for panel in comparison.panels}
    for key in request.models:
        subject = SUBJECTS[key]
        panel = known.get(key, Panel(key, subject.title))
        for row in _rows(key, request):
            panel = panel.with_row(row)
            print(_summary(row), file=sys.stderr, flush=True)
            yield panel


def _rows(key: str, request: Request) -> Iterator[Row]:
    def tell(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {key}: {text}", file=sys.stderr, flush=True)

    if request.earlier is None:
        yield from peer_rows(SUBJECTS[key], request.asked, tell)
    yield from our_rows(SUBJECTS[key], request.asked, tell)


def _summary(row: Row) -> str:
    if row.figures is None:
        return f"         {row.problem}"
    return f"         {row.figures.above_bytes / 2**20:.1f} MiB, {row.figures.ratio:.2f}x eager"


def _write(comparison: Comparison, request: Request) -> None:
    text = render(comparison)
    print(text)
    if request.markdown is not None:
        request.markdown.write_text(text, encoding="utf-8")
    if request.json is not None:
        write_comparison(comparison, request.json)
    if request.svg is not None and any(row.figures for panel in comparison.panels for row in panel.rows):
        request.svg.write_text(draw(comparison), encoding="utf-8")


def _machine(threads: int) -> str:
    """ "torch 2.13.0, 2 threads, AMD EPYC, 2 cores, 2026-11-29"."""
    cores = len(os.sched_getaffinity(0))
    parts = (f"torch {torch.__version__}", f"{threads or torch.get_num_threads()} threads", _processor())
    return ", ".join((*parts, f"{cores} cores", time.strftime("%Y-%m-%d")))


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@contextmanager
def _inductor_cache(folder: Path | None) -> Iterator[None]:
    """Compiled code goes to `folder`, or to one that is removed afterwards; never to the user's own cache."""
    with tempfile.TemporaryDirectory(prefix="lowtide-peers-") as temporary:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder or temporary)
        yield


# -- command line -------------------------------------------------------------------------------------------


def _request(arguments: Sequence[str] | None) -> Request:
    parser = _parser()
    options = parser.parse_args(arguments)
    models = _items(options.models)
    unknown = [model for model in models if model not in SUBJECTS]
    if unknown:
        parser.error(f"--models: no model {unknown[0]!r}; there are {', '.join(SUBJECTS)}")
    for limit in _items(options.ours):
        _checked(parser, "--ours", parse_memory, limit)
    for limit in _items(options.ours_latency):
        _checked(parser, "--ours-latency", parse_latency, limit)
    for path in (options.markdown, options.json, options.svg):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    return Request(
        models,
        _asked(parser, options),
        options.peers,
        options.cache,
        options.markdown,
        options.json,
        options.svg,
        options.note,
    )


def _asked(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Asked:
    quick = options.quick
    budgets: tuple[float, ...] = QUICK_BUDGETS if quick else BUDGETS
    if options.budgets is not None:
        budgets = tuple(_checked(parser, "--budgets", float, text) for text in _items(options.budgets))
    effort = Effort(
        options.threads, options.rounds or (9 if quick else 31), 20.0 if quick else options.row_seconds
    )
    return Asked(
        effort,
        budgets,
        all_cuts=not quick,
        memory=_items(options.ours),
        latency=_items(options.ours_latency),
        search_s=options.ours_seconds,
    )


def _checked(parser: argparse.ArgumentParser, option: str, parse: object, text: str) -> float:
    assert callable(parse)
    try:
        return parse(text)  # type: ignore[no-any-return]
    except (UsageError, ValueError) as error:
        parser.error(f"{option}: {error}")


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", default=DEFAULT_MODELS, help=MODELS_HELP)
    add("--quick", action="store_true", help="3 budgets, one cut, 9 rounds")
    add("--budgets", help="activation_memory_budget values to sweep; default 11 from 0 to 0.9")
    add("--ours", default="60%,50%,40%", help='memory limits of ours, "" for none')
    add("--ours-latency", default="1.10x", help='latency limits of ours, "" for none')
    add("--ours-seconds", type=float, default=30.0, help="search time of each")
    add("--rounds", type=int, default=0, help="interleaved rounds a row; default 31")
    add("--row-seconds", type=float, default=60.0, help="most seconds for them; default 60")
    add("--threads", type=int, default=0, help="default: PyTorch's")
    add("--peers", type=Path, metavar="FILE", help="take the peers from this JSON file, measure ours")
    add("--cache", type=Path, metavar="FOLDER", help="keep Inductor's artefacts here between runs")
    add("--markdown", type=Path, metavar="FILE")
    add("--json", type=Path, metavar="FILE")
    add("--svg", type=Path, metavar="FILE")
    add("--note", default="", help="a line for the head of the table, such as what else was running")
    return parser


if __name__ == "__main__":
    sys.exit(main())
