"""Matrix products with whatever surrounds them: the tile is finished while it is in cache.

Problem.  A linear layer's bias, activation and residual are memory passes of their own; what feeds it (a
scale, a transpose) is another.

Method.  libtorch's own micro-kernel (`brgemm`, a JIT-ed oneDNN kernel) on blocks of at most 512 x 128 or
256 x 256 results: per block of 256 along k the right operand is packed into panels of 64 columns, the left
one is used where it lies if its rows are contiguous, else packed (transposed in registers, or computed:
the prologue).  The epilogue then runs over the block's rows as plain vector loops.

    for unit (parallel): for k-block: pack right; for m-block: (pack left) brgemm;   epilogue and stores

A right operand made of constants alone (weights of an inference) is packed once, into panels of all its
depth (`_pack_once`).

Invariants.  The order of additions along k does not depend on threads.  `lt_brgemm` is checked against a
plain loop when the library is loaded (`library`), and compiled with its BLAS instead if it is missing or
wrong.  Not done here: chains of products, types other than float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.fusion.codegen.ctext import index_text
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import Index, Var
from lowtide.fusion.codegen.loops import Loops, Writer, declare
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Contraction

__all__ = ["PANEL", "Gemm", "block_of", "operands"]

BLOCK = 256  # depth of a block
PANEL = 64  # columns of a packed panel
TILE = 64  # rows of one micro-kernel call


def operands(product: Contraction) -> tuple[Expr, Expr]:
    """The element expressions of left and right over the variables ``bt, m, n, k``."""
    batch, m, n, k = (Index.of(var) for var in axes_of(product))
    return product.left(batch, m, k), product.right(batch, k, n)


def axes_of(product: Contraction) -> tuple[Var, Var, Var, Var]:
    """The variables of a product: batch, rows, columns, depth."""
    batch, m, n, k = product.sizes
    return Var("bt", batch), Var("m", m), Var("n", n), Var("k", k)


def block_of(product: Contraction) -> tuple[int, int]:
    """Most rows and columns of a block: tall if the left operand is read where it lies."""
    left, _ = operands(product)
    index = _plain(left)
    direct = index is not None and index.coefficient(axes_of(product)[3]) == 1
    return (512, 128) if direct else (256, 256)


def _even(extent: int, most: int, step: int) -> int:
    """The size of equal blocks of at most `most`, a multiple of `step`."""
    count = (extent + most - 1) // most
    each = (extent + count - 1) // count
    return min((each + step - 1) // step * step, max(extent, step))


class Gemm(Loops):
    """One product stage."""

    def __init__(
        self, stage: Stage, writer: Writer, spilled: Mapping[str, str], right: str = "right"
    ) -> None:
        super().__init__(stage, writer, spilled)
        assert stage.product is not None
        self.product, self.right = stage.product, right
        self.rows = self.cols = 0
        self.packed = ""  # the array of a right operand that was packed once
        writer.uses_brgemm = True

    def emit(self) -> None:
        product = self.product
        batch, m, n, _ = product.sizes
        self.rows, self.cols = _even(m, self._reach()[0], TILE), self._columns(n)
        self._pack_once()
        row_units, col_units = (m + self.rows - 1) // self.rows, (n + self.cols - 1) // self.cols
        self._buffers()
        writer = self.writer
        self.enter(())
        self.hoist([placed.value for placed in self.stage.placed])
        writer.line(f"const lt_span span = lt_share({batch * row_units * col_units}, 1, thread, threads);")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(writer, (Var("bt", batch), Var("nu", col_units), Var("mu", row_units)), "u")
        writer.line(f"const int64_t m0 = mu * {self.rows}, n0 = nu * {self.cols};")
        for name, start, extent, step in (("mr", "m0", m, self.rows), ("nr", "n0", n, self.cols)):
            rest = (
                f"{extent} - {start} < {step} ? {extent} - {start} : {step}" if extent % step else str(step)
            )
            writer.line(f"const int64_t {name} = {rest};")
        self._multiply()
        self.epilogue(m)
        writer.close()
        writer.line("at::native::cpublas::brgemm_release(false);")

    def _pack_once(self) -> None:
        """A right operand made of constants is packed when the kernel is prepared, in all its depth."""
        batch, _, n, k = self.product.sizes
        _, element = operands(self.product)
        leaves = [node.leaf for node in walk(element) if node.leaf is not None and node.leaf.kind != "const"]
        known = all(leaf.kind == "load" and leaf.source in self.writer.constants for leaf in leaves)
        if not leaves or not known:
            return
        self.packed, panels = f"{self.product.name}_packed", (n + PANEL - 1) // PANEL
        setup = self.writer.prepare(self.packed, batch * panels * PANEL * k * 4)
        setup.open(f"for (int64_t bt = 0; bt < {batch}; ++bt)")
        setup.line(f"float* const right = {self.packed} + bt * {panels * PANEL * k};")
        setup.line(f"const int64_t n0 = 0, nr = {n}, k0 = 0, kr = {k};")
        Gemm(self.stage, setup, {}).pack_right(k)
        setup.close()
        if self.cols % PANEL and self.cols < n:
            self.cols = _even(n, self._reach()[1], PANEL)

    def _reach(self) -> tuple[int, int]:
        """Most rows and columns of a block: tall if the left operand is read where it lies."""
        return block_of(self.product)

    def _columns(self, n: int) -> int:
        """Columns of a block: whole multiples of the innermost stored axis, if there is one."""
        most = self._reach()[1]
        inner = self.stage.col_parts[-1].size if len(self.stage.col_parts) > 1 else 1
        if 1 < inner <= most:
            return min(max(most // inner, 1) * inner, n)
        if inner > most:
            return next((d for d in range(most, 31, -1) if inner % d == 0), _even(n, most, PANEL))
        return _even(n, most, PANEL)

    def _buffers(self) -> None:
        writer = self.writer
        panels = (self.cols + PANEL - 1) // PANEL
        depth = min(self.product.sizes[3], BLOCK)
        for name, count in (
            ("acc", self.rows * self.cols),
            ("right", 0 if self.packed else panels * PANEL * depth),
            ("left", TILE * (depth + 16)),
        ):
            writer.line(f"float* const {name} = (float*)(own + {writer.own(count * 4)});")

    def _multiply(self) -> None:
        writer, depth = self.writer, self.product.sizes[3]
        writer.open(f"for (int64_t k0 = 0; k0 < {depth}; k0 += {BLOCK})")
        writer.line(f"const int64_t kr = {depth} - k0 < {BLOCK} ? {depth} - k0 : {BLOCK};")
        step, right = min(depth, BLOCK), "right"
        if self.packed:
            panels = (self.product.sizes[2] + PANEL - 1) // PANEL
            step, right = depth, "ready"
            place = f"bt * {panels * PANEL * depth} + n0 * {depth} + k0 * {PANEL}"
            writer.line(f"const float* const ready = {self.packed} + {place};")
        else:
            self.pack_right(step)
        writer.open(f"for (int64_t it = 0; it < mr; it += {TILE})")
        writer.line(f"const int64_t ir = mr - it < {TILE} ? mr - it : {TILE};")
        left, across = self.left(min(depth, BLOCK))
        writer.open(f"for (int64_t jt = 0; jt < nr; jt += {PANEL})")
        writer.line(f"const int64_t jr = nr - jt < {PANEL} ? nr - jt : {PANEL};")
        writer.line(
            f"lt_brgemm(ir, jr, kr, {across}, {PANEL}, {self.cols}, k0 > 0, {left}, {right} + jt * {step}, "
            f"acc + it * {self.cols} + jt);"
        )
        for _ in range(3):
            writer.close()

    def _place(self, index: Index, starts: dict[str, str]) -> str:
        """An index with some variables replaced by where a block starts."""
        return index_text(
            index.substitute(lambda var: Index.of(Var(starts.get(var.name, var.name), var.size)))
        )

    def pack_right(self, depth: int) -> None:
        """``right[panel][k][64]`` for columns ``n0 ... n0 + nr`` and depth ``k0 ... k0 + kr``."""
        writer = self.writer
        _, _, n, k = axes_of(self.product)
        _, element = operands(self.product)
        writer.open(f"for (int64_t jt = 0; jt < nr; jt += {PANEL})")
        writer.line(f"const int64_t jr = nr - jt < {PANEL} ? nr - jt : {PANEL};")
        writer.line("const int64_t nj = n0 + jt; (void)nj;")
        target = f"{self.right} + jt * {depth}"
        index = _plain(element)
        if index is not None and _straight(index, n, k) and index.coefficient(n) == 1:
            place, step = self._place(index, {"n": "nj", "k": "k0"}), index.coefficient(k)
            writer.line(f"lt_pack_rows({element.leaf.source} + {place}, {step}, {target}, {PANEL}, kr, jr);")  # type: ignore[union-attr]
        elif index is not None and _straight(index, n, k) and index.coefficient(k) == 1:
            place, step = self._place(index, {"n": "nj", "k": "k0"}), index.coefficient(n)
            writer.line(f"lt_transpose({element.leaf.source} + {place}, {step}, {target}, {PANEL}, kr, jr);")  # type: ignore[union-attr]
        else:
            self._compute(element, ("k", "k0", "kr"), ("n", "nj", "jr"), f"({target})", PANEL)
        writer.close()

    def left(self, depth: int) -> tuple[str, str]:
        """(pointer, row step) of the left operand's rows ``it ...`` of the block, packed if need be."""
        writer = self.writer
        _, m, _, k = axes_of(self.product)
        element, _ = operands(self.product)
        index = _plain(element)
        writer.line("const int64_t mi = m0 + it; (void)mi;")
        if (
            index is not None
            and _straight(index, m, k)
            and index.coefficient(k) == 1
            and index.coefficient(m) >= 1
        ):
            place = self._place(index, {"m": "mi", "k": "k0"})
            assert element.leaf is not None
            return f"{element.leaf.source} + {place}", str(index.coefficient(m))
        step = depth + 16
        if index is not None and _straight(index, m, k) and index.coefficient(m) == 1:
            place, source = self._place(index, {"m": "mi", "k": "k0"}), element.leaf
            assert source is not None
            writer.line(
                f"lt_transpose({source.source} + {place}, {index.coefficient(k)}, left, {step}, ir, kr);"
            )
        else:
            self._compute(element, ("m", "mi", "ir"), ("k", "k0", "kr"), "left", step)
        return "left", str(step)

    def _compute(
        self, element: Expr, outer: tuple[str, str, str], inner: tuple[str, str, str], target: str, step: int
    ) -> None:
        """Evaluate an operand into ``target[outer][inner]``: the prologue."""
        writer = self.writer
        sizes = {var.name: var for var in axes_of(self.product)}
        self.enter((sizes["bt"],))
        self.hoist([element])
        writer.open(f"for (int64_t o = 0; o < {outer[2]}; ++o)")
        writer.line(f"const int64_t {outer[0]} = {outer[1]} + o; (void){outer[0]};")
        self.enter((sizes[outer[0]],))
        self.hoist([element])
        writer.line("#pragma omp simd")
        writer.open(f"for (int64_t i = 0; i < {inner[2]}; ++i)")
        writer.line(f"const int64_t {inner[0]} = {inner[1]} + i; (void){inner[0]};")
        self.enter((sizes[inner[0]],))
        self.hoist([element], force=True)
        writer.line(f"{target}[o * {step} + i] = {self.name_of(element)};")
        writer.close()
        writer.close()
        del self.scopes[-3:]

    def epilogue(self, m: int) -> None:
        writer, stage = self.writer, self.stage
        writer.open("for (int64_t i = 0; i < mr; ++i)")
        writer.line(f"const int64_t r = bt * {m} + m0 + i; (void)r;")
        declare(writer, stage.row_parts, "r")
        self.enter(stage.row_parts)
        roots = [placed.value for placed in stage.placed]
        self.hoist(roots)
        *outer, last = stage.col_parts
        if outer and self._aligned(last):
            self._segments(outer, last, roots)
        else:
            self._whole(outer, last, roots)
        self.scopes.pop()
        writer.close()

    def _aligned(self, last: Var) -> bool:
        return self.cols % last.size == 0 or last.size % self.cols == 0

    def _segments(self, outer: Sequence[Var], last: Var, roots: Sequence[Expr]) -> None:
        """Columns in runs of the innermost stored axis."""
        writer = self.writer
        run = min(last.size, self.cols)
        writer.open(f"for (int64_t j1 = 0; j1 < nr; j1 += {run})")
        writer.line("const int64_t c = n0 + j1;")
        declare(writer, (*outer, Var(f"{last.name}_from", last.size)), "c")
        self.enter(outer)
        self.hoist(roots)
        writer.line("#pragma omp simd")
        writer.open(f"for (int64_t j2 = 0; j2 < (nr - j1 < {run} ? nr - j1 : {run}); ++j2)")
        writer.line(f"const int64_t j = j1 + j2, {last.name} = {last.name}_from + j2; (void){last.name};")
        self._stores(last, roots)
        self.scopes.pop()
        writer.close()

    def _whole(self, outer: Sequence[Var], last: Var, roots: Sequence[Expr]) -> None:
        writer = self.writer
        if not outer:
            writer.line("#pragma omp simd")
        writer.open("for (int64_t j = 0; j < nr; ++j)")
        writer.line("const int64_t c = n0 + j;")
        declare(writer, (*outer, last), "c")
        self._stores(last, roots, outer)

    def _stores(self, last: Var, roots: Sequence[Expr], outer: Sequence[Var] = ()) -> None:
        self.enter((*outer, last))
        self.hoist(roots, force=True)
        for placed in self.stage.placed:
            self.store(placed)
        if self.product.name in self.spilled:
            self.writer.line(
                f"{self.product.name}_all[r * {self.stage.cols} + n0 + j] = acc[i * {self.cols} + j];"
            )
        self.scopes.pop()
        self.writer.close()

    def hoistable(self, node: Expr) -> bool:
        own = any(n.leaf is not None and n.leaf.source in self.stage.names for n in self._reduced(node))
        return super().hoistable(node) and not own

    def reduced_text(self, node: Expr) -> str:
        return f"acc[i * {self.cols} + j]" if self.stage.holds(node) else super().reduced_text(node)


def _plain(element: Expr) -> Index | None:
    """The index of an operand that is one float32 load; None if it is computed."""
    leaf = element.leaf
    plain = leaf is not None and leaf.kind == "load" and not element.args and leaf.stored == element.dtype
    return leaf.index if plain and leaf is not None else None


def _straight(index: Index, *variables: Var) -> bool:
    """Whether none of `variables` is inside a quotient or a remainder."""
    return not any(
        var in atom.index.variables
        for atom, _ in index.terms
        if not isinstance(atom, Var)
        for var in variables
    )
