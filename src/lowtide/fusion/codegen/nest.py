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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import Index, Quotient, Remainder, Var, flatten, unflatten
from lowtide.fusion.codegen.tensor import Contraction, Kernel, Reduction, Store, Unfusable

__all__ = ["Item", "Placed", "Stage", "plan_stages"]


@dataclass(frozen=True, eq=False)
class Item:
    """One reduction or store with its axes; `kept` counts the leading axes that a reduction keeps."""

    name: str
    sizes: tuple[int, ...]
    kept: int | None
    build: Callable[[tuple[Index, ...]], Expr]
    reduction: Reduction | None = None
    store: Store | None = None
    contraction: Contraction | None = None

    @property
    def numel(self) -> int:
        """Number of points of its space."""
        return prod(self.sizes)


@dataclass(frozen=True, eq=False)
class Placed:
    """An item inside a stage: its value and (for a store) its place at row and column.

    `row_only` items have no column; an `across` item sums over the rows (one result per column), and
    only later stages may read it.
    """

    item: Item
    value: Expr
    place: Index
    row_only: bool
    across: bool = False


@dataclass(eq=False)
class Stage:
    """``rows x cols`` points; `rows` is 0 for a flat element-wise stage of `cols` points.

    A stage with a `product` computes it tile by tile and applies its stores to each tile.
    """

    rows: int
    cols: int
    members: list[tuple[Item, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    row_parts: tuple[Var, ...] = ()
    col_parts: tuple[Var, ...] = ()
    row: Index = Index()
    col: Index = Index()
    placed: tuple[Placed, ...] = ()
    product: Contraction | None = None

    @property
    def flat(self) -> bool:
        """Whether it is element-wise without rows."""
        return self.rows == 0

    @property
    def names(self) -> frozenset[str]:
        """Reductions along a row computed here (or the product)."""
        if self.product is not None:
            return frozenset({self.product.name})
        return frozenset(
            item.name
            for item, rows, _ in self.members
            if item.reduction is not None and not _across(item, rows)
        )

    def holds(self, node: Expr) -> bool:
        """Whether a reference to a reduction is to this stage's own, at the point being computed."""
        assert node.leaf is not None
        here = self.row if self.product is None else self.row * self.cols + self.col
        return node.leaf.source in self.names and node.leaf.index == here

    @property
    def lanes(self) -> bool:
        """Whether memory is contiguous along rows rather than along columns."""
        if any(placed.across for placed in self.placed):
            return False
        row, col = self.row_parts[-1], self.col_parts[-1]
        score = 0
        for placed in self.placed:
            indices = [
                n.leaf.index for n in walk(placed.value) if n.leaf is not None and n.leaf.kind == "load"
            ]
            for index in [*indices, placed.place] if placed.item.store is not None else indices:
                touched = prod(var.size for var in index.variables)
                score += touched * ((index.coefficient(row) == 1) - (index.coefficient(col) == 1))
        return row.size > 1 and (score > 0 or self.cols == 1)

    @property
    def buffers(self) -> frozenset[str]:
        """Buffers read here."""
        return frozenset(
            node.leaf.source
            for placed in self.placed
            for node in walk(placed.value)
            if node.leaf is not None and node.leaf.kind == "load"
        )


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
    needed = _live(items)
    stages: list[Stage] = []
    home: dict[str, tuple[int, int]] = {}
    for item in items:
        if item.store is not None or item.name in needed:
            home[item.name] = _assign(item, stages, home)
    for stage in stages:
        _settle(stage)
    stages = _merge_columns(stages)
    _check_writes(stages)
    return tuple(stages)


def _axis_vars(item: Item) -> tuple[Index, ...]:
    return tuple(Index.of(Var(f"d{k}", size)) for k, size in enumerate(item.sizes))


def _references(item: Item) -> list[tuple[str, Index]]:
    """(reduction, place) that the item reads, over its own axes."""
    found = []
    for node in walk(item.build(_axis_vars(item))):
        if node.leaf is not None and node.leaf.kind == "reduced":
            found.append((node.leaf.source, node.leaf.index))
    return found


def _live(items: Sequence[Item]) -> frozenset[str]:
    """Reductions that some store needs."""
    needed: set[str] = set()
    for item in reversed(items):
        if item.store is not None or item.name in needed:
            needed.update(source for source, _ in _references(item))
    return frozenset(needed)


def _assign(item: Item, stages: list[Stage], home: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """Put `item` into the first stage that fits, or open one; returns its number."""
    references = _references(item)
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
    return number, number + 1 if _across(item, rows) else number


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
    for node in walk(item.build(_axis_vars(item))):
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
    row = flatten([_axis_vars(item)[k] for k in rows], [item.sizes[k] for k in rows])
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
    first = stage.members[0][0].reduction if stage.members else None
    if _sums_rows(item):
        return (_adds_across(stage) and not local) or (first is not None and first.trailing)
    return not _adds_across(stage)


def _adds_across(stage: Stage) -> bool:
    """Whether the stage was opened by a sum across its rows."""
    return bool(stage.members) and _across(*stage.members[0][:2])


def _row_axes(
    item: Item, stage: Stage, local: Sequence[Index], axes: Sequence[int]
) -> tuple[int, ...] | None:
    if item.kept is not None:
        across = _sums_rows(item)
        return tuple(k for k in axes if (k >= item.kept) == across)
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


def _across(item: Item, rows: Sequence[int]) -> bool:
    """Whether a member reduces over its stage's rows."""
    return item.kept is not None and bool(rows) and rows[0] >= item.kept


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
        for node in walk(placed.value):
            leaf = node.leaf
            if leaf is not None and leaf.kind == "reduced" and leaf.source not in earlier:
                if leaf.source not in host.names or leaf.index != stage.col:
                    return False
    return True


def _parts(name: str, size: int, cuts: Sequence[int]) -> tuple[tuple[Var, ...], Index]:
    """Variables for ``[0, size)`` split at `cuts` (ascending divisors), outermost first, and their sum."""
    bounds = [1, *cuts, max(size, 1)]
    sizes = [high // low for low, high in zip(bounds, bounds[1:], strict=False)]
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
    return Placed(item, item.build(tuple(indices)), place, row_only, _across(item, rows))


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
