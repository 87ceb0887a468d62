"""Two products with a pass over rows between them, one block of rows at a time: attention in one kernel.

Problem.  Written out, attention stores its scores twice: L x L numbers a head, read once.  DNNFusion's
table forbids the fusion (Many-to-Many x Many-to-Many); blocks of rows make it pay (FlashAttention).

Method.  Of three consecutive stages -- a product without stores, a stage of row passes over its result, a
product whose left operand is computed from that -- each is run for 64 rows before the next 64:

    for unit (head, 64 rows): pack K, V once a head; score = Q K'; row passes; score = P; acc = P V; store

Invariants.  The row passes see the first product only at their own row and column; what the second multiplies
replaces the scores in place, in the last pass.  Not done here: long rows in pieces (online softmax): rows of
more than `LONGEST` columns are not chained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.gemm import PANEL, Gemm
from lowtide.fusion.codegen.index import ZERO, Var
from lowtide.fusion.codegen.loops import Writer, declare
from lowtide.fusion.codegen.rows import Inner
from lowtide.fusion.codegen.stage import Item, Placed, Stage

__all__ = ["Chain", "Link", "find_links", "with_operand"]

LONGEST = 2048  # columns of a row of scores
DEPTH = 512  # columns of scores that one micro-kernel call multiplies
_LEFT = "left operand"


@dataclass(frozen=True, eq=False)
class Link:
    """Three stages that run as one; `operand` is the second product's left element at row and column."""

    first: Stage
    rows: Stage
    second: Stage
    operand: Expr

    def holds(self, node: Expr) -> bool:
        """Whether a reference is to something that this link has at hand."""
        return any(_at_hand(stage, node) for stage in (self.first, self.rows, self.second)) or _is_score(
            self.first, self.rows, node
        )


def _at_hand(stage: Stage, node: Expr) -> bool:
    return stage.product is None and stage.holds(node)


def _is_score(first: Stage, rows: Stage, node: Expr) -> bool:
    assert first.product is not None and node.leaf is not None
    here = rows.row * rows.cols + rows.col
    return node.leaf.source == first.product.name and node.leaf.index == here


def find_links(stages: Sequence[Stage]) -> list[Stage | Link]:
    """The stages in order, with every chain of three contracted."""
    result: list[Stage | Link] = []
    place = 0
    while place < len(stages):
        link = _link(stages[place : place + 3], stages[place + 3 :])
        result.append(link or stages[place])
        place += 3 if link else 1
    return result


def _link(three: Sequence[Stage], later: Iterable[Stage]) -> Link | None:
    if len(three) < 3:
        return None
    first, rows, second = three
    earlier, product = first.product, second.product
    if earlier is None or product is None:
        return None
    same = (first.rows, first.cols) == (rows.rows, rows.cols) and first.rows == second.rows
    plain = (
        not first.placed and not rows.flat and rows.product is None and not any(p.across for p in rows.placed)
    )
    if not (same and plain) or rows.lanes or rows.cols > LONGEST or product.sizes[3] != rows.cols:
        return None
    _, m, _, _ = product.sizes
    operand = product.left(rows.row // m, rows.row % m, rows.col)
    inner = [placed.value for placed in rows.placed]
    private = earlier.name
    fits = all(
        rows.holds(node) or _is_score(first, rows, node)
        for node in _references([*inner, operand])
        if node.leaf is not None and node.leaf.source in {private, *rows.names}
    )
    others = [placed.value for stage in later for placed in stage.placed]
    outside = [*others, *(placed.value for placed in second.placed)]
    leaks = any(node.leaf is not None and node.leaf.source == private for node in _references(outside))
    return Link(first, rows, second, operand) if fits and not leaks else None


def _references(roots: Sequence[Expr]) -> list[Expr]:
    return [node for node in walk(*roots) if node.leaf is not None and node.leaf.kind == "reduced"]


def with_operand(link: Link) -> Stage:
    """The row passes, and what the second product multiplies as one more item of theirs."""
    left = Placed(Item(_LEFT, (), None, lambda _: link.operand), link.operand, ZERO, False)
    return replace(link.rows, placed=(*link.rows.placed, left))


class _ScoreRows(Inner):
    """The row passes on a block of scores."""

    def __init__(self, link: Link, writer: Writer, spilled: Mapping[str, str]) -> None:
        self.link = link
        super().__init__(with_operand(link), writer, spilled)

    def _passes(self) -> list[list[Placed]]:
        """The operand comes last: it overwrites the scores."""
        passes = super()._passes()
        left = next(placed for placed in self.stage.placed if placed.item.name == _LEFT)
        for items in passes:
            if left in items:
                items.remove(left)
        passes[-1].append(left)
        return passes

    def run(self) -> None:
        """All passes over rows ``first_row ... last_row``."""
        self.enter(())
        self.hoist([placed.value for placed in self.stage.placed])
        self._rows("first_row", "last_row")

    def available(self, node: Expr) -> bool:
        return _is_score(self.link.first, self.link.rows, node) or super().available(node)

    def _score(self) -> str:
        return f"score[(r - first_row) * {self.stage.cols} + {self.col_text()}]"

    def reduced_text(self, node: Expr) -> str:
        return (
            self._score() if _is_score(self.link.first, self.link.rows, node) else super().reduced_text(node)
        )

    def store(self, placed: Placed) -> None:
        if placed.item.name == _LEFT:
            self.writer.line(f"{self._score()} = {self.name_of(placed.value)};")
        else:
            super().store(placed)


class Chain(Gemm):
    """The second product of a link, and everything before it."""

    def __init__(self, link: Link, writer: Writer, spilled: Mapping[str, str]) -> None:
        super().__init__(link.second, writer, spilled, "right2")
        self.link = link
        self.first = Gemm(link.first, writer, spilled, "right1")
        self.rows, self.cols = (64 if link.rows.cols <= 1024 else 32), self.product.sizes[2]

    def emit(self) -> None:
        writer = self.writer
        batch, m, width, depth = self.first.product.sizes
        blocks = (m + self.rows - 1) // self.rows
        self._allocate(width, depth)
        self.enter(())
        self.first.enter(())
        self.hoist([placed.value for placed in self.stage.placed])
        writer.line(f"const lt_span span = lt_share({batch * blocks}, 1, thread, threads);")
        writer.line("int64_t packed = -1;")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(writer, (Var("bt", batch), Var("mu", blocks)), "u")
        writer.line(f"const int64_t m0 = mu * {self.rows}, n0 = 0, nr = {self.cols};")
        writer.line(f"const int64_t mr = {m} - m0 < {self.rows} ? {m} - m0 : {self.rows};")
        writer.line(f"const int64_t first_row = bt * {m} + m0, last_row = first_row + mr;")
        self._pack(width, depth)
        self._scores(width, depth)
        writer.open("")
        _ScoreRows(self.link, writer, self.spilled).run()
        writer.close()
        self._results(width)
        self.epilogue(m)
        writer.close()
        writer.line("at::native::cpublas::brgemm_release(false);")

    def _allocate(self, width: int, depth: int) -> None:
        for name, count in (
            ("score", self.rows * width),
            ("acc", self.rows * self.cols),
            ("right1", _padded(width) * depth),
            ("right2", _padded(self.cols) * width),
            ("left", self.rows * (depth + 16)),
        ):
            self.writer.line(f"float* const {name} = (float*)(own + {self.writer.own(count * 4)});")

    def _pack(self, width: int, depth: int) -> None:
        """Both right operands of a head, when the head changes."""
        writer = self.writer
        writer.open("if (bt != packed)")
        writer.line("packed = bt;")
        for gemm, columns, deep in ((self.first, width, depth), (self, self.cols, width)):
            writer.open("")
            writer.line(f"const int64_t n0 = 0, nr = {columns}, k0 = 0, kr = {deep};")
            gemm.pack_right(deep)
            writer.close()
        writer.close()

    def _scores(self, width: int, depth: int) -> None:
        writer = self.writer
        writer.open("")
        writer.line(f"const int64_t it = 0, ir = mr, k0 = 0, kr = {depth}; (void)kr;")
        left, step = self.first.left(depth)
        writer.open(f"for (int64_t jt = 0; jt < {width}; jt += {PANEL})")
        writer.line(f"const int64_t jr = {width} - jt < {PANEL} ? {width} - jt : {PANEL};")
        writer.line(
            f"lt_brgemm(ir, jr, {depth}, {step}, {PANEL}, {width}, false, {left}, "
            f"right1 + jt * {depth}, score + jt);"
        )
        writer.close()
        writer.close()

    def _results(self, width: int) -> None:
        writer = self.writer
        writer.open(f"for (int64_t k0 = 0; k0 < {width}; k0 += {DEPTH})")
        writer.line(f"const int64_t kr = {width} - k0 < {DEPTH} ? {width} - k0 : {DEPTH};")
        writer.open(f"for (int64_t jt = 0; jt < nr; jt += {PANEL})")
        writer.line(f"const int64_t jr = nr - jt < {PANEL} ? nr - jt : {PANEL};")
        writer.line(
            f"lt_brgemm(mr, jr, kr, {width}, {PANEL}, {self.cols}, k0 > 0, score + k0, "
            f"right2 + jt * {width} + k0 * {PANEL}, acc + jt);"
        )
        writer.close()
        writer.close()


def _padded(columns: int) -> int:
    return (columns + PANEL - 1) // PANEL * PANEL
