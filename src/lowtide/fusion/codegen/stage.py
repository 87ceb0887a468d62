"""The nouns of loop planning: items (reductions, stores, products) and the stages that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import ZERO, Index, Var
from lowtide.fusion.codegen.tensor import Contraction, Reduction, Store

__all__ = ["Item", "Placed", "Stage", "across"]


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
    row: Index = ZERO
    col: Index = ZERO
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
            if item.reduction is not None and not across(item, rows)
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


def across(item: Item, rows: Sequence[int]) -> bool:
    """Whether a member reduces over its stage's rows."""
    return item.kept is not None and bool(rows) and rows[0] >= item.kept
