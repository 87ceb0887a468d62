"""Fission along rows of images: parts overlap at their inputs, borders differ.

rewrite:    a convex region S, one loop of rows per node (`Axis` or `WindowAxis`), a number of parts  ->  one
            Fission node.  A part owns a share of the rows of every result; what it reads beyond them is
            read, and computed, again by its neighbours.  Parts that look alike (inner ones) share a body.
legal when: `check_rows` finds nothing: S is convex, its loops fit together as `fission.check_region` asks,
            sums are taken over rows that a part owns, and no part is empty.
effect:     inner values and workspace shrink to one part with its halo; the halo is computed twice.  Outputs
            are exact up to the kernels' own rounding; sums are re-associated (class `reassociates`).

The gradient of a convolution is taken apart first: the part for its input is a transposed convolution (a
halo on the gradient), the part for its weight a sum over rows.

Not done.  Two spatial axes in one region; parts of unequal size chosen on purpose; regions with BatchNorm in
training, whose statistics need the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.analysis.axis import Axis
from lowtide.analysis.dims import axes
from lowtide.analysis.windows import windows
from lowtide.ir import Edit, Fission, Graph, Node, Part, Slice
from lowtide.transforms import fission
from lowtide.transforms.body import Border, border_of
from lowtide.transforms.fission import IllegalFission, border_faults, node_faults, replace_region
from lowtide.transforms.gradients import take_gradients_apart
from lowtide.transforms.halo_body import build_bodies
from lowtide.transforms.regions import Region
from lowtide.transforms.spans import PartSpans, part_spans

__all__ = ["HaloCandidate", "apply", "assignment_of", "check_rows", "loops", "prepare", "spans_of"]


@dataclass(frozen=True)
class HaloCandidate:
    """A region of the prepared graph, a loop per node, and how many parts (sizes in shares of the rows).

    axes: node id -> position in `loops`.  sizes: they sum to the number of shares.
    """

    axes: Region = field(repr=False)
    sizes: tuple[int, ...]
    label: str = "rows"
    masks: bool = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of the region."""
        return tuple(self.axes)


def prepare(graph: Graph) -> Graph:
    """The graph whose nodes candidates name: divisible, gradients of convolutions apart."""
    return take_gradients_apart(fission.prepare(graph, masks=False))


def loops(graph: Graph, node: Node) -> tuple[Axis, ...]:
    """The loops of `node`: those without overlap first, then those with a window."""
    known = graph.memo.setdefault(loops, {})
    assert isinstance(known, dict)
    found: tuple[Axis, ...] | None = known.get(node.id)
    if found is None:
        found = known[node.id] = (*axes(graph, node), *windows(graph, node))
    return found


def assignment_of(graph: Graph, region: Region) -> dict[int, Axis]:
    """The loop of each node of a region."""
    return {node: loops(graph, graph.node[node])[position] for node, position in region.items()}


# --- legality -------------------------------------------------------------------------------------


def check_rows(
    graph: Graph, nodes: Sequence[int], assignment: Mapping[int, Axis], sizes: Sequence[int]
) -> list[str]:
    """Why `nodes` cannot be split along the loops of `assignment` in parts of `sizes`; empty if they can."""
    if len(sizes) < 2 or min(sizes) < 1:
        return [f"parts {tuple(sizes)} do not make a whole"]
    reasons = node_faults(graph, nodes, assignment, _can_cut, "loop")
    if reasons:
        return reasons
    reasons = border_faults(graph, nodes, assignment)
    if not reasons:
        parts = _spans(graph, border_of(graph, nodes, assignment), assignment, sizes)
        reasons += [each for each in parts if isinstance(each, str)]
    return list(dict.fromkeys(reasons))


def _can_cut(graph: Graph, node: Node, loop: Axis) -> bool:
    return loop in loops(graph, node)


def _spans(
    graph: Graph, border: Border, assignment: Mapping[int, Axis], sizes: Sequence[int]
) -> list[PartSpans | str]:
    found, start = [], 0
    for size in sizes:
        found.append(part_spans(graph, assignment, border, (start, start + size), sum(sizes)))
        start += size
    return found


def spans_of(
    graph: Graph, border: Border, assignment: Mapping[int, Axis], sizes: Sequence[int]
) -> list[PartSpans]:
    """The rows of each part of a legal region."""
    return [each for each in _spans(graph, border, assignment, sizes) if isinstance(each, PartSpans)]


# --- rewriting ------------------------------------------------------------------------------------


def apply(graph: Graph, candidate: HaloCandidate) -> Edit:
    """Replace the region by one Fission node; values inside it no longer exist.

    Raises IllegalFission if the region cannot be split so.
    """
    normal = prepare(graph)
    assignment = assignment_of(normal, candidate.axes)
    if reasons := check_rows(normal, candidate.nodes, assignment, candidate.sizes):
        raise IllegalFission(reasons)
    border = border_of(normal, candidate.nodes, assignment)
    spans = spans_of(normal, border, assignment, candidate.sizes)
    bodies, numbers = build_bodies(normal, assignment, border, spans)
    parts = tuple(_part(border, number, each) for number, each in zip(numbers, spans, strict=True))
    op = Fission(bodies, parts, border.merges)
    result = replace_region(normal, candidate.nodes, border, op)
    return Edit(result, {value: None for value in graph.values if value not in result.values})


def _part(border: Border, body: int, spans: PartSpans) -> Part:
    inputs = tuple(
        Slice(None) if dim is None or span is None else Slice(dim, *span)
        for (_, dim), span in zip(border.inputs, spans.inputs, strict=True)
    )
    outputs = tuple(
        Slice(None) if dim is None or pair is None else Slice(dim, *pair[0])
        for (_, dim), pair in zip(border.outputs, spans.outputs, strict=True)
    )
    return Part(body, inputs, outputs)
