"""Which results of a kernel may take the memory of an operand.

Problem.  A kernel that keeps an operand and its result apart needs both at once; for the gradient of a loss
over a vocabulary these are the two largest tensors of a step.

Method.  A store may overwrite an operand if the kernel reads the operand nowhere later than there.  Stages
are separated by barriers; inside a stage of rows, passes follow one another row by row, and a pass evaluates
all its loads of an element before it stores one (`Loops.hoist`).  So per load of the operand:

    in an earlier stage                              anything
    in the storing stage, in an earlier pass         the element itself, or any of its own row
    in the storing pass                              the element itself; of its own row, if that is read first
    the same, if a value per row is stored           nothing along the row: its columns are walked afterwards
    a row's first element, whose passes share it     nowhere later than the storing pass
    later                                            refused

Not done: kernels with matrix products or windows, whose tiles come back to what they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import ZERO, Index
from lowtide.fusion.codegen.lower import Lowered
from lowtide.fusion.codegen.nest import plan_stages
from lowtide.fusion.codegen.stage import Placed, Stage
from lowtide.fusion.codegen.tensor import Reduction

__all__ = ["overlaps"]


def overlaps(lowered: Lowered) -> tuple[tuple[int, int], ...]:
    """(output, input) pairs, by position in the body, that may share memory if they are laid out alike."""
    if any(type(reduction) is not Reduction for reduction in lowered.kernel.reductions):
        return ()
    stages = plan_stages(lowered.kernel)
    if any(stage.product is not None for stage in stages):
        return ()
    pairs = []
    for number, stage in enumerate(stages):
        for out, placed in _only_stores(stages, stage):
            for source in sorted(stage.buffers):
                same = source[0] == "i" and lowered.dtypes[source] == lowered.dtypes[out]
                later = any(source in after.buffers for after in stages[number + 1 :])
                if same and not later and _read_before(stage, placed, source):
                    pairs.append((int(out[1:]), int(source[1:])))
    return tuple(pairs)


def _only_stores(stages: Sequence[Stage], stage: Stage) -> Iterator[tuple[str, Placed]]:
    """The outputs that one place of the whole kernel stores, if that is in `stage`."""
    everywhere = [p.item.store.buffer for s in stages for p in s.placed if p.item.store is not None]
    for placed in stage.placed:
        store = placed.item.store
        if store is not None and store.buffer[0] == "o" and everywhere.count(store.buffer) == 1:
            yield store.buffer, placed


def _read_before(stage: Stage, store: Placed, source: str) -> bool:
    """Whether no load of `source` in the stage can see what `store` writes, and one is at its very place."""
    passes = _passes(stage)
    here = passes[store.item.name]
    met = False
    for placed in stage.placed:
        at = passes[placed.item.name]
        for node in _loads(placed.value, source):
            assert node.leaf is not None
            own = not node.args and node.leaf.index == store.place
            first = at < here or (at == here and placed.row_only and not store.row_only)
            inside = _is_first_of_row(stage, node, store.place) or (
                first and _in_row(stage, node, store.place)
            )
            after = at > here or (at == here and store.row_only and not placed.row_only)
            if after or not (own or inside):
                return False
            met = met or own
    return met


def _passes(stage: Stage) -> dict[str, int]:
    """Item -> pass, as `Rows` counts them: what reads a reduction of its row runs after it."""
    level: dict[str, int] = {}
    for placed in stage.placed:
        own = placed.value.sources & stage.names
        level[placed.item.name] = max((level[name] + 1 for name in own), default=0)
    return level


def _loads(value: Expr, source: str) -> Iterator[Expr]:
    for node in walk(value):
        if node.leaf is not None and node.leaf.kind == "load" and node.leaf.source == source:
            yield node


def _start_of_row(stage: Stage, place: Index) -> Index | None:
    """The first column of the row of `place`, whose columns follow one another in memory."""
    if stage.flat or len(stage.col_parts) != 1:
        return None
    column = stage.col_parts[0]
    return place.substitute(lambda var: ZERO if var == column else Index.of(var))


def _is_first_of_row(stage: Stage, node: Expr, place: Index) -> bool:
    """Whether a load is a row's first element (a pivot), named once per row, before the first pass."""
    leaf = node.leaf
    assert leaf is not None
    return not node.args and not stage.lanes and leaf.index == _start_of_row(stage, place)


def _in_row(stage: Stage, node: Expr, place: Index) -> bool:
    """Whether a looked-up element lies in the row of `place`."""
    leaf, start = node.leaf, _start_of_row(stage, place)
    assert leaf is not None
    if start is None or not node.args or leaf.bound != stage.cols:
        return False
    return leaf.index == start and leaf.stride == place.coefficient(stage.col_parts[0])
