"""What a fused block costs, predicted: bytes through memory, arithmetic, and starting it.

Problem.  The planner asks thousands of times whether a block with one more operator is faster than the two
apart; compiling and timing each is out of the question.

Method.  The block is lowered and its loops planned exactly as for code generation, so recomputation, extra
passes and strided access show.  Time = bytes / bandwidth + weighted operations + a fixed start.  Results
are kept by content key: repeated layers are priced once.  `Rates` are those of a 2020s server core.

Not done here: measuring (a profile can replace `Rates`), caches beyond "fits or does not".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from lowtide.analysis.key import graph_key
from lowtide.fusion.codegen.c import emit_kernel, far_references
from lowtide.fusion.codegen.chain import Link, find_links, with_operand
from lowtide.fusion.codegen.expr import SCALAR_COST, Expr, walk
from lowtide.fusion.codegen.gemm import block_of, operands
from lowtide.fusion.codegen.index import Index, Var
from lowtide.fusion.codegen.lower import Lowered, lower
from lowtide.fusion.codegen.nest import plan_stages
from lowtide.fusion.codegen.sliding import uses_winograd
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Contraction, Kernel, Unfusable, Window
from lowtide.ir.graph import Graph

__all__ = ["Pricing", "Rates"]

SPILLED = 4096  # results of a product that may wait in scratch for another stage


@dataclass(frozen=True)
class Rates:
    """Per thread: seconds to start a kernel, bytes a second from memory and from cache, seconds per unit of
    arithmetic (one vector addition's share of an element), per strided access, per start of an inner loop."""

    start_s: float = 3e-6
    memory_bytes_per_s: float = 16e9
    cache_bytes_per_s: float = 60e9
    cache_bytes: int = 1 << 20
    unit_s: float = 2.2e-11
    flops_per_s: float = 1e11
    pack_s: float = 2e-10
    strided_s: float = 6e-10
    loop_s: float = 4e-9


@dataclass
class Pricing:
    """Predicted seconds of bodies, remembered by content; `keep` as in `lower`."""

    rates: Rates = field(default_factory=Rates)
    keep: bool = False
    known: dict[str, float | None] = field(default_factory=dict)

    def seconds(self, body: Graph) -> float | None:
        """Predicted time of `body` as one kernel; None if it has none."""
        key = graph_key(body)
        if key not in self.known:
            try:
                self.known[key] = self._price(lower(body, keep=self.keep))
            except Unfusable:
                self.known[key] = None
        return self.known[key]

    def _price(self, lowered: Lowered) -> float:
        stages = plan_stages(lowered.kernel)
        parts = find_links(stages)
        products = {
            r.name for r in lowered.kernel.reductions if isinstance(r, Contraction) and prod(r.kept) > SPILLED
        }
        if any(node.leaf is not None and node.leaf.source in products for node in far_references(parts)):
            raise Unfusable("a product that would have to be kept whole in scratch")
        return self.rates.start_s + sum(self._part(part, lowered) for part in parts)

    def _part(self, part: Stage | Link, lowered: Lowered) -> float:
        if isinstance(part, Link):
            before = self._stage(part.first, lowered) + self._stage(with_operand(part), lowered)
            return before + self._stage(part.second, lowered, given=True)
        return self._stage(part, lowered)

    def _stage(self, stage: Stage, lowered: Lowered, given: bool = False) -> float:
        """One stage; `given`: its product's left operand lies in cache already."""
        rates = self.rates
        moved = sum(
            self._move(_touched(place) * lowered.dtypes[name].itemsize) for name, place in _accesses(stage)
        )
        nodes = list(walk(*(placed.value for placed in stage.placed)))
        work: float = sum(SCALAR_COST.get(node.op, 0) * _evaluations(node) for node in nodes)
        inner = _inner(stage)
        points = max(stage.rows, 1) * stage.cols
        strided = sum(
            _touched(place) for _, place in _accesses(stage) if place.coefficient(inner) not in (0, 1)
        )
        starts = points / max(inner.size, 1)
        if stage.product is not None:
            work += self._product(stage.product, given, lowered.kernel) / rates.unit_s
        return moved + work * rates.unit_s + strided * rates.strided_s + starts * rates.loop_s

    def _move(self, nbytes: int) -> float:
        """Seconds to stream one buffer; the speed depends on whether it alone fits the cache."""
        fits = nbytes <= self.rates.cache_bytes
        return nbytes / (self.rates.cache_bytes_per_s if fits else self.rates.memory_bytes_per_s)

    def _product(self, product: Contraction, given: bool, kernel: Kernel) -> float:
        """Seconds of a matrix product: arithmetic, packing, and computing operands once per block."""
        batch, m, n, k = product.sizes
        if isinstance(product, Window):
            return self._window(product)
        rows, cols = block_of(product)
        left, right = operands(product)
        lefts, rights = m * max(n / cols, 1), n * max(m / rows, 1)  # elements prepared, blocks repeated
        rights = 0.0 if kernel.constant_only(right) else rights  # packed once
        packed = (rights + (0 if given or left.op == "load" else lefts)) * self.rates.pack_s
        computed = (rights * right.cost + (0 if given else lefts * left.cost)) * self.rates.unit_s
        read = self._move(batch * k * n * 4) + (0 if given else self._move(batch * k * m * 4))
        return 2.0 * batch * m * n * k / self.rates.flops_per_s + batch * k * (packed + computed) + read

    def _window(self, window: Window) -> float:
        """Seconds of a convolution or pool: arithmetic, and reading and padding what it slides over."""
        dense = window.way == "dense"
        speed = self.rates.flops_per_s * (1.7 if uses_winograd(window) else 1.0 if dense else 0.3)
        read, elements = 0.0, window.source.numel
        for first, stop, element in window.parts:
            share = elements * (stop - first) // window.source.shape[1]
            loads = [n.leaf for n in walk(element) if n.leaf is not None and n.leaf.kind == "load"]
            read += sum(self._move(min(_touched(leaf.index), share) * 4) for leaf in loads)
            read += share * (element.cost + 4) * self.rates.unit_s
        return 2.0 * prod(window.sizes) / speed + read

    def compiles(self, body: Graph) -> bool:
        """Whether code can be generated for `body`, templates included."""
        try:
            emit_kernel("KERNEL", lower(body, keep=self.keep))
        except Unfusable:
            return False
        return True


def _inner(stage: Stage) -> Var:
    if stage.flat:
        return stage.col_parts[-1]
    return stage.row_parts[-1] if stage.lanes else stage.col_parts[-1]


def _accesses(stage: Stage) -> Iterator[tuple[str, Index]]:
    """(buffer, index) once each, loads and stores."""
    seen: set[tuple[str, Index]] = set()
    for placed in stage.placed:
        if placed.item.store is not None:
            seen.add((placed.item.store.buffer, placed.place))
        for node in walk(placed.value):
            if node.leaf is not None and node.leaf.kind == "load":
                seen.add((node.leaf.source, node.leaf.index))
    yield from seen


def _touched(index: Index) -> int:
    return prod(var.size for var in index.variables)


def _evaluations(node: Expr) -> int:
    return prod(var.size for var in node.variables)
