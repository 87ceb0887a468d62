"""The rows of one model's table, measured one after the other.

Every row is measured in a fresh process.  Where a way has a choice to make (a budget, the cut of a hand
checkpoint) all choices are measured briefly, and the one with the least peak again in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.training.bench import Effort, Ours, OursBench, PeerBench, TurnBench
from benchmarks.training.gauge import summarise
from benchmarks.training.process import Failed, worker
from benchmarks.training.record import Figures, Row, least
from benchmarks.training.subjects import Subject
from benchmarks.training.variants import Variant

__all__ = ["Asked", "our_rows", "peer_rows"]

# No block is mapped alone and none is given back, so pages are touched once and not at every operator.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
BRIEF_ROUNDS = 3

Told = Callable[[str], None]


@dataclass(frozen=True)
class Asked:
    """What to measure: the `budgets` to sweep, all cuts or only the first, limits for ours as text."""

    effort: Effort
    budgets: tuple[float, ...]
    all_cuts: bool = True
    memory: tuple[str, ...] = ()
    latency: tuple[str, ...] = ()
    search_s: float = 30.0


def peer_rows(subject: Subject, asked: Asked, told: Told) -> Iterator[Row]:
    """The rows of what PyTorch offers, as they are measured; `told` hears what starts."""
    effort = asked.effort
    cuts = tuple(subject.cuts)[: None if asked.all_cuts else 1]
    yield _single("eager", subject, Variant(), effort, told)
    yield _tuned(subject, effort, told)
    if cuts:
        yield _best("eager + checkpoint per block", subject, _cuts(cuts, False), effort, told)
    yield _single("torch.compile", subject, Variant(compile=True), effort, told)
    if subject.budgets and asked.budgets:
        choices = [(f"{budget:g}", Variant(compile=True, budget=budget)) for budget in asked.budgets]
        best = _best("compile, best memory budget", subject, choices, effort, told)
        yield best
        yield from _aggressive(best)
    if cuts:
        yield _best("compile + checkpoint per block", subject, _cuts(cuts, True), effort, told)
    if subject.auto_chunker:
        chunked = Variant(compile=True, auto_chunker=True)
        yield _single("compile + auto_chunker", subject, chunked, effort, told)
    if subject.linear_head:
        yield _single("F.linear_cross_entropy", subject, Variant(fused_loss=True), effort, told)


def our_rows(subject: Subject, asked: Asked, told: Told) -> Iterator[Row]:
    """The rows of Lowtide's plans, one a limit."""
    limits = [Ours(memory=text, seconds=asked.search_s) for text in asked.memory]
    limits += [Ours(latency=text, seconds=asked.search_s) for text in asked.latency]
    for ours in limits:
        label = f"ours, memory {ours.memory}" if ours.memory else f"ours, latency {ours.latency}"
        told(label)
        with worker(OursBench, subject.key, ours, asked.effort) as bench:
            try:
                yield Row(label, "ours", bench.call("measure"))
            except Failed as failure:
                yield Row(label, "ours", problem=_why(str(failure)))


def _cuts(cuts: Sequence[str], compile: bool) -> list[tuple[str, Variant]]:
    return [(cut, Variant(compile=compile, cut=cut)) for cut in cuts]


def _single(label: str, subject: Subject, variant: Variant, effort: Effort, told: Told) -> Row:
    told(label)
    series = "eager" if variant == Variant() else "peer"
    figures, problem = _measure(subject, variant, effort)
    return Row(label, series, figures, problem=problem)  # type: ignore[arg-type]


def _best(
    label: str, subject: Subject, choices: Sequence[tuple[str, Variant]], effort: Effort, told: Told
) -> Row:
    """The choice with the least peak; one that is alone is measured once."""
    if len(choices) == 1:
        (choice, variant) = choices[0]
        return replace(_single(label, subject, variant, effort, told), choice=choice)
    brief = replace(effort, rounds=BRIEF_ROUNDS)
    tried: list[tuple[str, Figures | None]] = []
    problem = ""
    for choice, variant in choices:
        told(f"{label}: {choice}")
        figures, problem = _measure(subject, variant, brief)
        tried.append((choice, figures))
    chosen = least(tried)
    if chosen is None:
        return Row(label, "peer", problem=problem or "all choices have wrong gradients", others=tuple(tried))
    told(f"{label}: {chosen} again")
    figures, problem = _measure(subject, dict(choices)[chosen], effort)
    return Row(label, "peer", figures, chosen, problem, tuple(tried))


def _aggressive(best: Row) -> Iterator[Row]:
    """Budget 0 as a row of its own: what one would expect to be the least."""
    figures = dict(best.others).get("0")
    if figures is not None:
        yield Row("compile, memory budget 0", "peer", figures)


def _measure(subject: Subject, variant: Variant, effort: Effort) -> tuple[Figures | None, str]:
    with worker(PeerBench, subject.key, variant, effort) as bench:
        try:
            return bench.call("measure"), ""
        except Failed as failure:
            return None, str(failure)


def _tuned(subject: Subject, effort: Effort, told: Told) -> Row:
    """Eager where malloc keeps its pages, in turns with a process where it does not."""
    label = "eager, tuned malloc"
    told(label)
    brief = replace(effort, rounds=BRIEF_ROUNDS, seconds=0.0)
    try:
        with worker(PeerBench, subject.key, Variant(), brief, environment=TUNED_MALLOC) as bench:
            figures: Figures = bench.call("measure")
        with (
            worker(TurnBench, subject.key, effort) as usual,
            worker(TurnBench, subject.key, effort, environment=TUNED_MALLOC) as tuned,
        ):
            turns = max(BRIEF_ROUNDS, min(effort.rounds, int(effort.seconds / (6 * figures.latency_s))))
            times = [(usual.call("turn"), tuned.call("turn"), usual.call("turn")) for _ in range(turns)]
    except Failed as failure:
        return Row(label, "peer", problem=str(failure))
    rounds = summarise(times)
    timed = replace(
        figures,
        latency_s=rounds.latency_s,
        ratio=rounds.ratio,
        noise=rounds.noise,
        processor_ratio=rounds.processor_ratio,
        rounds=rounds.rounds,
    )
    return Row(label, "peer", timed)


def _why(problem: str) -> str:
    """A missing part of Lowtide is one clear line; a refusal already is one."""
    if problem.startswith(("ImportError", "ModuleNotFoundError", "AttributeError")):
        return f"not available in this version ({problem})"
    return problem
