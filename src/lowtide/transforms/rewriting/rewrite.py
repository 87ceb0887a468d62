"""The door of rewriting: `rewrite(graph, options) -> Rewritten`.

rewrite:    equal operators on equal inputs become one; copies whose readers could read the original go;
            every rule of `RULES` that `options` allows, largest saving first (`greedy.py`); in an inference
            whose derived weights may be prepared once (`derive`), BatchNorm and scales go into weights
            and products that share an operand become one.
legal when: the numerics class is allowed; nothing moves across a write; shapes and strides of what is
            read elsewhere stay.
effect:     fewer operations, fewer bytes; the same numbers, up to rounding where the class says so.

Not done here: whether fewer operations are faster on some machine; rewriting inside regions and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten
from lowtide.transforms.rewriting.duplicates import without_duplicates
from lowtide.transforms.rewriting.emission import Layouts, emit
from lowtide.transforms.rewriting.fold import Takes, every_convolution, fold_weights
from lowtide.transforms.rewriting.greedy import Search, partitions, rewrite_partition
from lowtide.transforms.rewriting.layouts import absorb_copies
from lowtide.transforms.rewriting.merge import merge_siblings
from lowtide.transforms.rewriting.record import Applied, Rewritten, then
from lowtide.transforms.rewriting.rule import Numerics, Rule
from lowtide.transforms.rewriting.rules_associative import ASSOCIATIVE
from lowtide.transforms.rewriting.rules_commutative import COMMUTATIVE
from lowtide.transforms.rewriting.rules_distributive import DISTRIBUTIVE
from lowtide.transforms.rewriting.sheet import Sheet, read_sheet
from lowtide.transforms.rewriting.term import Apply

__all__ = ["RULES", "RewriteOptions", "Rewritten", "rewrite"]

RULES: tuple[Rule, ...] = (*ASSOCIATIVE, *DISTRIBUTIVE, *COMMUTATIVE)

_SAFE = frozenset({Numerics.EXACT, Numerics.REASSOCIATES})


@dataclass(frozen=True)
class RewriteOptions:
    """What may be rewritten.

    `allow`: numerics classes; of those that round differently only `conditioned` rules unless `cancelling`.
    `derive`: weights may be made from weights (inference; the caller prepares `derived_nodes` once); `takes`
    says which convolutions take a BatchNorm.
    """

    allow: frozenset[Numerics] = _SAFE
    cancelling: bool = False
    derive: bool = False
    search: Search = field(default_factory=Search)
    rules: tuple[Rule, ...] = RULES
    takes: Takes = every_convolution

    def allowed(self) -> Mapping[str, Sequence[Rule]]:
        """The rules that may be applied, by the operator at the root of their left side."""
        found: dict[str, list[Rule]] = {}
        for rule in self.rules:
            if rule.numerics in self.allow and (rule.conditioned or self.cancelling):
                assert isinstance(rule.pattern, Apply)
                found.setdefault(rule.pattern.op, []).append(rule)
        return found


def rewrite(graph: Graph, options: RewriteOptions | None = None) -> Rewritten:
    """`graph` with everything applied that `options` allows; `graph` itself if nothing is."""
    options = options or RewriteOptions()
    done = without_duplicates(graph)
    done = then(done, algebra(done.graph, options))
    if Numerics.REASSOCIATES in options.allow:
        done = then(done, absorb_copies(done.graph))
    if options.derive and Numerics.REASSOCIATES in options.allow:
        done = then(done, fold_weights(done.graph, options.takes))
        done = then(done, merge_siblings(done.graph))
    return done


def algebra(graph: Graph, options: RewriteOptions) -> Rewritten:
    """The rules alone."""
    sheet = read_sheet(graph)
    layouts = Layouts(graph, sheet)
    changed: dict[int, int] = {}
    members: set[int] = set()
    applied: list[Applied] = []
    rules = options.allowed()
    for roots in partitions(sheet, _results(graph, sheet)):
        before = [layouts.of(root) for root in roots]

        def keeps(place: int, cell: int, before: Sequence[object] = before) -> bool:
            return layouts.of(cell) == before[place]

        after, done = rewrite_partition(sheet, roots, rules, keeps, options.search)
        if done:
            applied += done
            members |= _nodes_of(graph, sheet, sheet.live(roots))
            new = dict(zip(roots, after, strict=True))
            changed.update({value: new[c] for value, c in sheet.of.items() if c in new})
    if not applied:
        return Rewritten(graph)
    edit = emit(graph, sheet, _read_elsewhere(graph, changed, members), frozenset(members))
    return Rewritten(edit.graph, edit.forward, tuple(applied))


def _results(graph: Graph, sheet: Sheet) -> list[int]:
    """Cells of algebraic values that something but an algebraic operator reads."""
    algebraic = {value for value, cell in sheet.of.items() if sheet.cells[cell].args}
    inner = {
        node.id
        for node in graph.nodes
        if isinstance(node.op, Aten) and len(node.outputs) == 1 and node.outputs[0] in algebraic
    }
    return [
        sheet.of[value]
        for node in graph.nodes
        for value in node.outputs
        if value in algebraic
        and (value in graph.outputs or any(r not in inner for r in graph.readers[value]))
    ]


def _nodes_of(graph: Graph, sheet: Sheet, live: Sequence[int]) -> set[int]:
    cells = {cell for cell in live if sheet.cells[cell].args}
    return {graph.producer[value] for value, cell in sheet.of.items() if cell in cells}


def _read_elsewhere(graph: Graph, changed: Mapping[int, int], members: set[int]) -> dict[int, int]:
    """Those of `changed` that a node outside or the caller reads."""
    return {
        value: cell
        for value, cell in changed.items()
        if value in graph.outputs or any(reader not in members for reader in graph.readers[value])
    }
