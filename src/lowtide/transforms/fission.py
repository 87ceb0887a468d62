"""Fission: a region runs part by part, so that only one part of its inner values lives at a time.

                    before                              after
        x[8,..] -> f -> g -> h -> loss      x[0:4] -> f g h -> +loss     one node, one body,
        x, w    -> backward   -> dw         x[4:8] -> f g h -> +loss     parts that run in turn

rewrite:    a convex region S, one axis of one graph-level dimension per node, part sizes  ->  one
            Fission node whose bodies compute one part.  Inputs are sliced along the dimension or
            shared; outputs are written into their slice, or summed where the loop is a reduction.
            Views that are needed outside are made again there, on the whole.
legal when: `check_region` finds nothing: S is convex, every node can be cut along its axis, every
            value made and read inside is cut the same way by both, sums are read outside only (or added to
            each other), nothing inside writes or draws.
effect:     inner values and workspace shrink to one part; outputs of S live from its start; each part
            pays the operators' fixed cost again.  Sums are re-associated (class `reassociates`), the rest
            is exact.  (MAGIS, section 4; parts of unequal size, and regions across forward, loss and
            backward with gradients accumulated, go beyond it.)

Means are made divisible first (`normalise`), and masks that a region reads are kept as bits (`pack_masks`):
candidates name the nodes of the graph *after* these rewrites.

Halos: `lowtide.transforms.halo`.  Not done.  Dropping nodes from S that are not worth it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.analysis.axis import Axis
from lowtide.analysis.dims import SUM_OF_SUMS, Dimension, axes, axis_at, dimensions, is_plain_addition
from lowtide.analysis.region import before, leaks
from lowtide.errors import LowtideError
from lowtide.ir import Edit, Fission, Graph, Merge, Node, Part, Slice
from lowtide.ir.graph import Role
from lowtide.ir.ops import Aten
from lowtide.ir.random import is_random
from lowtide.transforms.body import Border, border_of, build_body
from lowtide.transforms.masks import pack_masks
from lowtide.transforms.normalise import normalise
from lowtide.transforms.regions import Region, nested_regions, regions

__all__ = [
    "FissionCandidate",
    "IllegalFission",
    "apply",
    "apply_inside",
    "border_faults",
    "candidates",
    "check_region",
    "edge_faults",
    "even_sizes",
    "name_node",
    "nested_candidates",
    "node_faults",
    "prepare",
    "regions",
    "replace_region",
]


class IllegalFission(LowtideError):
    """A region that cannot be split; `reasons` says why, one sentence each."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons), remedy="choose another region or other axes")
        self.reasons = tuple(reasons)


@dataclass(frozen=True)
class FissionCandidate:
    """A region of the normalised graph, an axis per node, and the sizes of the parts.

    axes: node id -> position of its axis (`axis_at`).  sizes: in units of the dimension; they sum to
    the number of units that all nodes of the region allow.  label: "batch" or the number of units.
    masks: the nodes are those of the graph with its masks packed (`pack_masks`).
    """

    axes: Region = field(repr=False)
    sizes: tuple[int, ...]
    label: str = ""
    masks: bool = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of the region."""
        return tuple(self.axes)


def even_sizes(extent: int, parts: int) -> tuple[int, ...]:
    """`extent` units in `parts` parts whose sizes differ by at most one, the larger first."""
    small, larger = divmod(extent, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


# --- legality -------------------------------------------------------------------------------------


def check_region(graph: Graph, nodes: Sequence[int], assignment: Mapping[int, Axis]) -> list[str]:
    """Why `nodes` cannot be split along the axes of `assignment`; empty if they can."""
    reasons = node_faults(graph, nodes, assignment, _can_cut, "axis")
    if reasons:
        return reasons
    reasons = border_faults(graph, nodes, assignment)
    if extent_of(assignment, nodes) < 2:
        reasons.append("the axes have no common divisor to cut at")
    return reasons


def extent_of(assignment: Mapping[int, Axis], nodes: Sequence[int]) -> int:
    """The most parts of equal size that every node of the region allows."""
    return math.gcd(*(assignment[node].extent for node in nodes))


def name_node(graph: Graph, node: int) -> str:
    """A node as error messages name it."""
    op = graph.node[node].op
    what = op.overload if isinstance(op, Aten) else type(op).__name__
    where = graph.node[node].origin.module
    return f"node {node} ({what}{' in ' + where if where else ''})"


CanCut = Callable[[Graph, Node, Axis], bool]


def node_faults(
    graph: Graph, nodes: Sequence[int], assignment: Mapping[int, Axis], can_cut: CanCut, what: str
) -> list[str]:
    """Why single nodes cannot be cut; `what` is the word for what `assignment` gives each."""
    reasons = []
    for node in (graph.node[each] for each in nodes):
        name = name_node(graph, node.id)
        if node.writes:
            reasons.append(f"{name} writes in place")
        elif is_random(node.op):
            reasons.append(f"{name} draws random numbers, which happens once and whole")
        elif node.id not in assignment:
            reasons.append(f"{name} has no {what}")
        elif not can_cut(graph, node, assignment[node.id]):
            reasons.append(f"{name} cannot be cut along the {what} given")
    return reasons


def border_faults(graph: Graph, nodes: Sequence[int], assignment: Mapping[int, Axis]) -> list[str]:
    """Why the nodes of a region do not fit together, or not with what is around them."""
    inside, reasons = frozenset(nodes), list[str]()
    for node in nodes:
        reasons += edge_faults(graph, graph.node[node], inside, assignment)
    for outer, inner in leaks(graph, inside):
        reasons.append(
            f"not convex: {name_node(graph, inner)} waits for {name_node(graph, outer)}, which is outside"
        )
    return reasons


def _can_cut(graph: Graph, node: Node, axis: Axis) -> bool:
    return axis in axes(graph, node) or _adds_sums(graph, node, axis)


def _adds_sums(graph: Graph, node: Node, axis: Axis) -> bool:
    return is_plain_addition(graph, node) and axis == axis_at(graph, node, SUM_OF_SUMS)


def edge_faults(
    graph: Graph, node: Node, inside: frozenset[int], assignment: Mapping[int, Axis]
) -> Iterator[str]:
    """What is wrong with the values that `node` reads or hands out."""
    name = name_node(graph, node.id)
    for value, dim in zip(node.inputs, assignment[node.id].inputs, strict=True):
        producer = graph.producer.get(value)
        if producer not in inside:
            if _adds_sums(graph, node, assignment[node.id]):
                yield f"{name} adds parts of a sum to %{value}, which is whole"
            continue
        made = assignment[producer].outputs[graph.node[producer].outputs.index(value)]
        maker = name_node(graph, producer)
        if _adds_sums(graph, node, assignment[node.id]):
            if made is not None:
                yield f"{name} adds parts of a sum to %{value}, which is cut"
        elif made is None:
            yield f"%{value} is a sum over the parts of {maker}, but {name} reads it inside"
        elif made != dim:
            yield f"%{value} is cut along dimension {made} by {maker}, along {dim} by {name}"
    for value, merge in zip(node.outputs, assignment[node.id].merges, strict=True):
        outside = value in graph.outputs or not inside.issuperset(graph.readers[value])
        if merge is None and outside:
            yield f"%{value} of {name} is needed outside, but parts of it make no whole"
        if merge is Merge.MOMENTS and not all(_is_needed(graph, each, inside) for each in node.outputs):
            yield f"%{value} of {name}: its mean and variance are needed together outside"


def _is_needed(graph: Graph, value: int, inside: frozenset[int]) -> bool:
    return value in graph.outputs or not inside.issuperset(graph.readers[value])


# --- finding regions -----------------------------------------------------------------------------


def prepare(graph: Graph, masks: bool = True) -> Graph:
    """The graph whose nodes candidates name: divisible, its masks in bits."""
    divisible = normalise(graph).graph
    return pack_masks(divisible).graph if masks else divisible


def candidates(graph: Graph, counts: Sequence[int] = (2, 4, 8)) -> Iterator[FissionCandidate]:
    """All maximal regions of every dimension, those of the batch first, split in each of `counts`."""
    normal = prepare(graph)
    masks = normal is not prepare(graph, masks=False)
    for dimension, label in _named(normal):
        for region in regions(normal, dimension):
            yield from _split(normal, region, counts, label, masks)


def nested_candidates(graph: Graph, counts: Sequence[int] = (2, 4, 8)) -> Iterator[FissionCandidate]:
    """Regions inside the largest region of the batch, those with the most inner bytes first.

    They start at one value and come back to it: late layers with the loss and their backward, the head with
    its loss (by token, where it needs no view of batch and sequence).
    """
    normal = prepare(graph)
    masks = normal is not prepare(graph, masks=False)
    for dimension, label in _named(normal):
        if label == "batch":
            for largest in regions(normal, dimension)[:1]:
                for region in nested_regions(normal, largest):
                    yield from _split(normal, region, counts, label, masks)


def _named(graph: Graph) -> list[tuple[Dimension, str]]:
    """Dimensions with a label each, the batch first; without arguments of the caller, the largest is it."""
    batch = {(value, 0) for value in graph.inputs if graph.storage_of(value).role is Role.INPUT}
    found = [(each, "batch" if _holds(each, batch) else str(each.extent)) for each in dimensions(graph)]
    return sorted(found, key=lambda each: (each[1] != "batch", -len(each[0].nodes)))


def _split(
    graph: Graph, region: Region, counts: Sequence[int], label: str, masks: bool
) -> Iterator[FissionCandidate]:
    assignment = _assignment(graph, region)
    if check_region(graph, tuple(region), assignment):
        return
    extent = extent_of(assignment, tuple(region))
    for count in counts:
        if 1 < count <= extent:
            yield FissionCandidate(region, even_sizes(extent, count), label, masks)


def _holds(dimension: Dimension, members: set[tuple[int, int]]) -> bool:
    return any(dim in dimension.values.get(value, ()) for value, dim in members)


def _assignment(graph: Graph, region: Region) -> dict[int, Axis]:
    return {node: axis_at(graph, graph.node[node], position) for node, position in region.items()}


# --- rewriting ------------------------------------------------------------------------------------


def apply(graph: Graph, candidate: FissionCandidate) -> Edit:
    """Replace the region by one Fission node; values inside it no longer exist.

    Raises IllegalFission if the region cannot be split so, or the parts do not sum to the whole.
    """
    normal = prepare(graph, candidate.masks)
    assignment = _assignment(normal, candidate.axes)
    if reasons := check_region(normal, candidate.nodes, assignment):
        raise IllegalFission(reasons)
    extent = extent_of(assignment, candidate.nodes)
    if sum(candidate.sizes) != extent or min(candidate.sizes) < 1:
        raise IllegalFission([f"parts {candidate.sizes} do not sum to {extent} units"])
    border = border_of(normal, candidate.nodes, assignment)
    sizes = tuple(dict.fromkeys(candidate.sizes))
    bodies = tuple(build_body(normal, assignment, border, size, extent) for size in sizes)
    op = Fission(bodies, _parts(normal, border, candidate.sizes, sizes, extent), border.merges)
    result = replace_region(normal, candidate.nodes, border, op)
    forward = {value: None for value in graph.values if value not in result.values}
    return Edit(result, forward)


def apply_inside(graph: Graph, number: int, candidate: FissionCandidate) -> Edit:
    """Apply `candidate`, which names nodes of the bodies of Fission `number`, in each of those bodies.

    Its sizes are for the first body; the other bodies get as many parts, as even as they can be.  Values
    of `graph` keep their meaning.  Raises IllegalFission as `apply` does.
    """
    node = graph.node[number]
    if not isinstance(node.op, Fission):
        raise IllegalFission([f"{name_node(graph, number)} is no Fission"])
    bodies = tuple(apply(body, resized(body, candidate)).graph for k, body in enumerate(node.op.bodies))
    changed = replace(node, op=replace(node.op, bodies=bodies))
    nodes = tuple(changed if each.id == number else each for each in graph.nodes)
    return Edit(replace(graph, nodes=nodes))


def resized(body: Graph, candidate: FissionCandidate) -> FissionCandidate:
    """`candidate` for another size of body: as many parts, as even as they can be, unless its sizes fit."""
    normal = prepare(body, candidate.masks)
    for number, position in candidate.axes.items():
        if number not in normal.node or position >= len(axes(normal, normal.node[number])):
            raise IllegalFission([f"node {number} has no such loop in a body of this size"])
    extent = extent_of(_assignment(normal, candidate.axes), candidate.nodes)
    if sum(candidate.sizes) == extent:
        return candidate
    return replace(candidate, sizes=even_sizes(extent, min(extent, len(candidate.sizes))))


def _parts(
    graph: Graph, border: Border, cuts: Sequence[int], sizes: Sequence[int], extent: int
) -> tuple[Part, ...]:
    def piece(value: int, dim: int | None, start: int, stop: int) -> Slice:
        if dim is None:
            return Slice(None)
        unit = graph.values[value].meta.shape[dim] // extent
        return Slice(dim, start * unit, stop * unit)

    parts, start = [], 0
    for size in cuts:
        stop = start + size
        inputs = tuple(piece(value, dim, start, stop) for value, dim in border.inputs)
        outputs = tuple(piece(value, dim, start, stop) for value, dim in border.outputs)
        parts.append(Part(sizes.index(size), inputs, outputs))
        start = stop
    return tuple(parts)


def replace_region(graph: Graph, nodes: Sequence[int], border: Border, op: Fission) -> Graph:
    """`graph` with the region as one node, placed after everything that it waits for."""
    inside = frozenset(nodes)
    waits = before(graph)
    needed = {each for node in nodes for each in waits[node]} - inside
    for node in reversed(graph.nodes):
        if node.id in needed:
            needed.update(waits[node.id])
    outside = [node for node in graph.nodes if node.id not in inside]
    first = next(k for k, node in enumerate(graph.nodes) if node.id in inside)
    early = {node.id for node in graph.nodes[:first]} | needed
    after = _descendants(graph, inside)
    head = [node for node in outside if node.id in early and node.id not in after]
    tail = [node for node in outside if node.id not in early or node.id in after]
    number = max(node.id for node in graph.nodes) + 1
    members = [graph.node[node] for node in nodes]
    inputs = tuple(value for value, _ in border.inputs)
    outputs = tuple(value for value, _ in border.outputs)
    fission = Node(number, op, inputs, outputs, origin=border.origin(members))
    replayed = [graph.node[node] for node in border.replayed]
    return _with_nodes(graph, [*head, fission, *replayed, *tail])


def _descendants(graph: Graph, inside: frozenset[int]) -> set[int]:
    waits = before(graph)
    after: set[int] = set()
    for node in graph.nodes:
        if node.id not in inside and any(each in inside or each in after for each in waits[node.id]):
            after.add(node.id)
    return after


def _with_nodes(graph: Graph, nodes: Sequence[Node]) -> Graph:
    used = {value for node in nodes for value in (*node.inputs, *node.outputs)}
    used.update(graph.inputs, graph.outputs)
    values = {key: value for key, value in graph.values.items() if key in used}
    kept = {value.storage for value in values.values()}
    storages = {key: storage for key, storage in graph.storages.items() if key in kept}
    return Graph(tuple(nodes), values, storages, graph.inputs, graph.outputs)
