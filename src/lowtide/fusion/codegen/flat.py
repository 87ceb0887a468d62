"""Element-wise stages: outer variables shared by threads, the innermost in vector lanes.

Problem.  A chain of element-wise operators is bound by memory; the loop has to be one plain pass that gcc
turns into full-width vectors, whatever permutes and slices are folded into its indices.

Method.  One contiguous range, or nested loops over the variables into which the indices split the range.
An operand that is contiguous along another variable than the result is transposed tile by tile (16 x 512,
in registers) into scratch before the element loop reads it.  Eager's own square root (updates only) cuts
the range into blocks around a call.

Not done here: reductions (`rows`, `lanes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.fusion.codegen.ctext import compute_type, index_text, load_text, memory_type
from lowtide.fusion.codegen.expr import Expr, Leaf, walk
from lowtide.fusion.codegen.index import Index, Var
from lowtide.fusion.codegen.loops import Loops, Writer, declare, size
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Unfusable

__all__ = ["Flat"]

TILE_ACROSS, TILE_LAST = 16, 512  # a tile of a transposed operand
TILE_PAD = 16  # keeps the tile's rows out of each other's cache sets
TILE_BYTES = TILE_ACROSS * (TILE_LAST + TILE_PAD) * 8
_TILE_PLACE = Index.of(Var("du", TILE_ACROSS)) * (TILE_LAST + TILE_PAD) + Index.of(Var("dl", TILE_LAST))
SQRT_BLOCK = 8192  # elements per call of eager's square root


class Flat(Loops):
    """Element-wise stages: outer variables shared by threads, the last one in vector lanes."""

    def __init__(self, stage: Stage, writer: Writer, spilled: Mapping[str, str]) -> None:
        super().__init__(stage, writer, spilled)
        self.after_sqrt: set[Expr] = set()

    def emit(self) -> None:
        roots = [placed.value for placed in self.stage.placed]
        for node in walk(*roots):  # what a call in the middle of a block separates from the loop around it
            if node.op == "torch_sqrt" or any(arg in self.after_sqrt for arg in node.args):
                self.after_sqrt.add(node)
        self.enter(())
        self.hoist(roots)
        *outer, last = self.stage.col_parts
        slow = bool(self.after_sqrt)
        if not outer:
            self._one_loop(last, roots, slow)
            return
        if slow:
            raise Unfusable("eager's square root of a tensor that is not contiguous")
        across = self._transposed(outer, last, roots)
        if across is not None:
            self._tiles(outer, across, last, roots)
            return
        levels = self._outer_loops(outer, roots)
        self.writer.line("#pragma omp simd")
        self.writer.open(f"for (int64_t {last.name} = 0; {last.name} < {last.size}; ++{last.name})")
        self._body(last, roots)
        for _ in range(levels + 1):
            self.writer.close()

    def _outer_loops(self, outer: Sequence[Var], roots: Sequence[Expr]) -> int:
        """Open the outer loops: enough of them flattened to feed the threads; returns how many."""
        shared = 1
        while shared < len(outer) and size(v.size for v in outer[:shared]) < 64:
            shared += 1
        count = size(v.size for v in outer[:shared])
        self.writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        self.writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(self.writer, outer[:shared], "u")
        self.enter(outer[:shared])
        self.hoist(roots)
        for var in outer[shared:]:
            self.writer.open(f"for (int64_t {var.name} = 0; {var.name} < {var.size}; ++{var.name})")
            self.enter((var,))
            self.hoist(roots)
        return 1 + len(outer) - shared

    def _loads(self, roots: Sequence[Expr]) -> list[Expr]:
        return [n for n in walk(*roots) if n.op == "load" and not n.args]

    def _turned(self, node: Expr, across: Var, last: Var) -> bool:
        """Whether a load is contiguous along `across` and strided along `last`."""
        assert node.leaf is not None
        index = node.leaf.index
        return index.linear and index.coefficient(across) == 1 and index.coefficient(last) > 1

    def _transposed(self, outer: Sequence[Var], last: Var, roots: Sequence[Expr]) -> Var | None:
        """The variable along which most transposed operands are contiguous, if tiling pays."""
        counts = {v: sum(self._turned(n, v, last) for n in self._loads(roots)) for v in outer if v.size >= 16}
        best = max(counts, key=lambda v: counts[v], default=None)
        return best if best is not None and counts[best] and last.size >= 16 else None

    def _tiles(self, outer: Sequence[Var], across: Var, last: Var, roots: Sequence[Expr]) -> None:
        """Loops over tiles of ``across x last``; transposed operands pass through scratch."""
        writer = self.writer
        others = [v for v in outer if v is not across]
        bands = (across.size + TILE_ACROSS - 1) // TILE_ACROSS
        count = size(v.size for v in others) * bands
        writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(writer, (*others, Var("band", bands)), "u")
        writer.line(f"const int64_t first = band * {TILE_ACROSS};")
        writer.line(
            f"const int64_t left = {across.size} - first, nu = left < {TILE_ACROSS} ? left : {TILE_ACROSS};"
        )
        self.enter(others)
        self.hoist(roots)
        writer.open(f"for (int64_t start = 0; start < {last.size}; start += {TILE_LAST})")
        writer.line(
            f"const int64_t nl = {last.size} - start < {TILE_LAST} ? {last.size} - start : {TILE_LAST};"
        )
        for node in [n for n in self._loads(roots) if self._turned(n, across, last)]:
            self._transpose(node, across, last)
        writer.open("for (int64_t du = 0; du < nu; ++du)")
        writer.line(f"const int64_t {across.name} = first + du; (void){across.name};")
        self.enter((across,))
        self.hoist(roots)
        writer.line("#pragma omp simd")
        writer.open("for (int64_t dl = 0; dl < nl; ++dl)")
        writer.line(f"const int64_t {last.name} = start + dl; (void){last.name};")
        self._body(last, roots)
        for _ in range(4):
            writer.close()

    def _transpose(self, node: Expr, across: Var, last: Var) -> None:
        leaf = node.leaf
        assert leaf is not None and leaf.stored is not None
        kind, name = memory_type(leaf.stored), self.writer.fresh("x")
        self.writer.line(f"{kind}* const {name} = ({kind}*)(own + {self.writer.own(TILE_BYTES)});")
        starts = {across: Index.of(Var("first", across.size)), last: Index.of(Var("start", last.size))}
        place = index_text(leaf.index.substitute(lambda var: starts.get(var) or Index.of(var)))
        step = leaf.index.coefficient(last)
        self.writer.line(
            f"lt_transpose({leaf.source} + {place}, {step}, {name}, {TILE_LAST + TILE_PAD}, nu, nl);"
        )
        self.kept[node] = name

    def _one_loop(self, var: Var, roots: Sequence[Expr], slow: bool) -> None:
        self.writer.line(f"const lt_span span = lt_share({self.stage.cols}, 1024, thread, threads);")
        if slow:
            self._blocks(var, roots)
            return
        self.writer.line("#pragma omp simd")
        self.writer.open(f"for (int64_t {var.name} = span.lo; {var.name} < span.hi; ++{var.name})")
        self._body(var, roots)
        self.writer.close()

    def _body(self, var: Var, roots: Sequence[Expr]) -> None:
        self.enter((var,))
        self.hoist(roots, force=True)
        for placed in self.stage.placed:
            self.store(placed)

    def _blocks(self, var: Var, roots: Sequence[Expr]) -> None:
        """Blocks of a flat loop, cut at eager's square root: values before it wait in scratch."""
        writer = self.writer
        writer.uses_torch = True
        block = min(SQRT_BLOCK, self.stage.cols)
        writer.open(f"for (int64_t base = span.lo; base < span.hi; base += {block})")
        writer.line(f"const int64_t stop = base + {block} < span.hi ? base + {block} : span.hi;")
        for node in [n for n in walk(*roots) if n.op == "torch_sqrt"]:
            kind = compute_type(node.dtype)
            array = writer.fresh("q")
            writer.line(
                f"{kind}* const {array} = ({kind}*)(own + {writer.own(block * node.dtype.itemsize)});"
            )
            self._block_loop(
                var,
                [node.args[0]],
                lambda a=array, n=node: f"{a}[{var.name} - base] = {self.name_of(n.args[0])};",
            )
            writer.line(f"lt_torch_sqrt({array}, stop - base);")
            self.kept[node] = array
        self._block_loop(var, roots, None)
        writer.close()

    def _block_loop(self, var: Var, roots: Sequence[Expr], action: object) -> None:
        self.writer.line("#pragma omp simd")
        self.writer.open(f"for (int64_t {var.name} = base; {var.name} < stop; ++{var.name})")
        self.enter((var,))
        self.hoist(roots, force=True)
        if callable(action):
            self.writer.line(action())
        else:
            for placed in self.stage.placed:
                self.store(placed)
        self.scopes.pop()
        self.writer.close()

    def hoistable(self, node: Expr) -> bool:
        return super().hoistable(node) and node not in self.after_sqrt

    def text(self, node: Expr, args: list[str]) -> str:
        if node in self.kept and node.leaf is not None:  # a transposed operand, as it lies in memory
            moved = Leaf("load", source=self.kept[node], index=_TILE_PLACE, stored=node.leaf.stored)
            return load_text(Expr("load", (), node.dtype, moved), "")
        return super().text(node, args)

    def kept_place(self) -> str:
        return f"{self.stage.col_parts[-1].name} - base"
