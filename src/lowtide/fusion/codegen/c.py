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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from lowtide.fusion.codegen.chain import Chain, Link, find_links
from lowtide.fusion.codegen.channelwise import emitter_of
from lowtide.fusion.codegen.ctext import compute_type, memory_type
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.flat import Flat
from lowtide.fusion.codegen.gemm import Gemm, operands
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.lanes import Lanes
from lowtide.fusion.codegen.loops import Writer, size
from lowtide.fusion.codegen.lower import Lowered
from lowtide.fusion.codegen.nest import plan_stages
from lowtide.fusion.codegen.rows import Inner
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Kernel, Store, Window

__all__ = ["GRAIN", "Source", "emit_kernel", "far_references"]

GRAIN = 1 << 15  # points below which a kernel runs on one thread


@dataclass(frozen=True)
class Source:
    """C++ text of one kernel and what a caller has to provide.

    `shared_bytes` + threads * `thread_bytes` is the scratch it needs; `points` the size of its largest loop.
    `prepared_bytes`: what its second function, ``NAME_prepare``, makes of constants, once; `setup_inputs` are
    the positions of inputs that only that function reads.
    """

    text: str
    shared_bytes: int
    thread_bytes: int
    points: int
    uses_torch: bool
    uses_brgemm: bool
    inplace: tuple[tuple[int, int], ...]
    prepared_bytes: int = 0
    uses_windows: bool = False
    setup_inputs: tuple[int, ...] = ()


def emit_kernel(name: str, lowered: Lowered) -> Source:
    """The function ``name`` for one body; raises Unfusable if a template is missing."""
    stages = plan_stages(lowered.kernel)
    parts = find_links(stages)
    writer = Writer(constants=frozenset(lowered.kernel.constants), setup=Writer())
    _prepare(lowered, writer)
    spilled = _spill(parts, lowered, writer)
    for number, part in enumerate(parts):
        if number:
            writer.line("lt_barrier(threads);")
        writer.open("")
        _emit_part(part, writer, spilled)
        writer.close()
    points = max((_points(stage) for stage in stages), default=0)
    text = _wrap(name, lowered.dtypes, writer, points)
    return Source(
        text,
        writer.shared_bytes,
        max(writer.thread_bytes, writer.setup.thread_bytes if writer.setup else 0),
        points,
        writer.uses_torch,
        writer.uses_brgemm,
        _inplace(stages, lowered),
        writer.prepared_bytes,
        writer.uses_windows,
        _setup_inputs(lowered, writer) if writer.prepared_bytes else (),
    )


def _setup_inputs(lowered: Lowered, writer: Writer) -> tuple[int, ...]:
    """Positions of the constants whose names no line of the kernel itself mentions."""
    read = set(re.findall(r"\bi\d+\b", "\n".join(writer.lines)))
    return tuple(sorted(int(name[1:]) for name in lowered.kernel.constants if name not in read))


def _prepare(lowered: Lowered, writer: Writer) -> None:
    """Tensors of constants, computed once."""
    for name, tensor in lowered.kernel.prepared:
        setup = writer.prepare(name, max(tensor.numel, 1) * 4)
        steps = tuple(prod(tensor.shape[k + 1 :]) for k in range(len(tensor.shape)))
        made = Kernel(lowered.kernel.builder, stores=[Store(name, tensor, steps, torch.float32)])
        for stage in plan_stages(made):
            setup.open("")
            Flat(stage, setup, {}).emit()
            setup.close()


def _points(stage: Stage) -> int:
    """Size of a stage for deciding on threads; a product's by its arithmetic."""
    deep = 1 if stage.product is None else max(stage.product.sizes[3] // 16, 1)
    return max(stage.rows, 1) * stage.cols * deep


def _spill(parts: Sequence[Stage | Link], lowered: Lowered, writer: Writer) -> dict[str, str]:
    """Reductions that another stage reads: name -> C type, with a scratch array declared for each."""
    dtypes = {r.name: r for r in lowered.kernel.reductions}
    result = {node.leaf.source: compute_type(node.dtype) for node in far_references(parts) if node.leaf}
    for name, text in result.items():
        count = max(size(dtypes[name].kept), 1)
        offset = writer.share(count * 8)
        writer.line(f"{text}* const {name}_all = ({text}*)(scratch + {offset});")
    return result


def far_references(parts: Sequence[Stage | Link]) -> Iterator[Expr]:
    """References to reductions and products that are not at hand where they are read."""
    for part in parts:
        for root in _roots(part):
            for node in walk(root):
                if node.leaf is not None and node.leaf.kind == "reduced" and not _holds(part, node):
                    yield node


def _holds(part: Stage | Link, node: Expr) -> bool:
    if isinstance(part, Link):
        return part.holds(node) or part.second.holds(node)
    return part.holds(node)


def _roots(stage: Stage | Link) -> list[Expr]:
    """Everything that a stage evaluates, the operands of a product included."""
    if isinstance(stage, Link):
        first, second = stage.first.product, stage.second.product
        assert first is not None and second is not None
        rows = [placed.value for placed in (*stage.rows.placed, *stage.second.placed)]
        return [*operands(first), *rows, stage.operand, operands(second)[1]]
    roots = [placed.value for placed in stage.placed]
    return roots if stage.product is None else [*roots, *operands(stage.product)]


def _inplace(stages: Sequence[Stage], lowered: Lowered) -> tuple[tuple[int, int], ...]:
    """(output, input) pairs that may share memory: one flat stage reads the input only where it writes."""
    if len(stages) != 1 or not stages[0].flat:
        return ()
    stores: dict[str, set[Index]] = {}
    loads: dict[str, set[Index]] = {}
    for placed in stages[0].placed:
        assert placed.item.store is not None
        stores.setdefault(placed.item.store.buffer, set()).add(placed.place)
        for node in walk(placed.value):
            if node.leaf is not None and node.leaf.kind == "load":
                loads.setdefault(node.leaf.source, set()).add(
                    node.leaf.index if not node.args else Index.of(-1)
                )
    pairs = []
    for out, places in stores.items():
        for source, read in loads.items():
            same = lowered.dtypes[out].itemsize == lowered.dtypes[source].itemsize
            if out[0] + source[0] == "oi" and same and len(places) == 1 and read == places:
                pairs.append((int(out[1:]), int(source[1:])))
    return tuple(pairs)


def _wrap(name: str, dtypes: Mapping[str, torch.dtype], writer: Writer, points: int) -> str:
    given = [(buffer, memory_type(dtype)) for buffer, dtype in dtypes.items() if buffer[0] != "w"]
    pointers = [
        f"  {kind}* const {buffer} = ({kind}*)p[{slot}];" for slot, (buffer, kind) in enumerate(given)
    ]
    if writer.prepared_bytes:
        pointers.append(f"  char* const prepared = p[{len(given)}]; (void)prepared;")
    head = [
        f"static long {name}_body(char* const* p, const double* sc, char* scratch, long thread,",
        "    long threads) {",
        *pointers,
        "  long bad = 0; (void)sc; (void)scratch; (void)thread;",
        f"  char* const own = scratch + {writer.shared_bytes} + thread * {writer.thread_bytes}; (void)own;",
    ]
    once = _wrap_setup(name, pointers, writer)
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
    return "\n".join([*once, *head, *writer.lines, *tail])


def _wrap_setup(name: str, pointers: Sequence[str], writer: Writer) -> list[str]:
    if not writer.prepared_bytes or writer.setup is None:
        return []
    return [
        f'extern "C" long {name}_prepare(char* const* p, char* scratch) {{',
        *pointers,
        "  const long thread = 0, threads = 1; long bad = 0; (void)thread; (void)threads;",
        "  char* const own = scratch; (void)own; (void)bad;",
        *writer.setup.lines,
        "  return bad;",
        "}",
    ]


def _emit_part(part: Stage | Link, writer: Writer, spilled: Mapping[str, str]) -> None:
    if isinstance(part, Link):
        Chain(part, writer, spilled).emit()
        return
    stage = part
    writer.line(f"// {stage.rows} x {stage.cols}")
    if isinstance(stage.product, Window):
        emitter_of(stage.product)(stage, writer, spilled).emit()
    elif stage.product is not None:
        Gemm(stage, writer, spilled).emit()
    elif stage.flat:
        Flat(stage, writer, spilled).emit()
    elif stage.lanes:
        Lanes(stage, writer, spilled).emit()
    else:
        Inner(stage, writer, spilled).emit()
