"""Mapping types (DNNFusion, section 3): how an operator's output elements relate to its input elements.

Problem.  Whether two operators may share a loop nest depends on how each maps indices, not on its name.

Method.  An operator known to the code generator is lowered alone, on made-up contiguous operands, and its
type is read off the access maps that come out: the index of every load as a function of the output's
axes, and the axes that it reduces.  Contractions, windows and scans, which are not generated that way,
have their axes declared (`DECLARED`).  Of several inputs the most complex decides.

    One-to-One < Reorganize < Shuffle < One-to-Many < Many-to-Many

`TABLE` is the paper's Table 3 as data: 23 cells with the fused type, two of them empty (red).  Sub-kinds of
Many-to-Many keep apart what the paper's table cannot: a row reduction joins another over the same rows.

Not done here: legality (convexity, writes, random numbers: `transforms.fuse`) and profit (`planner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from math import prod

from lowtide.fusion.codegen.expr import walk
from lowtide.fusion.codegen.index import Index, Var, flatten
from lowtide.fusion.codegen.lower import knows, lower
from lowtide.fusion.codegen.tensor import Reduction, Tensor, Unfusable
from lowtide.ir.graph import Graph, Node, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Aten

__all__ = [
    "DECLARED",
    "IMPEDANCE",
    "TABLE",
    "Cell",
    "Classified",
    "Kind",
    "Mapping",
    "Verdict",
    "classify",
    "combine",
    "fused_type",
]


class Mapping(IntEnum):
    """The paper's five types, in its order of complexity."""

    ONE_TO_ONE = 0
    REORGANIZE = 1
    SHUFFLE = 2
    ONE_TO_MANY = 3
    MANY_TO_MANY = 4


class Kind(Enum):
    """What a Many-to-Many operator combines."""

    ROW = "row"  # reduces trailing axes
    REDUCTION = "reduction"  # reduces others
    WINDOW = "window"
    CONTRACTION = "contraction"
    SCAN = "scan"
    OPAQUE = "opaque"  # nothing is known: never fused


class Verdict(Enum):
    """Colours of Table 3."""

    GREEN = "green"  # fuse
    YELLOW = "yellow"  # legal; profit decides
    RED = "red"  # do not


@dataclass(frozen=True)
class Cell:
    """One cell of Table 3: the verdict and the type of the fused operator (None if red)."""

    verdict: Verdict
    result: Mapping | None


@dataclass(frozen=True)
class Classified:
    """An operator's type, its sub-kind if Many-to-Many, and whether it computes anything per element."""

    mapping: Mapping
    kind: Kind | None = None
    computes: bool = True


_O, _M, _A, _R, _S = (
    Mapping.ONE_TO_ONE, Mapping.ONE_TO_MANY, Mapping.MANY_TO_MANY, Mapping.REORGANIZE, Mapping.SHUFFLE,
)  # fmt: skip
_COLUMNS = (_O, _M, _A, _R, _S)
_ROWS: tuple[tuple[Mapping, str], ...] = (
    # first operator; per second operator (One-to-One, One-to-Many, Many-to-Many, Reorganize, Shuffle):
    # colour and result
    (_O, "gO gM gA gR gS"),
    (_M, "gM yM x  yM yM"),
    (_A, "gA yA x  yA yA"),
    (_R, "gR yM yA gR gR"),
    (_S, "gS yM yA gR gS"),
)
_LETTER = {"O": _O, "M": _M, "A": _A, "R": _R, "S": _S}
_COLOUR = {"g": Verdict.GREEN, "y": Verdict.YELLOW}


def _cell(text: str) -> Cell:
    return Cell(Verdict.RED, None) if text == "x" else Cell(_COLOUR[text[0]], _LETTER[text[1]])


TABLE: dict[tuple[Mapping, Mapping], Cell] = {
    (first, second): _cell(text)
    for first, row in _ROWS
    for second, text in zip(_COLUMNS, row.split(), strict=True)
}

IMPEDANCE: dict[Mapping, int] = {_O: 0, _R: 1, _S: 1, _M: 2, _A: 2}
"""Transformation impedance: how strongly a type decides that of a fused operator."""


def fused_type(first: Mapping, second: Mapping) -> Mapping:
    """The impedance rule, from which every cell of Table 3 that is not red follows.

    The stronger type wins; of the two strongest the first does; Shuffle and Reorganize make Reorganize.
    """
    if IMPEDANCE[first] != IMPEDANCE[second]:
        return max(first, second, key=IMPEDANCE.__getitem__)
    return first if IMPEDANCE[first] == 2 or first is second else _R


_CONTRACTIONS = """
    mm.default bmm.default addmm.default baddbmm.default mv.default dot.default linear.default einsum.default
    _scaled_dot_product_flash_attention_for_cpu.default scaled_dot_product_attention.default
    _scaled_dot_product_flash_attention_for_cpu_backward.default
"""
_WINDOWS = """
    convolution.default convolution_backward.default max_pool2d_with_indices.default
    max_pool2d_with_indices_backward.default avg_pool2d.default avg_pool2d_backward.default
    _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default upsample_bilinear2d.vec
    upsample_bilinear2d_backward.default upsample_bilinear2d.default im2col.default col2im.default
"""
_SCANS = "cumsum.default cumprod.default"
_ROWWISE = "_safe_softmax.default"
_SCATTERS = "embedding_dense_backward.default index_add.default scatter_add.default"

DECLARED: dict[str, Kind] = {
    f"aten.{name}": kind
    for names, kind in (
        (_CONTRACTIONS, Kind.CONTRACTION),
        (_WINDOWS, Kind.WINDOW),
        (_SCANS, Kind.SCAN),
        (_ROWWISE, Kind.ROW),
        (_SCATTERS, Kind.REDUCTION),
    )
    for name in names.split()
}

_GATHERS = frozenset({"aten.index.Tensor"})
"""One-to-Many, at indices that only the run knows."""

OPAQUE = Classified(Mapping.MANY_TO_MANY, Kind.OPAQUE)


def combine(first: Classified, second: Classified) -> tuple[Verdict, Classified]:
    """Table 3 with the row extension: two row reductions (softmax, norms) may share their rows."""
    rows = (first.kind, second.kind) == (Kind.ROW, Kind.ROW)
    spread = first.mapping is Mapping.ONE_TO_MANY and second.kind in (Kind.ROW, Kind.REDUCTION)
    if rows or spread:
        return Verdict.YELLOW, Classified(Mapping.MANY_TO_MANY, second.kind)
    if Kind.OPAQUE in (first.kind, second.kind):
        return Verdict.RED, OPAQUE
    cell = TABLE[first.mapping, second.mapping]
    if cell.result is None:
        return Verdict.RED, OPAQUE
    kind = first.kind or second.kind if cell.result is Mapping.MANY_TO_MANY else None
    return cell.verdict, Classified(cell.result, kind)


def classify(graph: Graph, node: Node) -> Classified:
    """The mapping type of one node; `OPAQUE` if neither the tables nor `DECLARED` know it."""
    if not isinstance(node.op, Aten) or not node.outputs:
        return OPAQUE
    declared = DECLARED.get(node.op.overload)
    if declared is not None:
        return Classified(Mapping.MANY_TO_MANY, declared)
    if node.op.overload in _GATHERS:
        return Classified(Mapping.ONE_TO_MANY, None, computes=False)
    if not knows(node.op):
        return OPAQUE
    try:
        return _from_maps(_alone(graph, node))
    except Unfusable:
        return OPAQUE


def _dense(meta: TensorMeta) -> TensorMeta:
    strides, step = [], 1
    for size in reversed(meta.shape):
        strides.append(step)
        step *= max(size, 1)
    return replace(meta, stride=tuple(reversed(strides)))


def _alone(graph: Graph, node: Node) -> Graph:
    """The node as a graph on contiguous operands, every value on a storage of its own."""
    values: dict[int, Value] = {}
    storages: dict[int, Storage] = {}
    for value in dict.fromkeys((*node.inputs, *node.outputs)):
        role = graph.storage_of(value).role
        kind = role if role is Role.HOST else Role.INPUT
        meta = graph.values[value].meta if role is Role.HOST else _dense(graph.values[value].meta)
        storages[value] = Storage(value, meta.span_bytes, kind)
        values[value] = Value(value, meta, value)
    return Graph((node,), values, storages, tuple(dict.fromkeys(node.inputs)), node.outputs)


def _from_maps(body: Graph) -> Classified:
    kernel = lower(body).kernel
    if kernel.reductions:
        folds = [r for r in kernel.reductions if isinstance(r, Reduction)]
        kind = Kind.ROW if all(r.trailing for r in folds) else Kind.REDUCTION
        if len(folds) < len(kernel.reductions):
            kind = Kind.CONTRACTION
        return Classified(Mapping.MANY_TO_MANY, kind)
    found = [each for store in kernel.stores for each in _store_types(body, store.tensor)]
    most = max((mapping for mapping, _ in found), default=Mapping.ONE_TO_ONE)
    return Classified(most, None, any(computes for _, computes in found))


def _store_types(body: Graph, tensor: Tensor) -> list[tuple[Mapping, bool]]:
    """(type, computes) of every load below a stored tensor, as a function of its axes."""
    shape = tensor.shape
    axes = tuple(Var(f"d{k}", size) for k, size in enumerate(shape))
    if not prod(shape):
        return []
    root = tensor.at(tuple(Index.of(axis) for axis in axes))
    computes = root.op not in ("load", "const")
    metas = {f"i{k}": body.values[value].meta for k, value in enumerate(body.inputs)}
    whole = flatten([Index.of(axis) for axis in axes], shape)
    result = []
    for node in walk(root):
        if node.leaf is not None and node.leaf.kind == "load":
            meta = metas[node.leaf.source]
            mapping = _map_type(node.leaf.index, axes, whole, meta, shape) if not node.args else _M
            result.append((mapping, computes))
    return result


def _map_type(
    index: Index, axes: Sequence[Var], whole: Index, meta: TensorMeta, shape: tuple[int, ...]
) -> Mapping:
    """The type of one access map: `index` is the position in a contiguous operand."""
    live = [axis for axis in axes if axis.size > 1]
    if index == whole:
        plain = _squeezed(meta.shape) == _squeezed(shape)
        return _O if plain else _R
    if any(axis not in index.variables for axis in live):
        return _M  # an output axis that the input does not have: broadcast
    if not index.linear:
        return _M if prod(shape) > meta.numel else _R
    steps = [index.coefficient(axis) for axis in live]
    if any(step < 0 for step in steps):
        return _S
    return _O if steps == sorted(steps, reverse=True) else _S


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)
