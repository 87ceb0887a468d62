"""Which operators to run as one kernel: DNNFusion's plan exploration (Listing 1), extended.

Problem.  Partition a graph into blocks so that intermediates are not stored, without redundant work.

Method.  Seed: the One-to-One operator with the smallest result that is in no block; grow along successors,
then predecessors, by Table 3 with the block's current type.  Red stops.  Green and yellow are accepted if
the block with the operator is predicted not to be slower than the two apart (`profit`): a guard that the
paper leaves to its empirical threshold.  Beyond the paper: operators connected through views are
neighbours, row reductions share rows, siblings and multi-output blocks join, and after the One-to-One
seeds run out, row reductions and the rest are seeds too.  Chains of two products around a row reduction
(attention) come first, each tried as a whole, since half of one never pays.

Legal: only generated operators (never views, writes, random nodes, regions), and no cycle once all blocks
are contracted, checked on bit sets of reachability that are updated as blocks close.
Not done here: measuring instead of predicting (`profile`), the best partition (`exact`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from lowtide.analysis.key import node_key
from lowtide.analysis.region import before
from lowtide.fusion.codegen.lower import knows
from lowtide.fusion.mapping import OPAQUE, Classified, Kind, Verdict, classify, combine
from lowtide.fusion.mapping import Mapping as MapType
from lowtide.fusion.profit import Pricing
from lowtide.ir.extract import base_of, extract
from lowtide.ir.graph import Graph, Node
from lowtide.ir.ops import Aten
from lowtide.ir.random import is_random

__all__ = ["Limits", "Planner", "plan_blocks"]


_SINGLES = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten.native_batch_norm_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten.convolution.default",
        "aten.mean.dim",
        "aten.max_pool2d_with_indices.default",
        "aten.avg_pool2d.default",
        "aten._adaptive_avg_pool2d.default",
    }
)


_SMALL_BYTES = 1 << 14
_HALVED = frozenset({"aten._scaled_dot_product_flash_attention_for_cpu.default"})


@dataclass(frozen=True)
class Limits:
    """The constraint check: operators and buffers of one block, and how far apart they may be.

    Without `reductions` only operators are taken that compute each element from elements.
    `reach` counts the operators from a block's first to its last in program order: what is done early lives
    long, and what was recomputed late is not to be done early again.
    Lone operators whose generated kernel beats ATen's are blocks too: `singles`, and matrix products of at
    least `product` multiplications.
    """

    operators: int = 64
    buffers: int = 20
    reach: int = 1 << 30
    reductions: bool = True
    product: float = 1e6
    singles: frozenset[str] = _SINGLES


def plan_blocks(
    graph: Graph,
    pricing: Pricing | None = None,
    limits: Limits | None = None,
    banned: Collection[int] = (),
) -> tuple[frozenset[int], ...]:
    """Groups of node ids to fuse, none of them `banned`, in the order in which they were found."""
    work = Planner(graph, pricing or Pricing(), limits or Limits(), frozenset(banned))
    for chain in work.chains():
        work.explore(chain)
    for seed in work.seeds():
        work.explore(frozenset({seed}))
    return tuple(work.blocks)


@dataclass
class Planner:
    """One exploration of one graph; subclasses choose other seeds and other growth."""

    graph: Graph
    pricing: Pricing
    limits: Limits
    banned: frozenset[int]
    blocks: list[frozenset[int]] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.types = {
            number: kind
            for number, kind in _classified(self.graph).items()
            if number not in self.banned and (self.limits.reductions or kind.kind is None)
        }
        computing = [node.id for node in self.graph.nodes if not self.graph.is_view(node)]
        self.place = {number: place for place, number in enumerate(computing)}
        self.index = {node.id: k for k, node in enumerate(self.graph.nodes)}
        self.ancestors, self.descendants = _reach(self.graph, self.index)
        self.views = sum(1 << self.index[n.id] for n in self.graph.nodes if self.graph.is_view(n))
        self.outputs_bytes = {n: _result_bytes(self.graph, self.graph.node[n]) for n in self.types}

    def seeds(self) -> Iterator[int]:
        """Windows, which take what follows them; One-to-One operators by size of their result; the rest."""
        order = sorted(
            self.types,
            key=lambda n: (
                self.types[n].kind is not Kind.WINDOW,
                self.types[n].mapping is not MapType.ONE_TO_ONE,
                self.outputs_bytes[n] if self.types[n].kind is not Kind.WINDOW else 0,
                self.index[n],
            ),
        )
        yield from (n for n in order if self.types[n].computes or self.types[n].kind)

    def chains(self) -> Iterator[frozenset[int]]:
        """Two products with a row reduction between them (attention written out), where one kernel wins."""
        for number in sorted(self.types, key=self.index.__getitem__):
            if self.types[number].kind is not Kind.ROW:
                continue
            before, after = self._path(number, False), self._path(number, True)
            if before and after:
                yield frozenset({number, *before, *after})

    def _path(self, number: int, forward: bool) -> list[int]:
        """From a row reduction to the nearest product through element-wise operators; empty if none."""
        size = self.outputs_bytes[number]
        path: list[int] = []
        for _ in range(6):
            near = self._successors(number) if forward else self._predecessors(number)
            product = next((n for n in near if self.types[n].kind is Kind.CONTRACTION), None)
            if product is not None:
                return [*path, product]
            same = [n for n in near if self.types[n].kind is None and self.outputs_bytes[n] == size]
            if len(same) != 1:
                return []
            number = same[0]
            path.append(number)
        return []

    def explore(self, seed: frozenset[int]) -> None:
        """Grow one block from `seed` and close it; a chain that does not pay is left to the other seeds."""
        if seed & self.taken or not self._near(seed) or not self._acyclic(seed):
            return
        alone = self._seconds(seed)
        apart = [self._seconds(frozenset({each})) for each in seed]
        if alone is None or any(one is None for one in apart):
            return
        if len(seed) > 1 and alone > sum(one for one in apart if one is not None):
            return
        kind = Classified(MapType.MANY_TO_MANY, Kind.CONTRACTION) if len(seed) > 1 else self.types[min(seed)]
        block = _Block(seed, kind, alone)
        tried: set[int] = set(seed)
        for forward in (True, False):
            stack = sorted(block.members, key=self.index.__getitem__)
            while stack:
                near = self._successors(stack.pop()) if forward else self._predecessors(stack.pop())
                for other in near:
                    if other in tried or other in self.taken or not self._near(block.members | {other}):
                        continue
                    if not self._acyclic(block.members | {other}):
                        continue  # a path through what is still outside: tried again from there
                    tried.add(other)
                    if self._absorb(block, other, forward):
                        stack.append(other)
        self._close(block)

    def _absorb(self, block: _Block, other: int, forward: bool) -> bool:
        first, second = (block.type, self.types[other]) if forward else (self.types[other], block.type)
        verdict, fused = combine(first, second)
        if verdict is Verdict.RED and self._small(block.members, other):
            verdict, fused = Verdict.YELLOW, Classified(MapType.MANY_TO_MANY, first.kind or second.kind)
        if verdict is Verdict.RED or len(block.members) >= self.limits.operators:
            return False
        members = block.members | {other}
        apart = self._seconds(frozenset({other}))
        together = self._seconds(members)
        if apart is None or together is None or together > block.seconds + apart:
            return False
        block.members, block.type, block.seconds = members, fused, together
        return True

    def _small(self, members: frozenset[int], other: int) -> bool:
        """Whether a red pair costs no more than its calls: a few results, kept in scratch."""
        mixed = [n for n in (*members, other) if self.types[n].kind is not None]
        windows = any(self.types[n].kind in (Kind.WINDOW, Kind.OPAQUE) for n in mixed)
        return not windows and all(self.outputs_bytes[n] <= _SMALL_BYTES for n in mixed)

    def _seconds(self, members: frozenset[int]) -> float | None:
        parts = extract(self.graph, members)
        if len(parts.inputs) + len(parts.outputs) > self.limits.buffers:
            return None
        return self.pricing.seconds(parts.body)

    def _close(self, block: _Block) -> None:
        lone = next(iter(block.members))
        worth = len(block.members) > 1 or self._worth_alone(lone)
        if not worth or not self.pricing.compiles(extract(self.graph, block.members).body):
            return
        self.blocks.append(block.members)
        self.taken |= block.members
        self._contract(block.members)

    def _worth_alone(self, number: int) -> bool:
        """Whether a generated kernel for one operator is known to beat ATen's."""
        node = self.graph.node[number]
        if not isinstance(node.op, Aten):
            return False
        if ("is_causal" in dict(node.op.kwargs) or True in node.op.args) and node.op.overload in _HALVED:
            return False  # ATen skips the masked half
        big = self.types[number].kind is Kind.CONTRACTION and self._depth(node) >= self.limits.product
        return big or node.op.overload in self.limits.singles

    def _depth(self, node: Node) -> float:
        """Multiplications of a product, from the sizes of its operands and result."""
        sizes = [self.graph.values[value].meta.numel for value in (*node.inputs[-2:], *node.outputs)]
        return math.sqrt(prod(sizes))

    def _bits(self, members: frozenset[int]) -> int:
        bits = 0
        for member in members:
            bits |= 1 << self.index[member]
        return bits

    def _near(self, members: frozenset[int]) -> bool:
        places = [self.place[member] for member in members]
        return max(places) - min(places) <= self.limits.reach

    def _acyclic(self, members: frozenset[int]) -> bool:
        """Whether no path leaves the members and comes back (views move inside: they do not count)."""
        above = below = 0
        for member in members:
            above |= self.ancestors[self.index[member]]
            below |= self.descendants[self.index[member]]
        return not above & below & ~(self._bits(members) | self.views)

    def _contract(self, members: frozenset[int]) -> None:
        """Reachability with the members as one node."""
        own = self._bits(members)
        above = below = own
        for member in members:
            above |= self.ancestors[self.index[member]]
            below |= self.descendants[self.index[member]]
        for place in range(len(self.graph.nodes)):
            if above >> place & 1:
                self.descendants[place] |= below
            if below >> place & 1:
                self.ancestors[place] |= above

    def _successors(self, number: int) -> list[int]:
        """Operators that read a result of node `number`, through views too."""
        found: dict[int, None] = {}
        for out in self.graph.node[number].outputs:
            for value in self.graph.views_of[self.graph.values[out].storage]:
                found.update(dict.fromkeys(self.graph.readers[value]))
        return sorted((n for n in found if n != number and n in self.types), key=self.index.__getitem__)

    def _predecessors(self, number: int) -> list[int]:
        found: dict[int, None] = {}
        for value in self.graph.node[number].inputs:
            producer = self.graph.producer.get(base_of(self.graph, value)[0])
            if producer is not None and producer in self.types:
                found[producer] = None
        return sorted(found, key=self.index.__getitem__, reverse=True)


@dataclass
class _Block:
    members: frozenset[int]
    type: Classified
    seconds: float


def _classified(graph: Graph) -> Mapping[int, Classified]:
    """Types of the nodes that may be in a block."""
    known: dict[str, Classified] = {}
    result = {}
    for node in graph.nodes:
        if not _eligible(graph, node):
            continue
        key = node_key(graph, node)
        if key not in known:
            known[key] = classify(graph, node)
        if known[key] != OPAQUE:
            result[node.id] = known[key]
    return result


def _eligible(graph: Graph, node: Node) -> bool:
    if not isinstance(node.op, Aten) or node.writes or not node.outputs or graph.is_view(node):
        return False
    return knows(node.op) and not is_random(node.op)


def _result_bytes(graph: Graph, node: Node) -> int:
    return sum(graph.values[out].meta.span_bytes for out in node.outputs)


def _reach(graph: Graph, index: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Bit sets of all nodes before and after each, by place in program order."""
    order = before(graph)
    ancestors = [0] * len(graph.nodes)
    for node in graph.nodes:
        place = index[node.id]
        for earlier in order[node.id]:
            ancestors[place] |= ancestors[index[earlier]] | 1 << index[earlier]
    descendants = [0] * len(graph.nodes)
    for node in reversed(graph.nodes):
        place = index[node.id]
        for earlier in order[node.id]:
            descendants[index[earlier]] |= descendants[place] | 1 << place
    return ancestors, descendants
