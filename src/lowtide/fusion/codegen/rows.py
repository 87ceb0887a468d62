"""Stages of rows: the passes over a row, and columns in the vector lanes.

Method.  See `c`.  `Rows` decides what both modes share (passes, what is kept between them); `Inner` runs
reductions over contiguous rows, optionally with sums across rows riding along in fixed groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.fusion.codegen.ctext import compute_type, index_text, memory_type
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.folds import (
    COMBINE,
    as_lane,
    clause,
    flags_nan,
    identity,
    is_float_sum,
    lane_type,
    result_dtype,
    total_type,
)  # fmt: skip
from lowtide.fusion.codegen.index import Var
from lowtide.fusion.codegen.loops import Loops, Writer, declare
from lowtide.fusion.codegen.stage import Placed, Stage
from lowtide.fusion.codegen.tensor import Reduction

__all__ = ["Inner", "Rows"]

BLOCK = 4096  # elements summed in float32 before the float64 total takes over
KEEP_COST = 6  # an expression at least this costly is kept between passes instead of recomputed
KEEP_BYTES = 1 << 18  # at most this much scratch a row (or tile)
ACROSS_ROWS = 64  # rows whose column sums are added in float32 before the float64 total takes over
ACROSS_GROUPS = 16  # fixed groups of rows with a total each, so that results do not depend on threads


class Rows(Loops):
    """What the two row modes share: passes, and which expressions are kept between them."""

    def __init__(self, stage: Stage, writer: Writer, spilled: Mapping[str, str]) -> None:
        super().__init__(stage, writer, spilled)
        self.done: set[str] = set()
        self.passes = self._passes()
        self.keep_at = self._choose_kept()

    def _passes(self) -> list[list[Placed]]:
        """Items by pass: one that reads reductions of pass k at its own row runs in pass k + 1."""
        level: dict[str, int] = {}
        passes: list[list[Placed]] = []
        for placed in self.stage.placed:
            own = placed.value.sources & self.stage.names
            at = max((level[name] + 1 for name in own), default=0)
            level[placed.item.name] = at
            while len(passes) <= at:
                passes.append([])
            passes[at].append(placed)
        return passes

    def roots(self, number: int) -> list[Expr]:
        return [placed.value for placed in self.passes[number]]

    def _choose_kept(self) -> dict[int, list[Expr]]:
        """Pass -> expressions to keep there because a later pass would recompute them."""
        first: dict[Expr, int] = {}
        chosen: dict[int, list[Expr]] = {}
        columns = frozenset(self.stage.col_parts)
        room = KEEP_BYTES
        for number in range(len(self.passes)):
            stack = [p.value for p in self.passes[number] if not p.row_only]
            while stack:
                node = stack.pop()
                at = first.get(node)
                varies = node.leaf is None and bool(node.variables & columns)
                if at is not None and at < number and varies and node.cost >= KEEP_COST:
                    size = self.kept_bytes(node)
                    if node not in chosen.setdefault(at, []) and size <= room:
                        chosen[at].append(node)
                        room -= size
                    if node in chosen[at]:
                        continue
                stack.extend(node.args)
            for node in walk(*self.roots(number)):
                first.setdefault(node, number)
        return chosen

    def kept_bytes(self, node: Expr) -> int:
        raise NotImplementedError

    def available(self, node: Expr) -> bool:
        leaf = node.leaf
        assert leaf is not None
        return leaf.source not in self.stage.names or leaf.source in self.done

    def declare_kept(self, number: int) -> list[tuple[Expr, str]]:
        """Scratch rows for what pass `number` keeps."""
        result = []
        for node in self.keep_at.get(number, []):
            kind, name = memory_type(node.dtype), self.writer.fresh("k")
            self.writer.line(
                f"{kind}* const {name} = ({kind}*)(own + {self.writer.own(self.kept_bytes(node))});"
            )
            result.append((node, name))
        return result

    def col_text(self) -> str:
        return index_text(self.stage.col) if self.stage.cols > 1 else "0"


class Inner(Rows):
    """Columns in the lanes: row reductions over contiguous rows."""

    def kept_bytes(self, node: Expr) -> int:
        return self.stage.cols * node.dtype.itemsize

    def emit(self) -> None:
        writer, stage = self.writer, self.stage
        self.enter(())
        self.hoist([p.value for p in stage.placed])
        across = [p for p in stage.placed if p.across]
        if across:
            self._groups(across)
            return
        writer.line(f"const lt_span span = lt_share({stage.rows}, 1, thread, threads);")
        self._rows("span.lo", "span.hi")

    def _rows(self, low: str, high: str) -> None:
        self.writer.open(f"for (int64_t r = {low}; r < {high}; ++r)")
        declare(self.writer, self.stage.row_parts, "r")
        self.enter(self.stage.row_parts)
        for number in range(len(self.passes)):
            self._pass(number)
        self.scopes.pop()
        self.writer.close()

    def _groups(self, across: Sequence[Placed]) -> None:
        """Rows in fixed groups, each with its own column totals, which are added after a barrier."""
        writer, rows, cols = self.writer, self.stage.rows, self.stage.cols
        blocks = (rows + ACROSS_ROWS - 1) // ACROSS_ROWS
        groups = min(ACROSS_GROUPS, blocks)
        for placed in across:
            name, kind = placed.item.name, compute_type(placed.value.dtype)
            writer.line(f"{kind}* const {name}_acc = ({kind}*)(own + {writer.own(cols * 8)});")
            writer.line(
                f"double* const {name}_groups = (double*)(scratch + {writer.share(groups * cols * 8)});"
            )
        writer.line(f"const lt_span span = lt_share({groups}, 1, thread, threads);")
        writer.open("for (int64_t g = span.lo; g < span.hi; ++g)")
        for placed in across:
            writer.line(f"std::memset({placed.item.name}_groups + g * {cols}, 0, {cols * 8});")
        writer.line(f"int64_t stop = {blocks} * (g + 1) / {groups} * {ACROSS_ROWS};")
        writer.line(f"if (stop > {rows}) stop = {rows};")
        writer.open(
            f"for (int64_t b = {blocks} * g / {groups} * {ACROSS_ROWS}; b < stop; b += {ACROSS_ROWS})"
        )
        for placed in across:
            writer.line(f"std::memset({placed.item.name}_acc, 0, {cols * placed.value.dtype.itemsize});")
        self._rows("b", f"(b + {ACROSS_ROWS} < stop ? b + {ACROSS_ROWS} : stop)")
        for placed in across:
            name = placed.item.name
            writer.line("#pragma omp simd")
            writer.line(
                f"for (int64_t c = 0; c < {cols}; ++c) {name}_groups[g * {cols} + c] += {name}_acc[c];"
            )
        writer.close()
        writer.close()
        writer.line("lt_barrier(threads);")
        self._totals(across, groups)

    def _totals(self, across: Sequence[Placed], groups: int) -> None:
        writer, cols = self.writer, self.stage.cols
        writer.line(f"const lt_span total = lt_share({cols}, 64, thread, threads);")
        writer.open("for (int64_t c = total.lo; c < total.hi; ++c)")
        for placed in across:
            name = placed.item.name
            assert placed.item.reduction is not None
            writer.line(f"double {name}_sum = 0;")
            writer.line(
                f"for (int64_t g = 0; g < {groups}; ++g) {name}_sum += {name}_groups[g * {cols} + c];"
            )
            kind = compute_type(result_dtype(placed.item.reduction))
            writer.line(f"{name}_all[c] = ({kind}){name}_sum;")
        writer.close()

    def _pass(self, number: int) -> None:
        items = self.passes[number]
        narrow = [p for p in items if p.row_only]
        wide = [p for p in items if not p.row_only]
        self.hoist(self.roots(number))
        self.hoist([p.value for p in narrow], force=True)
        for placed in narrow:
            self.store(placed)
        if wide:
            self._loop(wide, self.declare_kept(number))
        for placed in wide:
            if placed.item.reduction is not None and not placed.across:
                self._finish(placed.item.reduction)

    def _loop(self, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        writer = self.writer
        reductions = [p for p in items if p.item.reduction is not None and not p.across]
        for placed in reductions:
            assert placed.item.reduction is not None
            kind = total_type(placed.item.reduction, placed.value.dtype)
            writer.line(f"{kind} {placed.item.name}_total = {identity(placed.item.reduction)};")
        roots = [p.value for p in items]
        *outer, last = self.stage.col_parts
        for var in outer:
            writer.open(f"for (int64_t {var.name} = 0; {var.name} < {var.size}; ++{var.name})")
            self.enter((var,))
            self.hoist(roots)
        self._lanes(last, items, reductions, keep)
        for _ in outer:
            self.scopes.pop()
            writer.close()
        self.kept.update(keep)

    def _lanes(
        self,
        last: Var,
        items: Sequence[Placed],
        reductions: Sequence[Placed],
        keep: Sequence[tuple[Expr, str]],
    ) -> None:
        writer = self.writer
        size = 0 if self.stage.cols == 0 else last.size
        blocked = size > BLOCK and any(is_float_sum(p) for p in reductions)
        if blocked:
            writer.open(f"for (int64_t from = 0; from < {size}; from += {BLOCK})")
            writer.line(f"const int64_t to = from + {BLOCK} < {size} ? from + {BLOCK} : {size};")
        low, high = ("from", "to") if blocked else ("0", str(size))
        for placed in reductions:
            assert placed.item.reduction is not None
            kind = lane_type(placed.item.reduction, placed.value.dtype)
            writer.line(f"{kind} {placed.item.name}_part = {identity(placed.item.reduction)};")
            if flags_nan(placed):
                writer.line(f"int {placed.item.name}_nan = 0;")
        if not self._gathers(items, last):
            writer.line("#pragma omp simd" + "".join(clause(p) for p in reductions))
        writer.open(f"for (int64_t {last.name} = {low}; {last.name} < {high}; ++{last.name})")
        self._body(last, items, keep)
        writer.close()
        for placed in reductions:
            assert placed.item.reduction is not None
            name = placed.item.name
            if flags_nan(placed):
                writer.line(f'{name}_part = {name}_nan ? __builtin_nanf("") : {name}_part;')
            combine = COMBINE[placed.item.reduction.kind]
            writer.line(combine.format(f"{name}_total", f"{name}_part"))
        if blocked:
            writer.close()

    def _gathers(self, items: Sequence[Placed], last: Var) -> bool:
        return any(
            n.op == "load" and n.args and last in n.args[0].variables for n in walk(*(p.value for p in items))
        )

    def _body(self, last: Var, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        self.enter((last,))
        self.hoist([p.value for p in items], force=True)
        for node, array in keep:
            self.writer.line(f"{array}[{self.kept_place()}] = {self.name_of(node)};")
        for placed in items:
            if placed.item.reduction is None:
                self.store(placed)
            elif placed.across:
                self.writer.line(
                    f"{placed.item.name}_acc[{self.col_text()}] += {self.name_of(placed.value)};"
                )
            else:
                self._combine(placed)
        self.scopes.pop()

    def _combine(self, placed: Placed) -> None:
        """One lane's share; a float maximum drops NaN in the lanes (one instruction) and flags it aside."""
        assert placed.item.reduction is not None
        kind, name, value = placed.item.reduction.kind, placed.item.name, self.name_of(placed.value)
        if flags_nan(placed):
            sign = ">" if kind == "max" else "<"
            self.writer.line(f"{name}_part = {value} {sign} {name}_part ? {value} : {name}_part;")
            self.writer.line(f"{name}_nan |= {value} != {value};")
        else:
            self.writer.line(COMBINE[kind].format(f"{name}_part", as_lane(placed, value)))

    def _finish(self, reduction: Reduction) -> None:
        kind = compute_type(result_dtype(reduction))
        self.writer.line(f"const {kind} {reduction.name} = ({kind}){reduction.name}_total;")
        if reduction.name in self.spilled:
            self.writer.line(f"{reduction.name}_all[{index_text(self.stage.row)}] = {reduction.name};")
        self.done.add(reduction.name)

    def kept_place(self) -> str:
        return self.col_text()

    def reduced_text(self, node: Expr) -> str:
        assert node.leaf is not None
        return node.leaf.source if self.stage.holds(node) else super().reduced_text(node)
