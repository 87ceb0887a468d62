"""DNNFusion's plan exploration as printed (Listing 1): the mode to compare with.

Problem.  The planner of this package extends the paper's in several ways at once; what each is worth shows
only beside the paper's own algorithm.

Method.  1. Seed: of the One-to-One operators that are in no block, the one with the smallest result.  2. For
each successor, the cell of Table 3 for (type of the block now, type of the successor): red stops there; so
does the constraint check; yellow is accepted if the profile says that the block with it is not slower than
the two apart; then it joins, the block takes the cell's type, and its successors are tried in turn.  3. The
same over predecessors, from the seed.  4. Until no seed is left; what no seed reached stays single.

What the paper leaves open: the constraint check is the number of operators and buffers, and whether code can
be generated; merges that would make a cycle are refused (without that, residual connections deadlock).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lowtide.fusion.mapping import TABLE, Verdict
from lowtide.fusion.mapping import Mapping as MapType
from lowtide.fusion.planner import Limits, Planner
from lowtide.fusion.profit import Pricing
from lowtide.ir.extract import extract
from lowtide.ir.graph import Graph

__all__ = ["list_blocks"]


def list_blocks(
    graph: Graph,
    pricing: Pricing | None = None,
    limits: Limits | None = None,
    banned: Collection[int] = (),
) -> tuple[frozenset[int], ...]:
    """Groups of node ids to fuse, by Listing 1, in the order in which they were found."""
    work = _Listing(graph, pricing or Pricing(), limits or Limits(), frozenset(banned))
    for seed in work.seeds():
        work.explore(frozenset({seed}))
    return tuple(work.blocks)


class _Listing(Planner):
    def seeds(self) -> Iterator[int]:
        """One-to-One operators, smallest result first."""
        one = [n for n, kind in self.types.items() if kind.mapping is MapType.ONE_TO_ONE]
        yield from sorted(one, key=lambda n: (self.outputs_bytes[n], self.index[n]))

    def explore(self, seed: frozenset[int]) -> None:
        """The block of one seed: successors in turn, then predecessors."""
        (start,) = seed
        if start in self.taken:
            return
        members, kind = {start}, self.types[start].mapping
        for forward in (True, False):
            kind = self._extend(members, kind, start, forward)
        if len(members) > 1 and self.pricing.compiles(extract(self.graph, members).body):
            self.blocks.append(frozenset(members))
            self.taken |= members
            self._contract(frozenset(members))

    def _extend(self, members: set[int], kind: MapType, number: int, forward: bool) -> MapType:
        """Steps 2 and 3: gives the type of the block afterwards."""
        near = self._successors(number) if forward else self._predecessors(number)
        for other in near:
            if other in members or other in self.taken:
                continue
            pair = (kind, self.types[other].mapping) if forward else (self.types[other].mapping, kind)
            cell = TABLE[pair]
            if cell.result is None or not self._passes(members, other, cell.verdict is Verdict.YELLOW):
                continue
            members.add(other)
            kind = self._extend(members, cell.result, other, forward)
        return kind

    def _passes(self, members: set[int], other: int, profile: bool) -> bool:
        """The constraint check, and the profile where the table leaves it open."""
        block = frozenset(members)
        joined = block | {other}
        if len(joined) > self.limits.operators or not self._acyclic(joined):
            return False
        together = self._seconds(joined)
        if together is None or not profile:
            return together is not None
        before, alone = self._seconds(block), self._seconds(frozenset({other}))
        return before is not None and alone is not None and together <= before + alone
