"""What a state is made of before decisions: rewrites, parts, regions inside; and its program.

Method.  A `Structure` says how many parts the whole step has along the batch, and where regions inside it
begin. `build` rewrites, carves and orders; `program` gives the arrays.  Structures are few and built once;
decisions are many and judged on arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowtide.search.residence_search import Choice, choice_of

from .flatten import Flat, flatten
from .model import Graph, Node
from .nested import carve_late
from .order import late_nodes, release, tidy
from .rules import fold_divisions, fuse_thresholds, merge_projections, part_concats
from .split import split_batch
from .waves import fit_waves

__all__ = ["Structure", "batch_size", "build", "choice", "ordered", "program", "rewritten"]


@dataclass(frozen=True)
class Structure:
    """One field an idea.

    parts: of the whole step along the batch, 1: not split.
    inner: regions inside, each (how many values of the forward are before it, parts).
    fold: divisions go into weights.  merge: projections of one value become one, gradients of a
    concatenation are made piece by piece.
    masks: a mask is made when it is read.  waves: products are cut along the batch where that fills waves.
    fuse: masks and products are one kernel.
    """

    parts: int = 1
    inner: tuple[tuple[int, int], ...] = ()
    fold: bool = True
    merge: bool = True
    masks: bool = True
    waves: bool = False
    fuse: bool = False


def batch_size(graph: Graph) -> int:
    """Samples in a step."""
    return next(node.shape[0] for node in graph.nodes if node.kind == "input")


def rewritten(graph: Graph, structure: Structure, hw: Mapping[str, Any]) -> Graph:
    """The algebra of a structure."""
    if structure.fold:
        graph = fold_divisions(graph)
    if structure.merge:
        graph = part_concats(merge_projections(graph), hw)
    return fuse_thresholds(graph) if structure.fuse else graph


def build(graph: Graph, structure: Structure, hw: Mapping[str, Any]) -> tuple[Graph, frozenset[int]]:
    """The structure's graph in order, and its late nodes.  Raises Uncuttable if it cannot be split so."""
    graph = rewritten(graph, structure, hw)
    late = late_nodes(graph)
    graph = tidy(graph, late, structure.masks)
    if structure.parts > 1:
        graph = split_batch(graph, structure.parts)
    for before, parts in structure.inner:
        graph = carve_late(graph, late, before, parts)
    if structure.waves:
        graph, late = _with_waves(graph, late, hw)
    return ordered(graph, late, structure.masks), late


def _with_waves(graph: Graph, late: frozenset[int], hw: Mapping[str, Any]) -> tuple[Graph, frozenset[int]]:
    """Products cut in all bodies, at the shapes that run; pieces are late if the whole is."""
    nodes = []
    for node in graph.nodes:
        if node.split is not None:
            body, late = _with_waves(node.split.body, late, hw)
            node = replace(node, split=replace(node.split, body=body))
        nodes.append(node)
    cut, origin = fit_waves(Graph(tuple(nodes), graph.inputs, graph.outputs), hw)
    return cut, late | {piece for piece, whole in origin.items() if whole in late}


def ordered(graph: Graph, late: Collection[int], masks: bool = True) -> Graph:
    """The graph and all bodies in a good order."""
    graph = release(tidy(graph, late, masks), late)
    nodes = (
        replace(node, split=replace(node.split, body=ordered(node.split.body, late, masks)))
        if node.split
        else node
        for node in graph.nodes
    )
    return Graph(tuple(nodes), graph.inputs, graph.outputs)


def program(graph: Graph, late: Collection[int], hw: Mapping[str, Any]) -> Flat:
    """The arrays of a built structure."""
    return flatten(graph, late, hw)


def choice(flat: Flat) -> Choice:
    """What may be decided, values grouped by operator, shape and readers."""
    graphs: dict[tuple[int, ...], Graph] = {}
    _collect(flat.graph, (), graphs)
    groups: dict[object, list[int]] = {}
    for number, (path, value) in enumerate(flat.values):
        if flat.can_remat[number] or flat.can_swap[number]:
            graph = graphs[path]
            groups.setdefault((path, *_likeness(graph, graph.node[value])), []).append(number)
    return choice_of(flat.can_remat, flat.can_swap, list(groups.values()))


def _likeness(graph: Graph, node: Node) -> tuple[object, ...]:
    return node.op, node.shape, tuple(sorted(graph.node[reader].op for reader in graph.readers[node.id]))


def _collect(graph: Graph, path: tuple[int, ...], found: dict[tuple[int, ...], Graph]) -> None:
    found[path] = graph
    for node in graph.nodes:
        if node.split is not None:
            _collect(node.split.body, (*path, node.id), found)
