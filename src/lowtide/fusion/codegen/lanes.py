"""Stages of rows with the rows in the vector lanes: reductions over an axis that is not contiguous.

Method.  A tile of up to 256 rows is processed column by column; each reduction is an array over the tile.
Costly values of a row alone are computed once a tile.  See `c` and `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.fusion.codegen.ctext import compute_type, index_text, memory_type
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.folds import COMBINE, as_lane, identity, is_float_sum, result_dtype, total_type
from lowtide.fusion.codegen.index import Var
from lowtide.fusion.codegen.loops import declare, size
from lowtide.fusion.codegen.rows import KEEP_COST, Rows
from lowtide.fusion.codegen.stage import Placed
from lowtide.fusion.codegen.tensor import Reduction

__all__ = ["Lanes"]

LANES = 256  # rows in one tile
RUN = 64  # columns summed in float32 before the float64 total takes over


class Lanes(Rows):
    """Rows in the lanes: reductions over an axis that is not the contiguous one."""

    @property
    def tile(self) -> int:
        return min(LANES, self.stage.row_parts[-1].size)

    def kept_bytes(self, node: Expr) -> int:
        return self.stage.cols * self.tile * node.dtype.itemsize

    def emit(self) -> None:
        writer, stage = self.writer, self.stage
        *outer, last = stage.row_parts
        tiles = (last.size + self.tile - 1) // self.tile
        count = size(v.size for v in outer) * tiles
        self.enter(())
        self.hoist([p.value for p in stage.placed])
        writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(writer, (*outer, Var("tile", tiles)), "u")
        writer.line(f"const int64_t base = tile * {self.tile};")
        writer.line(
            f"const int64_t width = {last.size} - base < {self.tile} ? {last.size} - base : {self.tile};"
        )
        self.enter(outer)
        for number in range(len(self.passes)):
            self._pass(number)
        writer.close()

    def _pass(self, number: int) -> None:
        items = self.passes[number]
        narrow, wide = [p for p in items if p.row_only], [p for p in items if not p.row_only]
        self.hoist(self.roots(number))
        self._save_row_values(wide)
        if narrow:
            self._lane_loop(narrow, ())
        if wide:
            self._columns(wide, self.declare_kept(number))
        for placed in wide:
            if placed.item.reduction is not None:
                self._finish(placed.item.reduction)

    def _save_row_values(self, items: Sequence[Placed]) -> None:
        """Costly values of a row alone are computed once a tile, not once a column."""
        last = self.stage.row_parts[-1]
        columns = frozenset(self.stage.col_parts)
        found = []
        stack = [p.value for p in items]
        while stack:
            node = stack.pop()
            alone = not node.variables & columns and (last in node.variables or node.sources)
            if alone and node.leaf is None and node.cost >= KEEP_COST and node not in self.kept:
                if self._complete(node) and node not in found:
                    found.append(node)
                continue
            stack.extend(node.args)
        if self.stage.cols <= 1:
            return
        for node in found:
            self._save_row_value(node)

    def _complete(self, node: Expr) -> bool:
        return all(self.available(leaf) for leaf in self._reduced(node))

    def _save_row_value(self, node: Expr) -> None:
        kind, name = memory_type(node.dtype), self.writer.fresh("v")
        self.writer.line(f"{kind} {name}[{self.tile}];")
        self._open_lanes()
        self.hoist([node], force=True)
        self.writer.line(f"{name}[lane] = {self.name_of(node)};")
        self._close_lanes()
        self.row_arrays[node] = name

    @property
    def row_arrays(self) -> dict[Expr, str]:
        return self.__dict__.setdefault("_row_arrays", {})  # type: ignore[no-any-return]

    def _open_lanes(self, simd: bool = True) -> None:
        last = self.stage.row_parts[-1]
        if simd:
            self.writer.line("#pragma omp simd")
        self.writer.open("for (int64_t lane = 0; lane < width; ++lane)")
        self.writer.line(f"const int64_t {last.name} = base + lane; (void){last.name};")
        self.enter((last,))

    def _close_lanes(self) -> None:
        self.scopes.pop()
        self.writer.close()

    def hoistable(self, node: Expr) -> bool:
        local = any(n.leaf is not None and n.leaf.source in self.stage.names for n in self._reduced(node))
        return super().hoistable(node) and not local and node not in self.row_arrays

    def needed(self, roots: Sequence[Expr]) -> list[Expr]:
        saved = {node: name for node, name in self.row_arrays.items() if node not in self.kept}
        self.kept.update(saved)
        order = super().needed(roots)
        for node in saved:
            del self.kept[node]
        return order

    def define(self, node: Expr) -> None:
        if node in self.row_arrays and self.name_of(node) is None:
            name = self.writer.fresh()
            self.writer.line(f"const {compute_type(node.dtype)} {name} = {self.row_arrays[node]}[lane];")
            self.scopes[-1].names[node] = name
            return
        super().define(node)

    def _columns(self, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        writer = self.writer
        sums = [p for p in items if is_float_sum(p)]
        for placed in items:
            if placed.item.reduction is not None:
                self._declare_total(placed, placed.item.reduction)
        *outer, last = self.stage.col_parts
        for var in outer:
            writer.open(f"for (int64_t {var.name} = 0; {var.name} < {var.size}; ++{var.name})")
            self.enter((var,))
            self.hoist([p.value for p in items])
        length = 0 if self.stage.cols == 0 else last.size
        step = RUN if sums else max(length, 1)
        writer.open(f"for (int64_t from = 0; from < {length}; from += {step})")
        for placed in sums:
            writer.line(f"std::memset({placed.item.name}_part, 0, sizeof {placed.item.name}_part);")
        stop = f"(from + {step} < {length} ? from + {step} : {length})"
        writer.open(f"for (int64_t {last.name} = from; {last.name} < {stop}; ++{last.name})")
        self.enter((last,))
        self.hoist([p.value for p in items])
        self._lane_loop(items, keep)
        self.scopes.pop()
        writer.close()
        for placed in sums:
            name = placed.item.name
            writer.line("#pragma omp simd")
            writer.line(
                f"for (int64_t lane = 0; lane < width; ++lane) {name}_sum[lane] += {name}_part[lane];"
            )
        writer.close()
        for _ in outer:
            self.scopes.pop()
            writer.close()
        self.kept.update(keep)

    def _declare_total(self, placed: Placed, reduction: Reduction) -> None:
        """The accumulators of a tile; float sums add runs of columns in float32 first."""
        name, kind = placed.item.name, total_type(reduction, placed.value.dtype)
        self.writer.line(f"{kind} {name}_sum[{self.tile}];")
        self.writer.line(
            f"for (int64_t lane = 0; lane < width; ++lane) {name}_sum[lane] = {identity(reduction)};"
        )
        if is_float_sum(placed):
            self.writer.line(f"float {name}_part[{self.tile}];")

    def _lane_loop(self, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        gathers = any(n.op == "load" and n.args for n in walk(*(p.value for p in items)))
        self._open_lanes(simd=not gathers)
        self.hoist([p.value for p in items], force=True)
        for node, array in keep:
            self.writer.line(f"{array}[{self.kept_place()}] = {self.name_of(node)};")
        for placed in items:
            if placed.item.reduction is None:
                self.store(placed)
            else:
                combine, value = COMBINE[placed.item.reduction.kind], self.name_of(placed.value)
                array = "part" if is_float_sum(placed) else "sum"
                self.writer.line(combine.format(f"{placed.item.name}_{array}[lane]", as_lane(placed, value)))
        self._close_lanes()

    def _finish(self, reduction: Reduction) -> None:
        kind = compute_type(result_dtype(reduction))
        self.writer.line(f"{kind} {reduction.name}[{self.tile}];")
        self._open_lanes()
        self.writer.line(f"{reduction.name}[lane] = ({kind}){reduction.name}_sum[lane];")
        if reduction.name in self.spilled:
            self.writer.line(f"{reduction.name}_all[{index_text(self.stage.row)}] = {reduction.name}[lane];")
        self._close_lanes()
        self.done.add(reduction.name)

    def kept_place(self) -> str:
        return f"({self.col_text()}) * {self.tile} + lane"

    def reduced_text(self, node: Expr) -> str:
        assert node.leaf is not None
        return f"{node.leaf.source}[lane]" if self.stage.holds(node) else super().reduced_text(node)
