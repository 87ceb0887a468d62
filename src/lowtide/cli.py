"""The command line: `lowtide optimize | explore | measure | run | explain | workloads`.

Problem.  A user types; every mistake has to end in one clear line on standard error and the documented
status, never in a traceback.

Method.  The commands check everything that can be checked (units, paths, options) before they build a
model or start a search.  `run_command` is the only place that turns errors into statuses: 0 met, 2 a
user's error, 3 infeasible, 130 interrupted before a plan met the limit, and 1 for a fault of Lowtide's own.
Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from lowtide import __version__
from lowtide.errors import Infeasible, LowtideError, UsageError
from lowtide.terminal import engine
from lowtide.terminal.progress import show_progress
from lowtide.terminal.record import (
    check_writable,
    frontier_record,
    measurement_record,
    outcome_record,
    write_record,
)
from lowtide.terminal.tables import (
    limit_line,
    print_accuracy,
    print_frontier,
    print_measurement,
    print_outcome,
    print_workloads,
)
from lowtide.units import parse_latency, parse_memory

__all__ = ["app", "main", "run_command"]

MET, OWN_FAULT, USER_ERROR, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130
COMMAND_LINE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]  # typer does not export it

ABOUT = """Run a PyTorch training step or inference within a memory or latency limit, with eager's numbers.

WORKLOAD is a bundled model with options, or a function of your own:

    unet:batch=8,size=128,mode=train          (see: lowtide workloads)

    train.py:make_workload                    (a function that returns a lowtide.Workload)

Exit status: 0 limit met, 2 your input is wrong (one line says what), 3 no plan can meet the limit (the
floor is printed), 130 interrupted before a plan met the limit.
"""

app = typer.Typer(
    name="lowtide",
    help=ABOUT,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

WorkloadText = Annotated[
    str,
    typer.Argument(metavar="WORKLOAD", help="NAME:option=value,... or FILE.py:FUNCTION", show_default=False),
]
PlanFile = Annotated[Path, typer.Argument(metavar="F.lt", help="A saved plan.", show_default=False)]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="F.json", help="Write the figures here.")]
ReportFile = Annotated[Path | None, typer.Option("--report", metavar="F.html", help="Write a report here.")]
Seconds = Annotated[float, typer.Option(help="How long to search; stops earlier when nothing is left.")]
Seed = Annotated[int, typer.Option(help="Seed of the search.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="Predict for this device: rtx3090 or h200.")]


@app.callback(invoke_without_command=True)
def lowtide(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"lowtide {__version__}")
        raise typer.Exit(MET)


@app.command()
def optimize(
    workload: WorkloadText,
    memory: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Total peak: 50% of eager's, or 2GiB.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="LIMIT", help="Latency of a step: 1.1x eager's.")
    ] = None,
    seconds: Seconds = 30.0,
    seed: Seed = 0,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads; default: torch's own.")] = None,
    rng: Annotated[
        Literal["eager", "philox"], typer.Option(help="Draw as eager does, or by counter (parts may redraw).")
    ] = "eager",
    device: Device = None,
    no_fuse: Annotated[bool, typer.Option("--no-fuse", help="Never fuse operators.")] = False,
    no_swap: Annotated[bool, typer.Option("--no-swap", help="Never swap to host memory or disk.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="F.lt", help="Save the plan here.")] = None,
    report: ReportFile = None,
    json: JsonFile = None,
) -> None:
    """Find a plan within a limit, verify it against eager, run it and measure it.

    Under a memory limit the fastest plan that fits is sought, under a latency limit the smallest one that
    is fast enough.  Ctrl-C stops the search and keeps the best verified plan found so far.

    Examples:

        lowtide optimize unet:batch=8,size=128 --memory 50% --report r.html

        lowtide optimize gpt2:layers=4,seq=256 --latency 1.1x --save gpt2.lt

        lowtide optimize train.py:make_workload --memory 2GiB --json f.json
    """
    _check_limit(memory, latency)
    _check_at_least("--seconds", seconds, 0)
    _check_at_least("--threads", threads, 1)
    check_writable({"--save": save, "--report": report, "--json": json})
    request = engine.Request(memory, latency, seconds, seed, threads, rng, device, not no_fuse, not no_swap)
    built = engine.load_workload(workload, device)
    with show_progress(Console(stderr=True)) as on_progress:
        outcome = engine.optimize(built, request, on_progress)
        outcome = engine.measure_fresh(outcome, workload)
    if save is not None:
        outcome.plan.save(save)
    if json is not None:
        write_record(json, outcome_record(workload, outcome))
    if report is not None:
        engine.write_report(outcome, report)
    print_outcome(Console(), workload, outcome)
    if outcome.met:
        return
    if outcome.search.stop_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)
    raise Infeasible(
        f"no plan was found for {limit_line(outcome.limit)}",
        floor_bytes=outcome.floor_bytes,
        node=outcome.floor_node,
        remedy="raise the limit or search longer (--seconds)",
    )


@app.command()
def explore(
    workload: WorkloadText,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    device: Device = None,
    report: ReportFile = None,
    json: JsonFile = None,
) -> None:
    """Search the whole trade-off between memory and latency.

    The report shows the frontier and, as its example, the smallest plan within 1.1x of eager's latency.

    Example:

        lowtide explore unet:batch=8,size=128 --seconds 60 --report frontier.html
    """
    _check_at_least("--seconds", seconds, 0)
    check_writable({"--report": report, "--json": json})
    built = engine.load_workload(workload, device)
    with show_progress(Console(stderr=True)) as on_progress:
        frontier = engine.explore(built, seconds=seconds, seed=seed, device=device, on_progress=on_progress)
    if json is not None:
        write_record(json, frontier_record(workload, frontier))
    print_frontier(Console(), workload, frontier)
    if report is not None:
        engine.write_report(frontier.pick_outcome(latency="1.1x"), report)


@app.command()
def measure(workload: WorkloadText, json: JsonFile = None) -> None:
    """Run the workload eagerly and measure it, the same way as plans are measured.

    Example:

        lowtide measure gpt2:layers=4,dim=256,heads=4,seq=256,batch=8,vocab=4096
    """
    check_writable({"--json": json})
    measurement = engine.measure(engine.load_workload(workload))
    if json is not None:
        write_record(json, {"workload": workload, "device": "cpu", "eager": measurement_record(measurement)})
    print_measurement(Console(), workload, measurement)


@app.command()
def run(
    plan: PlanFile,
    workload: WorkloadText,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to run.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(metavar="F.json", help="Write a trace of one step here, for Perfetto.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Run a saved plan, measure it and compare it with eager.

    A trace (Chrome format) has every step as measured beside the same steps as predicted, with operator,
    module, source line, part, copies, and the live bytes; open it at ui.perfetto.dev.

    Examples:

        lowtide run unet.lt unet:batch=8,size=128,width=16 --steps 20

        lowtide run unet.lt unet:batch=8,size=128,width=16 --trace trace.json
    """
    _check_at_least("--steps", steps, 1)
    _check_file(plan)
    check_writable({"--trace": trace, "--json": json})
    outcome = engine.run_plan(plan, engine.load_workload(workload), steps=steps, trace=trace)
    outcome = engine.measure_fresh(outcome, workload)
    if json is not None:
        write_record(json, outcome_record(workload, outcome))
    print_outcome(Console(), workload, outcome)


@app.command()
def explain(
    plan: PlanFile,
    workload: Annotated[
        str | None,
        typer.Argument(metavar="[WORKLOAD]", help="For --estimator, where it is not a bundled one."),
    ] = None,
    estimator: Annotated[
        bool, typer.Option("--estimator", help="Run it; predicted and measured time by family of operators.")
    ] = False,
) -> None:
    """Tell what a saved plan does: its recipe, who is alive at the peak, the floor.

    Examples:

        lowtide explain unet.lt

        lowtide explain unet.lt --estimator
    """
    _check_file(plan)
    if estimator:
        print_accuracy(Console(), engine.judge_estimator(plan, workload))
        return
    if workload is not None:
        raise UsageError(
            "a workload is only needed to run the plan", remedy="add --estimator, or leave it out"
        )
    print(engine.explain(plan))


@app.command()
def workloads() -> None:
    """List the bundled workloads with their options and defaults."""
    print_workloads(Console())


def _check_limit(memory: str | None, latency: str | None) -> None:
    if (memory is None) == (latency is None):
        given = "no limit" if memory is None else "two limits"
        raise UsageError(f"{given} given", remedy="give one of --memory 50% (or 2GiB) and --latency 1.1x")
    if memory is not None:
        parse_memory(memory)
    if latency is not None:
        parse_latency(latency)


def _check_at_least(option: str, number: float | None, least: float) -> None:
    if number is not None and not number >= least:
        raise UsageError(f"{option} {number:g} is too small", remedy=f"use {least:g} or more")


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"there is no plan file {path}", remedy="make one with lowtide optimize --save")


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line; the exit status."""
    try:
        status = app(args=list(arguments) or ["--help"], prog_name="lowtide", standalone_mode=False)
    except COMMAND_LINE_ERROR as error:
        return _fail(_usage_line(error), USER_ERROR)
    except Infeasible as error:
        return _fail(_infeasible_line(error), error.exit_status)
    except LowtideError as error:
        return _fail(str(error), error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        return _fail(*_unexpected(error))
    if status == INTERRUPTED:  # typer turns Ctrl-C into a silent status
        return _fail("interrupted before a plan met the limit", INTERRUPTED)
    return status if isinstance(status, int) else MET


def _fail(line: str, status: int) -> int:
    print(f"lowtide: {' '.join(line.split())}", file=sys.stderr)
    return status


def _usage_line(error: Exception) -> str:
    """What typer found wrong, and where the help is."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "lowtide"
    return f"{message.rstrip('.')}; see `{command} --help`"


def _infeasible_line(error: Infeasible) -> str:
    """The message, with the floor in bytes and its node where it does not name them itself."""
    message = str(error)
    floor = str(error.floor_bytes)
    digits = message.replace(",", "")
    missing = [] if floor in digits else [f"floor {floor} bytes"]
    if error.node and error.node not in message:
        missing.append(f"at {error.node}")
    return f"{message} [{' '.join(missing)}]" if missing else message


def _unexpected(error: Exception) -> tuple[str, int]:
    """An error that nothing foresaw: the machine's, the user's code's if raised there, else ours."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError | MemoryError) or "can't allocate memory" in what:
        return what, USER_ERROR
    ours = Path(__file__).parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for file, line in reversed(frames):
        foreign = "site-packages" in file.parts or Path(sys.base_prefix) in file.parents
        if file.is_file() and not foreign and ours not in file.parents:
            return f"{what} (at {file}:{line})", USER_ERROR
    file, line = frames[-1]
    return f"{what} (inside Lowtide {__version__}, at {file.name}:{line}); please report it", OWN_FAULT


def main() -> None:
    """The console script."""
    sys.exit(run_command(sys.argv[1:]))
