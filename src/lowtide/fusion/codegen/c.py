"""From planned stages to one C++ function per kernel.

Problem.  Emit loops that gcc vectorises, that compute every common sub-expression once at the outermost loop
where it is known, and that keep a row in cache between passes.

Method.  A stage of rows runs in one of two ways, chosen by which axis is contiguous in memory:

    inner: for row (parallel):  pass 1 over cols -> m0;  pass 2 over cols -> m1;  pass 3 stores
    lanes: for tile of rows (parallel):  the same passes, with ``col`` outside and 64-256 rows in the lanes

An expression is emitted in the outermost loop whose variables it needs.  If a later pass needs an expensive
expression of an earlier one (exp), the earlier pass keeps it in a row of scratch.  Float sums add blocks of
at most 4096 elements in float32 lanes and the blocks in float64.

Invariants.  Threads share rows by an arithmetic split, so a result does not depend on how many there are.
Stages are separated by barriers; nothing is allocated.  Signature of a kernel, see `library.Signature`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.fusion.codegen.ctext import compute_type, index_text, load_text, memory_type, operation_text, store_text
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import Index, Var
from lowtide.fusion.codegen.lower import Lowered
from lowtide.fusion.codegen.nest import Placed, Stage, plan_stages
from lowtide.fusion.codegen.tensor import Reduction, Unfusable

__all__ = ["Source", "emit_kernel"]

BLOCK = 4096  # elements summed in float32 before the float64 total takes over
LANES = 256  # rows in one tile of the lanes mode
KEEP_COST = 6  # an expression at least this costly is kept between passes instead of recomputed
KEEP_BYTES = 1 << 18  # at most this much scratch a row (or tile)
GRAIN = 1 << 15  # elements below which a kernel runs on one thread
SQRT_BLOCK = 4096  # elements per call of eager's square root


@dataclass(frozen=True)
class Source:
    """C++ text of one kernel and what a caller has to provide.

    `shared_bytes` + threads * `thread_bytes` is the scratch it needs; `points` the size of its largest loop.
    """

    text: str
    shared_bytes: int
    thread_bytes: int
    points: int
    uses_torch: bool
    inplace: tuple[tuple[int, int], ...]


@dataclass
class _Writer:
    """Lines of C++ with indentation, and the scratch layout."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1
    shared_bytes: int = 0
    thread_bytes: int = 0
    counter: int = 0
    uses_torch: bool = False

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")

    def fresh(self, letter: str = "t") -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def share(self, nbytes: int) -> int:
        """Reserve shared scratch; returns its offset."""
        offset = self.shared_bytes
        self.shared_bytes += (nbytes + 63) // 64 * 64
        return offset

    def own(self, nbytes: int) -> int:
        """Reserve per-thread scratch; returns its offset."""
        offset = self.thread_bytes
        self.thread_bytes += (nbytes + 63) // 64 * 64
        return offset


def emit_kernel(name: str, lowered: Lowered) -> Source:
    """The function ``name`` for one body; raises Unfusable if a template is missing."""
    stages = plan_stages(lowered.kernel)
    writer = _Writer()
    spilled = _spill(stages, lowered, writer)
    for number, stage in enumerate(stages):
        if number:
            writer.line("lt_barrier(threads);")
        writer.line(f"// stage {number}: {stage.rows} x {stage.cols}")
        writer.open("")
        _emit_stage(stage, writer, spilled)
        writer.close()
    points = max((max(stage.rows, 1) * stage.cols for stage in stages), default=0)
    text = _wrap(name, lowered.dtypes, writer, points)
    return Source(text, writer.shared_bytes, writer.thread_bytes, points, writer.uses_torch, _inplace(stages, lowered))


def _spill(stages: Sequence[Stage], lowered: Lowered, writer: _Writer) -> dict[str, str]:
    """Reductions that another stage reads: name -> C type, with a scratch array declared for each."""
    dtypes = {r.name: r for r in lowered.kernel.reductions}
    result = {}
    for stage in stages:
        for placed in stage.placed:
            for node in walk(placed.value):
                leaf = node.leaf
                if leaf is None or leaf.kind != "reduced" or leaf.source in result:
                    continue
                if leaf.source not in stage.names or leaf.index != stage.row:
                    result[leaf.source] = compute_type(node.dtype)
    for name, text in result.items():
        count = max(_size(dtypes[name].kept), 1)
        offset = writer.share(count * 8)
        writer.line(f"{text}* const {name}_all = ({text}*)(scratch + {offset});")
    return result


def _size(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _inplace(stages: Sequence[Stage], lowered: Lowered) -> tuple[tuple[int, int], ...]:
    """(output, input) pairs that may share memory: one flat stage that reads the input only where it writes."""
    if len(stages) != 1 or not stages[0].flat:
        return ()
    stores: dict[str, set[Index]] = {}
    loads: dict[str, set[Index]] = {}
    for placed in stages[0].placed:
        assert placed.item.store is not None
        stores.setdefault(placed.item.store.buffer, set()).add(placed.place)
        for node in walk(placed.value):
            if node.leaf is not None and node.leaf.kind == "load":
                loads.setdefault(node.leaf.source, set()).add(node.leaf.index if not node.args else Index.of(-1))
    pairs = []
    for out, places in stores.items():
        for source, read in loads.items():
            same = lowered.dtypes[out].itemsize == lowered.dtypes[source].itemsize
            if out[0] == "o" and same and len(places) == 1 and read == places:
                pairs.append((int(out[1:]), int(source[1:])))
    return tuple(pairs)


def _wrap(name: str, dtypes: Mapping[str, torch.dtype], writer: _Writer, points: int) -> str:
    pointers = [
        f"  {memory_type(dtype)}* const {buffer} = ({memory_type(dtype)}*)p[{slot}];"
        for slot, (buffer, dtype) in enumerate(dtypes.items())
    ]
    head = [
        f"static long {name}_body(char* const* p, const double* sc, char* scratch, long thread, long threads) {{",
        *pointers,
        "  long bad = 0; (void)sc; (void)scratch; (void)thread;",
        f"  char* const own = scratch + {writer.shared_bytes} + thread * {writer.thread_bytes}; (void)own;",
    ]
    tail = [
        "  return bad;",
        "}",
        f'extern "C" long {name}(char* const* p, const double* sc, char* scratch, long threads) {{',
        f"  if (threads <= 1 || {points} < {GRAIN}) return {name}_body(p, sc, scratch, 0, 1);",
        "  long bad = 0;",
        "  #pragma omp parallel num_threads(threads) reduction(| : bad)",
        f"  bad |= {name}_body(p, sc, scratch, omp_get_thread_num(), omp_get_num_threads());",
        "  return bad;",
        "}",
    ]
    return "\n".join([*head, *writer.lines, *tail])


def _emit_stage(stage: Stage, writer: _Writer, spilled: Mapping[str, str]) -> None:
    if stage.flat:
        _Flat(stage, writer, spilled).emit()
    elif _lanes_wins(stage):
        _Lanes(stage, writer, spilled).emit()
    else:
        _Inner(stage, writer, spilled).emit()


def _lanes_wins(stage: Stage) -> bool:
    """Whether memory is contiguous along rows rather than along columns."""
    row, col = stage.row_parts[-1], stage.col_parts[-1]
    score = 0
    for placed in stage.placed:
        indices = [n.leaf.index for n in walk(placed.value) if n.leaf is not None and n.leaf.kind == "load"]
        for index in [*indices, placed.place] if placed.item.store is not None else indices:
            score += (index.coefficient(row) == 1) * row.size - (index.coefficient(col) == 1) * col.size
    return row.size > 1 and (score > 0 or stage.cols == 1)


@dataclass
class _Scope:
    """Names of expressions known in one open loop."""

    variables: frozenset[Var]
    names: dict[Expr, str] = field(default_factory=dict)


class _Loops:
    """What the three kinds of stage share: scopes and the emission of expressions."""

    def __init__(self, stage: Stage, writer: _Writer, spilled: Mapping[str, str]) -> None:
        self.stage, self.writer, self.spilled = stage, writer, spilled
        self.scopes: list[_Scope] = []
        self.kept: dict[Expr, str] = {}  # expression -> scratch array holding it for the current row

    def enter(self, variables: Iterable[Var]) -> None:
        known = self.scopes[-1].variables if self.scopes else frozenset()
        self.scopes.append(_Scope(known | frozenset(variables)))

    def name_of(self, node: Expr) -> str | None:
        return next((s.names[node] for s in reversed(self.scopes) if node in s.names), None)

    def ready(self, node: Expr) -> bool:
        """Whether every variable and reduction that `node` needs is known in the open scopes."""
        return node.variables <= self.scopes[-1].variables and all(
            self.available(leaf) for leaf in self._reduced(node)
        )

    def _reduced(self, node: Expr) -> list[Expr]:
        return [n for n in walk(node) if n.leaf is not None and n.leaf.kind == "reduced"]

    def available(self, node: Expr) -> bool:
        """Whether a reduction's result can be read here."""
        return True

    def needed(self, roots: Sequence[Expr]) -> list[Expr]:
        """Nodes to emit for `roots`, arguments first, stopping at what is known or kept."""
        order: list[Expr] = []
        seen: set[int] = set()
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen and self.name_of(node) is None:
                seen.add(id(node))
                stack.append((node, True))
                if node not in self.kept:
                    stack.extend((arg, False) for arg in reversed(node.args))
        return order

    def hoist(self, roots: Sequence[Expr], force: bool = False) -> None:
        """Emit what is ready in the innermost open scope; `force`: everything must be."""
        for node in self.needed(roots):
            if force or self.hoistable(node):
                self.define(node)

    def hoistable(self, node: Expr) -> bool:
        return self.ready(node) and node not in self.kept

    def define(self, node: Expr) -> None:
        """One line that names the value of `node`."""
        if self.name_of(node) is not None:
            return
        args = [self.name_of(arg) or self._missing(arg) for arg in node.args] if node not in self.kept else []
        if node.op == "const":
            self.scopes[-1].names[node] = operation_text(node, [])
            return
        name = self.writer.fresh()
        self.writer.line(f"const {compute_type(node.dtype)} {name} = {self.text(node, args)};")
        self.scopes[-1].names[node] = name

    def _missing(self, node: Expr) -> str:
        raise AssertionError(f"{node.op} is used before it is defined")

    def text(self, node: Expr, args: list[str]) -> str:
        if node in self.kept:
            return f"{self.kept[node]}[{self.kept_place()}]"
        if node.op == "load":
            return load_text(node, args[0] if args else "")
        if node.op == "reduced":
            return self.reduced_text(node)
        return operation_text(node, args)

    def kept_place(self) -> str:
        raise NotImplementedError

    def reduced_text(self, node: Expr) -> str:
        assert node.leaf is not None
        return f"{node.leaf.source}_all[{index_text(node.leaf.index)}]"

    def store(self, placed: Placed) -> None:
        store = placed.item.store
        assert store is not None
        value = store_text(self.name_of(placed.value) or "", store.dtype)
        self.writer.line(f"{store.buffer}[{index_text(placed.place)}] = {value};")


class _Flat(_Loops):
    """Element-wise stages: outer variables shared by threads, the last one in vector lanes."""

    def emit(self) -> None:
        roots = [placed.value for placed in self.stage.placed]
        self.enter(())
        self.hoist(roots)
        *outer, last = self.stage.col_parts
        slow = any(n.op == "torch_sqrt" for n in walk(*roots))
        if not outer:
            self._one_loop(last, roots, slow)
            return
        if slow:
            raise Unfusable("eager's square root of a tensor that is not contiguous")
        levels = self._outer_loops(outer, roots)
        self.writer.line("#pragma omp simd")
        self.writer.open(f"for (int64_t {last.name} = 0; {last.name} < {last.size}; ++{last.name})")
        self._body(last, roots)
        for _ in range(levels + 1):
            self.writer.close()

    def _outer_loops(self, outer: Sequence[Var], roots: Sequence[Expr]) -> int:
        """Open the outer loops: enough of them flattened to feed the threads; returns how many."""
        shared = 1
        while shared < len(outer) and _size(v.size for v in outer[:shared]) < 64:
            shared += 1
        count = _size(v.size for v in outer[:shared])
        self.writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        self.writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        _declare(self.writer, outer[:shared], "u")
        self.enter(outer[:shared])
        self.hoist(roots)
        for var in outer[shared:]:
            self.writer.open(f"for (int64_t {var.name} = 0; {var.name} < {var.size}; ++{var.name})")
            self.enter((var,))
            self.hoist(roots)
        return 1 + len(outer) - shared

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
        writer.open(f"for (int64_t base = span.lo; base < span.hi; base += {SQRT_BLOCK})")
        writer.line(f"const int64_t stop = base + {SQRT_BLOCK} < span.hi ? base + {SQRT_BLOCK} : span.hi;")
        for node in [n for n in walk(*roots) if n.op == "torch_sqrt"]:
            kind = compute_type(node.dtype)
            array = writer.fresh("q")
            writer.line(f"{kind}* const {array} = ({kind}*)(own + {writer.own(SQRT_BLOCK * 8)});")
            self._block_loop(var, [node.args[0]], lambda a=array, n=node: f"{a}[{var.name} - base] = {self.name_of(n.args[0])};")
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
        return super().hoistable(node) and node.op != "torch_sqrt"

    def kept_place(self) -> str:
        return f"{self.stage.col_parts[-1].name} - base"


def _declare(writer: _Writer, variables: Sequence[Var], flat: str) -> None:
    """Define row-major `variables` from their flat position."""
    step = 1
    lines = []
    for place, var in enumerate(reversed(variables)):
        outermost = place == len(variables) - 1
        text = f"{flat} / {step}" if step > 1 else flat
        lines.append(f"const int64_t {var.name} = {text if outermost else f'{text} % {var.size}'}; (void){var.name};")
        step *= var.size
    for text in reversed(lines):
        writer.line(text)


_IDENTITY = {"sum": "0", "prod": "1", "any": "0", "all": "1"}
_COMBINE = {
    "sum": "{0} += {1};",
    "prod": "{0} *= {1};",
    "any": "{0} |= {1};",
    "all": "{0} &= {1};",
    "max": "{0} = lt_max({0}, {1});",
    "min": "{0} = lt_min({0}, {1});",
}
_CLAUSE = {"sum": "+", "prod": "*", "any": "|", "all": "&", "max": "lt_max", "min": "lt_min"}


def _identity(reduction: Reduction) -> str:
    """The neutral element, as C text."""
    if reduction.kind in _IDENTITY:
        return _IDENTITY[reduction.kind]
    if reduction.dtype.is_floating_point:
        return f"{'-' if reduction.kind == 'max' else ''}__builtin_inf()"
    if reduction.dtype == torch.bool:
        return "0" if reduction.kind == "max" else "1"
    info = torch.iinfo(reduction.dtype)
    bound = info.min if reduction.kind == "max" else info.max
    return "INT64_MIN" if bound == -(2**63) else f"INT64_C({bound})"


def _lane_type(reduction: Reduction, dtype: torch.dtype) -> str:
    return "int" if dtype == torch.bool else compute_type(dtype)


class _Rows(_Loops):
    """What the two row modes share: passes, and which expressions are kept between them."""

    def __init__(self, stage: Stage, writer: _Writer, spilled: Mapping[str, str]) -> None:
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
            self.writer.line(f"{kind}* const {name} = ({kind}*)(own + {self.writer.own(self.kept_bytes(node))});")
            result.append((node, name))
        return result

    def col_text(self) -> str:
        return index_text(self.stage.col) if self.stage.cols > 1 else "0"


class _Inner(_Rows):
    """Columns in the lanes: row reductions over contiguous rows."""

    def kept_bytes(self, node: Expr) -> int:
        return self.stage.cols * node.dtype.itemsize

    def emit(self) -> None:
        writer, stage = self.writer, self.stage
        self.enter(())
        self.hoist([p.value for p in stage.placed])
        writer.line(f"const lt_span span = lt_share({stage.rows}, 1, thread, threads);")
        writer.open("for (int64_t r = span.lo; r < span.hi; ++r)")
        _declare(writer, stage.row_parts, "r")
        self.enter(stage.row_parts)
        for number in range(len(self.passes)):
            self._pass(number)
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
            if placed.item.reduction is not None:
                self._finish(placed.item.reduction)

    def _loop(self, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        writer = self.writer
        reductions = [p for p in items if p.item.reduction is not None]
        for placed in reductions:
            assert placed.item.reduction is not None
            kind = _total_type(placed.item.reduction, placed.value.dtype)
            writer.line(f"{kind} {placed.item.name}_total = {_identity(placed.item.reduction)};")
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
        self, last: Var, items: Sequence[Placed], reductions: Sequence[Placed], keep: Sequence[tuple[Expr, str]]
    ) -> None:
        writer = self.writer
        size = 0 if self.stage.cols == 0 else last.size
        blocked = size > BLOCK and any(_is_float_sum(p) for p in reductions)
        if blocked:
            writer.open(f"for (int64_t from = 0; from < {size}; from += {BLOCK})")
            writer.line(f"const int64_t to = from + {BLOCK} < {size} ? from + {BLOCK} : {size};")
        low, high = ("from", "to") if blocked else ("0", str(size))
        for placed in reductions:
            assert placed.item.reduction is not None
            kind = _lane_type(placed.item.reduction, placed.value.dtype)
            writer.line(f"{kind} {placed.item.name}_part = {_identity(placed.item.reduction)};")
        if not self._gathers(items, last):
            writer.line("#pragma omp simd" + "".join(_clause(p) for p in reductions))
        writer.open(f"for (int64_t {last.name} = {low}; {last.name} < {high}; ++{last.name})")
        self._body(last, items, keep)
        writer.close()
        for placed in reductions:
            assert placed.item.reduction is not None
            combine = _COMBINE[placed.item.reduction.kind]
            writer.line(combine.format(f"{placed.item.name}_total", f"{placed.item.name}_part"))
        if blocked:
            writer.close()

    def _gathers(self, items: Sequence[Placed], last: Var) -> bool:
        return any(n.op == "load" and n.args and last in n.args[0].variables for n in walk(*(p.value for p in items)))

    def _body(self, last: Var, items: Sequence[Placed], keep: Sequence[tuple[Expr, str]]) -> None:
        self.enter((last,))
        self.hoist([p.value for p in items], force=True)
        for node, array in keep:
            self.writer.line(f"{array}[{self.kept_place()}] = {self.name_of(node)};")
        for placed in items:
            if placed.item.reduction is None:
                self.store(placed)
            else:
                combine = _COMBINE[placed.item.reduction.kind]
                self.writer.line(combine.format(f"{placed.item.name}_part", self.name_of(placed.value)))
        self.scopes.pop()

    def _finish(self, reduction: Reduction) -> None:
        kind = compute_type(_result_dtype(reduction))
        self.writer.line(f"const {kind} {reduction.name} = ({kind}){reduction.name}_total;")
        if reduction.name in self.spilled:
            self.writer.line(f"{reduction.name}_all[{index_text(self.stage.row)}] = {reduction.name};")
        self.done.add(reduction.name)

    def kept_place(self) -> str:
        return self.col_text()

    def reduced_text(self, node: Expr) -> str:
        assert node.leaf is not None
        local = node.leaf.source in self.stage.names and node.leaf.index == self.stage.row
        return node.leaf.source if local else super().reduced_text(node)


def _is_float_sum(placed: Placed) -> bool:
    reduction = placed.item.reduction
    return reduction is not None and reduction.kind == "sum" and placed.value.dtype == torch.float32


def _total_type(reduction: Reduction, dtype: torch.dtype) -> str:
    if reduction.kind in ("sum", "prod") and dtype == torch.float32:
        return "double"
    return _lane_type(reduction, dtype)


def _result_dtype(reduction: Reduction) -> torch.dtype:
    return torch.float32 if reduction.dtype == torch.bfloat16 else reduction.dtype


def _clause(placed: Placed) -> str:
    assert placed.item.reduction is not None
    kind = placed.item.reduction.kind
    if kind in ("max", "min") and not placed.value.dtype.is_floating_point:
        return f" reduction({kind} : {placed.item.name}_part)"
    return f" reduction({_CLAUSE[kind]} : {placed.item.name}_part)"


class _Lanes(_Rows):
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
        count = _size(v.size for v in outer) * tiles
        self.enter(())
        self.hoist([p.value for p in stage.placed])
        writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        _declare(writer, (*outer, Var("tile", tiles)), "u")
        writer.line(f"const int64_t base = tile * {self.tile};")
        writer.line(f"const int64_t width = {last.size} - base < {self.tile} ? {last.size} - base : {self.tile};")
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
        for placed in items:
            reduction = placed.item.reduction
            if reduction is not None:
                kind = _total_type(reduction, placed.value.dtype)
                writer.line(f"{kind} {placed.item.name}_sum[{self.tile}];")
                writer.line(
                    f"for (int64_t lane = 0; lane < width; ++lane) {placed.item.name}_sum[lane] = {_identity(reduction)};"
                )
        for var in self.stage.col_parts:
            size = 0 if self.stage.cols == 0 else var.size
            writer.open(f"for (int64_t {var.name} = 0; {var.name} < {size}; ++{var.name})")
            self.enter((var,))
            self.hoist([p.value for p in items])
        self._lane_loop(items, keep)
        for _ in self.stage.col_parts:
            self.scopes.pop()
            writer.close()
        self.kept.update(keep)

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
                combine = _COMBINE[placed.item.reduction.kind]
                self.writer.line(combine.format(f"{placed.item.name}_sum[lane]", self.name_of(placed.value)))
        self._close_lanes()

    def _finish(self, reduction: Reduction) -> None:
        kind = compute_type(_result_dtype(reduction))
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
        local = node.leaf.source in self.stage.names and node.leaf.index == self.stage.row
        return f"{node.leaf.source}[lane]" if local else super().reduced_text(node)
