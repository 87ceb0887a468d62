"""Repeated layers: which storages are the same value of another layer.

Problem.  A model of twelve equal layers asks the same question twelve times; a search that answers it once
for all of them is that much faster, and can refine afterwards.

Method.  Two storages are copies if the modules that make them differ only in numbers (``layers.3.mlp`` and
``layers.7.mlp``), their makers are the same operation on the same shapes, and they are the same output of
the same occurrence of it in their module.

Not done.  Repetition without numbered modules: those storages stay alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from lowtide.analysis.key import node_key
from lowtide.ir import Graph
from lowtide.transforms.remat import owner_of

__all__ = ["copies_of"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def copies_of(graph: Graph, storages: Iterable[int]) -> tuple[frozenset[int], ...]:
    """Groups of at least two of `storages`, by first member."""
    owner = owner_of(graph)
    wanted = frozenset(storages)
    place = _places(graph, frozenset(owner[storage] for storage in wanted))
    groups: dict[object, set[int]] = {}
    for storage in sorted(wanted):
        node = graph.node[owner[storage]]
        output = next(k for k, value in enumerate(node.outputs) if graph.values[value].storage == storage)
        groups.setdefault((place[node.id], output), set()).add(storage)
    return tuple(frozenset(group) for group in groups.values() if len(group) > 1)


def _places(graph: Graph, nodes: frozenset[int]) -> dict[int, tuple[str, str, int]]:
    """Node -> module without numbers, operation, and how many such the module ran before."""
    count: Counter[tuple[str, str]] = Counter()
    found = {}
    for node in graph.nodes:
        if node.id in nodes:
            key = node_key(graph, node)
            module = node.origin.module
            found[node.id] = (_NUMBER.sub("*", module), key, count[module, key])
            count[module, key] += 1
    return found
