"""Weights that an inference derives from the caller's: made once, kept in the arena, made again on change.

Problem.  A folded BatchNorm, a merged projection or packed panels pay only if they are not made in every
call; kept, they take memory, and are wrong as soon as an original changes.

Method.  What is kept lies behind everything else in the plan's one block:

    arena   | values and workspaces of a step, or of the preparation | derived weights | packed by kernels |

A `Derivation` holds the preparation, a graph from the caller's values to the derived ones, and the bytes
that each kernel of the program packs.  A derived weight that only the packing reads is packed as soon as it
is made and then gone: like all temporaries of the preparation it lies where those of a step do, since the two
never run at once.  `Upkeep` runs the preparation before a call if one of the originals lies elsewhere, has
another version, or looks different in a sample of its words (`p.data` and NumPy write without changing a
version).

Invariants.  Everything is in the arena's bytes, hence in the predicted peak.  Where the sample cannot be
taken (no hook), everything is made in every call.

Not done.  An edit of a few elements of a large tensor that bypasses its version: `Plan.refresh` is for that.
Regions and other bodies: only nodes of the program itself keep something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lowtide.analysis.facts import Facts
from lowtide.analysis.lifetime import Buffer, lifetimes
from lowtide.ir.graph import Graph, Node, Role, Storage
from lowtide.place.greedy import place_greedy
from lowtide.run.allocator import Hook
from lowtide.run.kernels import KernelCall, Kernels, kernel_of
from lowtide.run.layout import Layout, problem_of, tenants_of
from lowtide.run.probe import FactsTree, probe_tree
from lowtide.run.store import ProfileStore
from lowtide.run.temps import align

__all__ = ["Derivation", "Upkeep", "arena_size", "derivation_of", "only_packed", "packed_by", "sources_of"]

_FIXED = frozenset({Role.PARAM, Role.BUFFER, Role.CONST})
_NOTHING = Graph((), {}, {}, (), ())


@dataclass(frozen=True, eq=False)
class Derivation:
    """What a plan keeps beside the caller's weights.

    `graph` makes the inputs of the plan's graph that are not the program's; `packed` are the (node, bytes) of
    kernels.  `sequence` is the order of both: a node of `graph`, or -1 - n for the packing of the program's
    node n.  `layout` places all of it; its output slots are kept.
    """

    graph: Graph
    facts: FactsTree
    layout: Layout
    packed: tuple[tuple[int, int], ...]
    sequence: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        derived = sum(align(buffer.nbytes) for buffer in self.layout.slots)
        return derived + sum(align(nbytes) for _, nbytes in self.packed)

    @cached_property
    def storages(self) -> frozenset[int]:
        """The storages of the plan's inputs that `graph` makes."""
        return frozenset(self.graph.values[value].storage for value in self.graph.outputs)

    def placed(self, layout: Layout) -> dict[int, int]:
        """Derived storage -> its arena offset, in the arena of a plan with this `layout`."""
        found = {
            storage: place.offset_bytes
            for storage, place in self.layout.locate().items()
            if place.kind == "arena" and storage in self.storages
        }
        place = _room(layout, self)
        for buffer in self.layout.slots:
            found.update(dict.fromkeys(buffer.storages, place))
            place += align(buffer.nbytes)
        return found

    def nodes_at(self, layout: Layout) -> dict[int, tuple[int, int]]:
        """Node with a kernel that packs -> the arena offsets of that, and of scratch for it."""
        found: dict[int, tuple[int, int]] = {}
        scratch = self.layout.workspaces(self.sequence)
        place = _room(layout, self) + sum(align(buffer.nbytes) for buffer in self.layout.slots)
        for node, nbytes in self.packed:
            found[node] = (place, scratch.get(-1 - node, 0))
            place += align(nbytes)
        return found


def _room(layout: Layout, derivation: Derivation) -> int:
    """Where what is kept starts: behind what a step or the preparation takes."""
    return align(max(layout.nbytes, derivation.layout.nbytes))


def arena_size(layout: Layout, derivation: Derivation | None) -> int:
    """Bytes of the arena, kept ones included."""
    return _room(layout, derivation) + derivation.nbytes if derivation else layout.nbytes


# -- planning ----------------------------------------------------------------------------------------------


def derivation_of(
    graph: Graph,
    preparation: Graph | None,
    kernels: Kernels,
    store: ProfileStore | None = None,
    hook: Hook | None = None,
) -> Derivation | None:
    """What a plan that runs `graph` keeps: what `preparation` makes, and what its `kernels` pack."""
    packed = packed_by(graph, kernels)
    source = preparation or _NOTHING
    if not packed and not source.nodes:
        return None
    tree = probe_tree(source, "arena", store=store, hook=hook)
    derived = frozenset(source.values[value].storage for value in source.outputs)
    readers = {node: _packs(graph, graph.node[node], kernels) & derived for node, _ in packed}
    sequence = _sequence(source, readers)
    kept = _with_outputs(source, _read_in_steps(graph, kernels))
    buffers = _buffers(kept, tree[()], sequence, readers, _scratch(graph, kernels))
    tenants = tenants_of(kept, sequence, tree[()], buffers)
    problem = problem_of(tenants, {})
    offsets = dict(place_greedy(problem).offsets) if problem.blocks else {}
    end = max((offsets[block.id] + block.nbytes for block in problem.blocks), default=0)
    layout = Layout(buffers, offsets, end, pieces=tenants.pieces)
    return Derivation(source, tree, layout, packed, sequence)


def only_packed(graph: Graph, kernels: Kernels) -> Derivation | None:
    """What is kept by the kernels of `graph` alone."""
    return derivation_of(graph, None, kernels) if packed_by(graph, kernels) else None


def packed_by(graph: Graph, kernels: Kernels) -> tuple[tuple[int, int], ...]:
    """(node, bytes) of the kernels of a program's own nodes that keep something."""
    return tuple((node.id, kernel.prepared_bytes) for node, kernel in _packing(graph, kernels))


def _packing(graph: Graph, kernels: Kernels) -> Iterator[tuple[Node, KernelCall]]:
    for node in graph.nodes:
        kernel = kernel_of(node.op, kernels)
        if kernel is not None and kernel.prepared_bytes:
            yield node, kernel


def _packs(graph: Graph, node: Node, kernels: Kernels) -> frozenset[int]:
    """The storages from which the kernel of `node` packs."""
    kernel = kernel_of(node.op, kernels)
    positions = kernel.constants if kernel else ()
    return frozenset(graph.values[node.inputs[position]].storage for position in positions)


def _scratch(graph: Graph, kernels: Kernels) -> dict[int, int]:
    return {node.id: kernel.scratch_bytes for node, kernel in _packing(graph, kernels)}


def _read_in_steps(graph: Graph, kernels: Kernels) -> frozenset[int]:
    """The storages that a step reads: a kernel does not read what it has packed."""
    once = {node.id: set(kernel.setup_inputs) for node, kernel in _packing(graph, kernels)}
    read = {
        graph.values[value].storage
        for node in graph.nodes
        if not graph.is_view(node)
        for position, value in enumerate(node.inputs)
        if position not in once.get(node.id, ())
    }
    return frozenset(read | {graph.values[value].storage for value in graph.outputs})


def _sequence(preparation: Graph, readers: Mapping[int, frozenset[int]]) -> tuple[int, ...]:
    """Each packing as early as what it reads allows, what that takes right before it."""
    makers: dict[int, set[int]] = {}
    for node in preparation.nodes:
        for out in node.outputs:
            makers.setdefault(preparation.values[out].storage, set()).add(node.id)
    done: dict[int, None] = {}
    for reader, storages in readers.items():
        wanted = _closure(preparation, {each for storage in storages for each in makers.get(storage, ())})
        done.update(dict.fromkeys(node.id for node in preparation.nodes if node.id in wanted))
        done[-1 - reader] = None
    done.update(dict.fromkeys(node.id for node in preparation.nodes))
    return tuple(done)


def _closure(graph: Graph, nodes: set[int]) -> set[int]:
    """`nodes` and all that they wait for."""
    found: set[int] = set()
    waiting = list(nodes)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += graph.dependencies[number]
    return found


def _with_outputs(graph: Graph, wanted: frozenset[int]) -> Graph:
    """`graph` with only the `wanted` storages as results, the others temporary."""
    storages = {
        number: Storage(number, each.nbytes, Role.TEMP)
        if each.role is Role.OUTPUT and number not in wanted
        else each
        for number, each in graph.storages.items()
    }
    outputs = tuple(value for value in graph.outputs if graph.values[value].storage in wanted)
    return replace(graph, storages=storages, outputs=outputs)


def _buffers(
    graph: Graph,
    facts: Facts,
    sequence: Sequence[int],
    readers: Mapping[int, frozenset[int]],
    scratch: Mapping[int, int],
) -> tuple[Buffer, ...]:
    """Lifetimes in `sequence`: derived weights live until they are packed, each packing has its scratch."""
    step = {each: place for place, each in enumerate(sequence)}
    order = [each for each in sequence if each >= 0]
    last = {s: step[-1 - reader] + 1 for reader, storages in readers.items() for s in storages}
    found = []
    for buffer in lifetimes(graph, order, facts):
        stop = step[order[buffer.stop - 1]] + 1
        if buffer.kind == "output":
            stop = len(sequence)
        stop = max([stop, *(last.get(storage, 0) for storage in buffer.storages)])
        found.append(replace(buffer, start=step[order[buffer.start]], stop=stop))
    for node, nbytes in scratch.items():
        at = step[-1 - node]
        if nbytes:
            found.append(Buffer(len(found), (), nbytes, at, at + 1, "workspace"))
    return tuple(found)


# -- running -----------------------------------------------------------------------------------------------


def sources_of(graph: Graph, derivation: Derivation, kernels: Kernels) -> tuple[int, ...]:
    """The caller's values that what is kept is made from."""
    given = (value for value in graph.inputs if graph.storage_of(value).role in _FIXED)
    roots = {s: value for value in given if (s := graph.values[value].storage) not in derivation.storages}
    ahead = derivation.graph
    read = {ahead.values[value].storage for node in ahead.nodes for value in node.inputs}
    for node, _ in derivation.packed:
        read |= _packs(graph, graph.node[node], kernels)
    return tuple(sorted(roots[storage] for storage in read if storage in roots))


class Upkeep:
    """Makes what is kept before the first call, and when one of `sources` has changed.

    `make` does it; `spans` are the bytes that each source spans.
    """

    def __init__(
        self, sources: Sequence[int], spans: Sequence[int], make: Callable[[], None], hook: Hook | None
    ) -> None:
        self._sources = tuple(sources)
        self._spans = tuple(spans)
        self._make = make
        self._hook = hook
        self._seen: tuple[int, ...] | None = None

    def refresh(self, residents: Mapping[int, Tensor]) -> None:
        """Make it anew unless the sources are what they were."""
        now = self._look([residents[value] for value in self._sources])
        if now is None or now != self._seen:
            self._seen = None  # should making fail, the next call makes it again
            self._make()
            self._seen = now

    def forget(self) -> None:
        """Make it anew in the next call."""
        self._seen = None

    def _look(self, tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
        """Addresses, versions and a sample of the contents; None if nothing can be said."""
        if self._hook is None:
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return (*addresses, *versions, self._hook.glance(addresses, self._spans))
