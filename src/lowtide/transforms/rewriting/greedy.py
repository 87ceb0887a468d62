"""DNNFusion's driver: inside each partition, the rule with the largest reduction first, until none applies.

Method.  The sheet's algebraic cells fall into partitions: cells that operators with a mathematical property
connect; everything else cuts.  In a partition every rule is tried at every cell; a rewrite is worth the
FLOPs (then bytes) that the partition's results need less than before, on the site's own shapes and
sharing.  The best one is applied, and all are tried again.

Invariants.  Deterministic.  Every step lowers (FLOPs, bytes), so it ends; `Search.rounds` bounds it besides.
A result keeps its shape; whether it keeps its strides, the caller's `accepts` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lowtide.transforms.rewriting.matching import Binding, build, extend, matches
from lowtide.transforms.rewriting.record import Applied
from lowtide.transforms.rewriting.rule import Numerics, Rule
from lowtide.transforms.rewriting.sheet import Impossible, Sheet
from lowtide.transforms.rewriting.term import Apply

__all__ = ["Search", "partitions", "rewrite_partition"]

Cost = tuple[int, int]


@dataclass(frozen=True)
class Search:
    """Limits: rewrites of one partition, cells of a partition that is searched at all."""

    rounds: int = 64
    largest: int = 160


@dataclass(frozen=True)
class _Site:
    rule: Rule
    cell: int
    new: int
    roots: tuple[int, ...]
    saved: Cost


def partitions(sheet: Sheet, results: Iterable[int]) -> list[tuple[int, ...]]:
    """The cells that something else reads (`results`), grouped by shared algebraic cells, in order."""
    group: dict[int, int] = {}

    def find(cell: int) -> int:
        while group.setdefault(cell, cell) != cell:
            cell = group[cell]
        return cell

    wanted = [cell for cell in dict.fromkeys(results) if sheet.cells[cell].args]
    for number in sheet.live(wanted):
        for arg in sheet.cells[number].args:
            if sheet.cells[arg].args:
                group[find(arg)] = find(number)
    found: dict[int, list[int]] = {}
    for cell in wanted:
        found.setdefault(find(cell), []).append(cell)
    return [tuple(each) for each in found.values()]


def rewrite_partition(
    sheet: Sheet,
    roots: tuple[int, ...],
    rules: Mapping[str, Sequence[Rule]],
    accepts: Callable[[int, int], bool],
    search: Search,
) -> tuple[tuple[int, ...], list[Applied]]:
    """What each root is after rewriting, and what was applied.

    `rules`: by the operator at the root of their left side.  `accepts(root number, new cell)`.
    """
    applied: list[Applied] = []
    now = roots
    for _ in range(search.rounds):
        live = sheet.live(now)
        if len(live) > search.largest:
            break
        site = _best(sheet, now, live, rules, accepts)
        if site is None:
            break
        applied.append(Applied(site.rule.name, sheet.home.get(site.cell, -1), *site.saved))
        now = site.roots
    return now, applied


def _best(
    sheet: Sheet,
    roots: tuple[int, ...],
    live: Sequence[int],
    rules: Mapping[str, Sequence[Rule]],
    accepts: Callable[[int, int], bool],
) -> _Site | None:
    sites = list(_sites(sheet, roots, live, rules))
    for site in sorted(sites, key=lambda site: (-site.saved[0], -site.saved[1])):
        changed = [k for k, (a, b) in enumerate(zip(roots, site.roots, strict=True)) if a != b]
        if all(accepts(k, site.roots[k]) for k in changed):
            return site
    return None


def _sites(
    sheet: Sheet, roots: tuple[int, ...], live: Sequence[int], rules: Mapping[str, Sequence[Rule]]
) -> Iterator[_Site]:
    before = sheet.cost(live)
    tried: set[tuple[int, int]] = set()
    for cell in live:
        for rule in rules.get(sheet.cells[cell].op, ()):
            for binding, rest in list(matches(sheet, rule.pattern, cell, _regroups(rule))):
                new = _result(sheet, rule, cell, binding, rest)
                if new is None or (cell, new) in tried:
                    continue
                tried.add((cell, new))
                site = _priced(sheet, _Site(rule, cell, new, roots, before))
                if site is not None:
                    yield site


def _regroups(rule: Rule) -> bool:
    return rule.numerics is not Numerics.EXACT or rule.integers


def _result(sheet: Sheet, rule: Rule, cell: int, binding: Binding, rest: tuple[int, ...]) -> int | None:
    """The cell that takes the place of `cell`; None if the right side does not fit there."""
    assert isinstance(rule.pattern, Apply)
    floating = sheet.dtypes[cell]
    if floating is None or floating.is_floating_point == rule.integers:
        return None
    try:
        new = extend(sheet, rule.pattern.op, build(sheet, rule.result, binding), rest)
    except Impossible:
        return None
    return new if new != cell and sheet.shapes[new] == sheet.shapes[cell] and sheet.dtypes[new] else None


def _priced(sheet: Sheet, site: _Site) -> _Site | None:
    """The site with its roots rebuilt and its saving, if it saves."""
    try:
        roots = tuple(sheet.replaced(root, site.cell, site.new) for root in site.roots)
    except Impossible:
        return None
    after = sheet.cost(sheet.live(roots))
    saved = (site.saved[0] - after[0], site.saved[1] - after[1])
    return _Site(site.rule, site.cell, site.new, roots, saved) if saved > (0, 0) else None
