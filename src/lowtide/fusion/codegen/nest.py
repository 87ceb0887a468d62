"""Which loops a kernel runs: stages of rows, and the passes over a row.

Problem.  Softmax needs three passes over a row, layer norm three, their backward two sums and a map.  Run one
after the other over the whole tensor, each pass streams it through memory again; run row by row, the
row stays in L1 (AStitch's *regional* scheme; its *global* scheme is two stages with a barrier).

Method.  Every reduction and every store is an item over its own axes.  A stage is a space of `rows` x `cols`;
an item joins a stage if its axes split into row axes and column axes of these sizes such that it sees the
stage's reductions only at its own row.  Items that cannot (a bias gradient reads all rows) open another
stage.  Axes are then flattened into one row and one column variable and split again only where an index
divides, so contiguous tensors of any rank run as one plain loop.

Invariants.  Stages run in order with a barrier between them; a reduction read outside its stage goes through
scratch memory.  Within a stage, pass k may read reductions of passes < k at the same row.
Not done here: tiling of transposes and C text (`c`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.fit import assign, live
from lowtide.fusion.codegen.index import Index, Quotient, Remainder, Var, unflatten
from lowtide.fusion.codegen.stage import Item, Placed, Stage, across
from lowtide.fusion.codegen.tensor import Contraction, Kernel, Reduction, Unfusable

__all__ = ["plan_stages"]


def _items(kernel: Kernel) -> Iterator[Item]:
    for reduction in kernel.reductions:
        if isinstance(reduction, Contraction):
            yield _product_item(kernel, reduction)
            continue
        count = len(reduction.kept)

        def build(ix: tuple[Index, ...], r: Reduction = reduction, n: int = count) -> Expr:
            return r.element(ix[:n], ix[n:])

        yield Item(reduction.name, reduction.kept + reduction.reduced, count, build, reduction=reduction)
    for number, store in enumerate(kernel.stores):
        yield Item(f"s{number}", store.tensor.shape, None, store.tensor.at, store=store)


def _product_item(kernel: Kernel, product: Contraction) -> Item:
    def build(ix: tuple[Index, ...]) -> Expr:
        batch, m, n, k = ix
        return kernel.builder.apply("mul", product.left(batch, m, k), product.right(batch, k, n))

    return Item(product.name, product.sizes, 3, build, contraction=product)


def plan_stages(kernel: Kernel) -> tuple[Stage, ...]:
    """Stages that compute everything the stores need, in order."""
    items = [item for item in _items(kernel) if item.store is None or item.numel]
    needed = live(items)
    stages: list[Stage] = []
    home: dict[str, tuple[int, int]] = {}
    for item in items:
        if item.store is not None or item.name in needed:
            home[item.name] = assign(item, stages, home)
    for stage in stages:
        _settle(stage)
    stages = _merge_columns(stages)
    _check_writes(stages)
    return tuple(stages)


def _settle(stage: Stage) -> None:
    """Choose the loop variables: flatten, then split where an index divides."""
    row_cuts: tuple[int, ...] = ()
    col_cuts: tuple[int, ...] = ()
    for _ in range(4):
        stage.row_parts, stage.row = _parts("r", stage.rows, row_cuts)
        stage.col_parts, stage.col = _parts("c", stage.cols, col_cuts)
        stage.placed = tuple(_place(stage, *member) for member in stage.members)
        more_rows = _cuts(stage, stage.row_parts, stage.rows, row_cuts)
        more_cols = _cuts(stage, stage.col_parts, stage.cols, col_cuts)
        if (more_rows, more_cols) == (row_cuts, col_cuts):
            return
        row_cuts, col_cuts = more_rows, more_cols


def _merge_columns(stages: list[Stage]) -> list[Stage]:
    """Let column sums ride on an earlier pass over the same rows (layer norm's backward: one read)."""
    result: list[Stage] = []
    for stage in stages:
        host = next((old for old in result if _can_ride(stage, old, result)), None)
        if host is None:
            result.append(stage)
            continue
        host.members.extend(
            (item, cols, rows) for item, rows, cols in stage.members if item.reduction is not None
        )
        _settle(host)
        stores = [item for item, _, _ in stage.members if item.store is not None]
        if stores:
            after = Stage(0, stage.rows, [(item, (), tuple(range(len(item.sizes)))) for item in stores])
            _settle(after)
            result.append(after)
    return result


def _can_ride(stage: Stage, host: Stage, before: Sequence[Stage]) -> bool:
    if stage.product is not None or host.product is not None:
        return False
    if stage.flat or host.flat or (stage.rows, stage.cols) != (host.cols, host.rows) or host.rows < 2:
        return False
    sums = all(
        placed.row_only
        if placed.item.reduction is None
        else placed.item.reduction.kind == "sum" and placed.item.reduction.dtype.is_floating_point
        for placed in stage.placed
    )
    if not sums or host.lanes or not stage.lanes or not stage.buffers & host.buffers:
        return False
    earlier = frozenset(item.name for old in before[: before.index(host)] for item, _, _ in old.members)
    for placed in (p for p in stage.placed if p.item.reduction is not None):
        foreign = (n.leaf for n in walk(placed.value) if n.leaf is not None and n.leaf.kind == "reduced")
        if any(
            leaf.source not in earlier and (leaf.source not in host.names or leaf.index != stage.col)
            for leaf in foreign
        ):
            return False
    return True


def _parts(name: str, size: int, cuts: Sequence[int]) -> tuple[tuple[Var, ...], Index]:
    """Variables for ``[0, size)`` split at `cuts` (ascending divisors), outermost first, and their sum."""
    bounds = [1, *cuts, max(size, 1)]
    sizes = [high // low for low, high in pairwise(bounds)]
    variables = tuple(Var(f"{name}{len(sizes) - 1 - k}", s) for k, s in enumerate(sizes))
    total = Index()
    for var, step in zip(variables, bounds, strict=False):
        total = total + Index.of(var) * step
    return tuple(reversed(variables)), total


def _place(stage: Stage, item: Item, rows: tuple[int, ...], cols: tuple[int, ...]) -> Placed:
    indices = [Index()] * len(item.sizes)
    for axes, position in ((rows, stage.row), (cols, stage.col)):
        for axis, index in zip(axes, unflatten(position, [item.sizes[k] for k in axes]), strict=True):
            indices[axis] = index
    place = Index()
    if item.store is not None:
        place = Index.of(item.store.offset)
        for index, step in zip(indices, item.store.stride, strict=True):
            place = place + index * step
    row_only = (
        not stage.flat and item.kept is None and not any(item.sizes[k] > 1 for k in cols) and stage.cols > 1
    )
    return Placed(item, item.build(tuple(indices)), place, row_only, across(item, rows))


def _indices(stage: Stage) -> Iterator[Index]:
    for placed in stage.placed:
        yield placed.place
        for node in walk(placed.value):
            if node.leaf is not None and node.leaf.kind in ("load", "index", "reduced"):
                yield node.leaf.index


def _divisions(index: Index) -> Iterator[tuple[Index, int]]:
    for atom, _ in index.terms:
        if isinstance(atom, Quotient | Remainder):
            yield atom.index, atom.divisor
            yield from _divisions(atom.index)


def _cuts(stage: Stage, parts: Sequence[Var], size: int, old: tuple[int, ...]) -> tuple[int, ...]:
    """Where to split `size`: positions at which some index divides one of its parts."""
    steps = {}
    step = 1
    for var in reversed(parts):
        steps[var] = step
        step *= var.size
    wanted = set(old)
    for index in _indices(stage):
        for inner, divisor in _divisions(index):
            for atom, coefficient in inner.terms:
                if isinstance(atom, Var) and atom in steps and divisor % coefficient == 0:
                    wanted.add(steps[atom] * (divisor // coefficient))
    chain: list[int] = []
    for cut in sorted(wanted):
        last = chain[-1] if chain else 1
        if 1 < cut < size and cut % last == 0 and size % cut == 0 and cut != last:
            chain.append(cut)
    return tuple(chain)


def _check_writes(stages: Sequence[Stage]) -> None:
    """A buffer that a stage overwrites is read only at the same place, and by no later stage."""
    for number, stage in enumerate(stages):
        for placed in stage.placed:
            store = placed.item.store
            if store is None or not store.buffer.startswith("i"):
                continue
            if any(store.buffer in later.buffers for later in stages[number + 1 :]):
                raise Unfusable(f"{store.buffer} is overwritten before its last reader")
            if not stage.flat or any(place != placed.place for place in _loads(stage, store.buffer)):
                raise Unfusable(f"{store.buffer} is overwritten while other elements still read it")


def _loads(stage: Stage, buffer: str) -> Iterator[Index]:
    for placed in stage.placed:
        for node in walk(placed.value):
            if node.leaf is not None and node.leaf.kind == "load" and node.leaf.source == buffer:
                yield node.leaf.index
