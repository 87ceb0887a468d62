"""Which stage an item joins: whether its axes split into the stage's rows and columns.

Problem.  Two loops can be one only if the second sees the first one's results at its own row.

Method.  `assign` puts an item into the first stage, not before what it reads, that `_fit` accepts; else it
opens one.  Sums over leading axes of contiguous rows run *across* the rows of a stage; other reductions
along them.  A product has a stage of its own, which stores join that read it exactly where it stands.

Not done here: loop variables and their splitting (`nest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lowtide.fusion.codegen.expr import walk
from lowtide.fusion.codegen.index import Index, Var, flatten
from lowtide.fusion.codegen.stage import Item, Stage, across

__all__ = ["assign", "axis_vars", "live"]


def axis_vars(item: Item) -> tuple[Index, ...]:
    return tuple(Index.of(Var(f"d{k}", size)) for k, size in enumerate(item.sizes))


def reads_of(item: Item) -> list[tuple[str, Index]]:
    """(reduction, place) that the item reads, over its own axes."""
    found = []
    for node in walk(item.build(axis_vars(item))):
        if node.leaf is not None and node.leaf.kind == "reduced":
            found.append((node.leaf.source, node.leaf.index))
    return found


def live(items: Sequence[Item]) -> frozenset[str]:
    """Reductions that some store needs."""
    needed: set[str] = set()
    for item in reversed(items):
        if item.store is not None or item.name in needed:
            needed.update(source for source, _ in reads_of(item))
    return frozenset(needed)


def assign(item: Item, stages: list[Stage], home: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Put `item` into the first stage that fits, or open one; returns its number."""
    references = reads_of(item)
    first = max((ready for _, ready in (home[source] for source, _ in references)), default=0)
    for number in range(first, len(stages)):
        stage = stages[number]
        local = [place for source, place in references if home[source][0] == number]
        split = _fit(item, stage, local)
        if split is not None:
            stage.members.append((item, *split))
            return _home(item, number, split[0])
    stages.append(_open(item))
    members = stages[-1].members
    return _home(item, len(stages) - 1, members[0][1] if members else ())


def _home(item: Item, number: int, rows: tuple[int, ...]) -> tuple[int, int]:
    """(stage, first stage that may read the result)."""
    return number, number + 1 if across(item, rows) else number


def _open(item: Item) -> Stage:
    axes = tuple(range(len(item.sizes)))
    if item.contraction is not None:
        batch, m, n, _ = item.sizes
        return Stage(batch * m, n, product=item.contraction)
    if item.kept is None:
        return Stage(0, item.numel, [(item, (), _memory_order(item))])
    rows, cols = axes[: item.kept], axes[item.kept :]
    if _sums_rows(item):
        rows, cols = cols, rows
    return Stage(prod(item.sizes[k] for k in rows), prod(item.sizes[k] for k in cols), [(item, rows, cols)])


def _sums_rows(item: Item) -> bool:
    """Whether a reduction is best run as sums across contiguous rows (a bias gradient)."""
    reduction, kept = item.reduction, item.kept
    if reduction is None or kept is None or reduction.kind != "sum" or not reduction.dtype.is_floating_point:
        return False
    width, depth = prod(item.sizes[:kept]), prod(item.sizes[kept:])
    if not 32 <= width <= 4096 or depth < 2:
        return False
    axes = [Var(f"d{k}", size) for k, size in enumerate(item.sizes)]
    inner = next((axis for axis in reversed(axes[:kept]) if axis.size > 1), axes[0])
    last = next((axis for axis in reversed(axes[kept:]) if axis.size > 1), axes[-1])
    score = 0
    for node in walk(item.build(axis_vars(item))):
        if node.leaf is not None and node.leaf.kind == "load":
            score += (node.leaf.index.coefficient(inner) == 1) - (node.leaf.index.coefficient(last) == 1)
    return score > 0


def _memory_order(item: Item) -> tuple[int, ...]:
    """The axes of a store as they lie in memory, outermost first."""
    assert item.store is not None
    stride = item.store.stride
    return tuple(
        sorted(range(len(item.sizes)), key=lambda k: -stride[k] if item.sizes[k] > 1 else -(1 << 62))
    )


def _fit_flat(item: Item, stage: Stage) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A store of the same shape joins in the stage's order of axes; of another shape, if all are plain."""
    if item.kept is not None or item.numel != stage.cols:
        return None
    first, _, order = stage.members[0]
    if item.sizes == first.sizes:
        return (), order
    plain = order == tuple(sorted(order)) and _memory_order(item) == tuple(range(len(item.sizes)))
    return ((), tuple(range(len(item.sizes)))) if plain else None


def _fit(item: Item, stage: Stage, local: Sequence[Index]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How the item's axes split into the stage's rows and columns; None if they do not."""
    axes = tuple(k for k, size in enumerate(item.sizes) if size > 1)
    if item.contraction is not None:
        return None
    if stage.product is not None:
        return _fit_product(item, stage, local)
    if stage.flat:
        return None if local else _fit_flat(item, stage)
    if item.kept is None and stage.cols <= 1:
        return None
    if item.kept is not None and not _joins(item, stage, local):
        return None
    rows = _row_axes(item, stage, local, axes)
    if rows is None:
        return None
    cols = tuple(k for k in axes if k not in rows)
    width = prod(item.sizes[k] for k in cols)
    if prod(item.sizes[k] for k in rows) != stage.rows or (
        width != stage.cols and (width != 1 or item.kept is not None)
    ):
        return None
    row = flatten([axis_vars(item)[k] for k in rows], [item.sizes[k] for k in rows])
    return (rows, cols) if all(place == row for place in local) else None


def _fit_product(
    item: Item, stage: Stage, local: Sequence[Index]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A store that reads the product exactly where it stands, whatever order of axes it stores in."""
    if item.store is None or item.numel != stage.rows * stage.cols or not local:
        return None
    order = _decode(local[0], item)
    if order is None or any(place != local[0] for place in local):
        return None
    rows = _take(item, stage.rows, order)
    fits = prod(item.sizes[k] for k in rows) == stage.rows and len(order) == sum(s > 1 for s in item.sizes)
    return (rows, order[len(rows) :]) if fits else None


def _joins(item: Item, stage: Stage, local: Sequence[Index]) -> bool:
    """Whether a reduction may join: sums across rows ride on any pass over contiguous rows, others need a
    stage whose own reductions run along its rows."""
    return not _adds_across(stage) or (_sums_rows(item) and not local)


def _turned(item: Item, stage: Stage) -> bool:
    """Whether a reduction joins as a sum across the stage's rows."""
    first = stage.members[0][0].reduction if stage.members else None
    along = first is not None and first.trailing
    return _sums_rows(item) and (_adds_across(stage) or along)


def _adds_across(stage: Stage) -> bool:
    """Whether the stage was opened by a sum across its rows."""
    return bool(stage.members) and across(*stage.members[0][:2])


def _row_axes(
    item: Item, stage: Stage, local: Sequence[Index], axes: Sequence[int]
) -> tuple[int, ...] | None:
    if item.kept is not None:
        turned = _turned(item, stage)
        return tuple(k for k in axes if (k >= item.kept) == turned)
    if local:
        return _decode(local[0], item)
    first = stage.members[0][0].reduction if stage.members else None
    if first is not None and not first.trailing and not _adds_across(stage):  # its rows are the last axes
        return tuple(reversed(_take(item, stage.rows, tuple(reversed(axes)))))
    return _take(item, stage.rows, axes)


def _take(item: Item, rows: int, axes: Sequence[int]) -> tuple[int, ...]:
    """As many of `axes` as make up `rows` points."""
    taken: list[int] = []
    for axis in axes:
        if prod(item.sizes[k] for k in taken) >= rows:
            break
        taken.append(axis)
    return tuple(taken)


def _decode(place: Index, item: Item) -> tuple[int, ...] | None:
    """The axes, outermost first, of which `place` is the row-major position; None if it is not one."""
    if not place.linear or place.constant:
        return None
    numbers = {var: k for k, var in enumerate(Var(f"d{k}", size) for k, size in enumerate(item.sizes))}
    terms = sorted(((c, a) for a, c in place.terms if isinstance(a, Var)), key=lambda term: term[0])
    step, axes = 1, []
    for coefficient, var in terms:
        if coefficient != step:
            return None
        axes.append(numbers[var])
        step *= var.size
    return tuple(reversed(axes))
