"""The best partition into kernels, for pieces of a graph that are small enough (Korch's binary program).

Problem.  Growth from seeds is greedy: an early merge can keep a better one from being made.

Method.  Operators that can be fused and are connected, by a value that one makes and the other reads or
that both read, form pieces.  For a piece of at most `largest` operators every connected set that leaves no
cycle is a candidate kernel with its predicted time; the cheapest partition into candidates that run one
after the other is found by dynamic programming over down-sets (what has run so far), which is the binary
program with its order constraints, solved exactly.  Larger pieces keep the blocks of `plan_blocks`.

Invariants.  On small pieces the predicted time is at most that of any other plan with the same prices.
Not done here: a bound for larger pieces.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowtide.fusion.planner import Limits, Planner, plan_blocks
from lowtide.fusion.profit import Pricing
from lowtide.ir.extract import extract
from lowtide.ir.graph import Graph

__all__ = ["exact_blocks", "predicted_seconds"]

LARGEST = 12
"""Operators of a piece that is solved exactly."""

MOST_CANDIDATES = 1500


def exact_blocks(
    graph: Graph,
    pricing: Pricing | None = None,
    limits: Limits | None = None,
    banned: Collection[int] = (),
    largest: int = LARGEST,
) -> tuple[frozenset[int], ...]:
    """Groups of node ids to fuse: the best where pieces are small, the planner's elsewhere."""
    pricing, limits = pricing or Pricing(), limits or Limits()
    work = _Exact(graph, pricing, limits, frozenset(banned))
    small = [piece for piece in work.pieces() if len(piece) <= largest]
    solved = frozenset(number for piece in small for number in piece)
    for block in plan_blocks(graph, pricing, limits, solved | frozenset(banned)):
        work.close(block)
    for piece in small:
        for block in work.solve(piece):
            if len(block) > 1 or work.worth_alone(min(block)):
                work.close(block)
    return tuple(work.blocks)


def predicted_seconds(
    graph: Graph, blocks: Collection[frozenset[int]], pricing: Pricing, limits: Limits | None = None
) -> float:
    """Predicted time of all operators that can be fused: blocks as kernels, the rest one by one."""
    work = _Exact(graph, pricing, limits or Limits(), frozenset())
    taken = frozenset(number for block in blocks for number in block)
    alone = [frozenset({number}) for number in work.types if number not in taken]
    return sum(work.price(block) or 0.0 for block in (*blocks, *alone))


@dataclass(frozen=True)
class _Candidate:
    members: frozenset[int]
    needs: frozenset[int]
    seconds: float


class _Exact(Planner):
    def price(self, members: frozenset[int]) -> float | None:
        """Predicted seconds of a set as one kernel; None if it has none."""
        return self._seconds(members)

    def worth_alone(self, number: int) -> bool:
        """Whether a kernel of one operator is worth having."""
        return self._worth_alone(number)

    def close(self, block: frozenset[int]) -> None:
        """Make a block one node from now on."""
        self.blocks.append(block)
        self.taken |= block
        self._contract(block)

    def neighbours(self, number: int) -> list[int]:
        """Operators that read what this one makes, make what it reads, or read what it reads."""
        siblings = {n for value in self.graph.node[number].inputs for n in self.graph.readers[value]}
        near = {*self._successors(number), *self._predecessors(number), *siblings}
        return sorted(n for n in near if n in self.types and n != number)

    def pieces(self) -> list[tuple[int, ...]]:
        """Operators that can be fused, by connection, each in program order."""
        left = dict.fromkeys(sorted(self.types, key=self.index.__getitem__))
        found = []
        while left:
            stack = [next(iter(left))]
            piece: set[int] = set()
            while stack:
                number = stack.pop()
                if number not in piece:
                    piece.add(number)
                    stack.extend(self.neighbours(number))
            for number in piece:
                left.pop(number, None)
            found.append(tuple(sorted(piece, key=self.index.__getitem__)))
        return found

    def solve(self, piece: tuple[int, ...]) -> list[frozenset[int]]:
        """The cheapest way to run a piece, kernel by kernel; its blocks in order."""
        candidates = self._candidates(piece)
        best: dict[frozenset[int], tuple[float, tuple[frozenset[int], ...]]] = {frozenset(): (0.0, ())}
        levels: list[set[frozenset[int]]] = [set() for _ in range(len(piece) + 1)]
        levels[0].add(frozenset())
        for level in levels:
            for done in sorted(level, key=sorted):
                seconds, blocks = best[done]
                for each in candidates:
                    if each.members & done or not each.needs <= done:
                        continue
                    after, cost = done | each.members, seconds + each.seconds
                    if after not in best or cost < best[after][0]:
                        best[after] = cost, (*blocks, each.members)
                        levels[len(after)].add(after)
        return list(best.get(frozenset(piece), (0.0, ()))[1])

    def _candidates(self, piece: tuple[int, ...]) -> list[_Candidate]:
        found: dict[frozenset[int], None] = {}
        stack = [frozenset({number}) for number in piece]
        while stack and len(found) < MOST_CANDIDATES:
            members = stack.pop()
            if members in found:
                continue
            found[members] = None
            near = {n for m in members for n in self.neighbours(m)}
            stack.extend(members | {n} for n in sorted(near - members))
        priced = []
        for members in found:
            seconds = self._seconds(members) if self._legal(members) else None
            if seconds is not None:
                priced.append(_Candidate(members, self._needs(members, piece), seconds))
        return priced

    def _legal(self, members: frozenset[int]) -> bool:
        if len(members) > self.limits.operators or not self._acyclic(members) or not self._near(members):
            return False
        return len(members) == 1 or self.pricing.compiles(extract(self.graph, members).body)

    def _needs(self, members: frozenset[int], piece: tuple[int, ...]) -> frozenset[int]:
        """Operators of the piece that have to run before any of `members`."""
        above = 0
        for member in members:
            above |= self.ancestors[self.index[member]]
        return frozenset(n for n in piece if n not in members and above >> self.index[n] & 1)
