"""From graph nodes to prepared steps, one function per kind of operation.

Problem.  A node is data; a step is a call with its operands at planned places.

Method.  A `Scope` says where the storages of one graph lie (the program, or the body of a node), and
`lower_graph` walks an order: views vanish (windows know their offsets), every other node goes through
`LOWERINGS`, a table by operation type.  A node with a body lowers it in a scope of its own, whose inputs
are windows of the outer scope and whose temporaries lie in the node's workspace: nesting is a recursion.

    program scope            update scope (node n9)
      %3 arena + 256    ->     %1 arena + 256                 an input
                               %5 arena + 4096 + 0            workspace of n9 at 4096

To add an operation kind: write `lower_kind(node, scope, builder)` and enter it in `LOWERINGS`; a loop over
parts appends its steps part by part, each with windows on its slices.

Not done.  Swap: refused by name until its lowering is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lowtide.analysis.facts import OperatorFacts, workspace_bytes
from lowtide.analysis.parts import deliveries
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Fission, Fused, Op
from lowtide.run.bindings import Bindings, Window
from lowtide.run.calls import Call, from_first_element, out_variant, prepare_call, prepare_out_call
from lowtide.run.fission_steps import PartPlan, lay_out_body, part_window, plan_part
from lowtide.run.kernels import KernelCall, Kernels, Setup, fits, kernel_of, kernel_step
from lowtide.run.layout import Layout, Location, lay_out
from lowtide.run.probe import FactsTree, Path, variant_of
from lowtide.run.steps import Draft, Trail
from lowtide.run.temps import plan_requests

__all__ = ["LOWERINGS", "Builder", "KernelCall", "Kernels", "Scope", "lower_graph", "program_scope"]


_NO_FACTS = OperatorFacts((), 0, assumed=True)


@dataclass(frozen=True)
class Scope:
    """Where the storages of `graph` lie.

    `given` are windows of values that are not simply storage + offset (a body's inputs); `workspaces` are
    arena offsets by node, `temps` the places of operators' temporaries; `owner` is the program's node that
    steps belong to (None: each its own); `trail` is where the graph is a body, None for one whose steps are
    all its node's.
    """

    graph: Graph
    path: Path
    storages: Mapping[int, Location]
    workspaces: Mapping[int, int]
    given: Mapping[int, Window] = field(default_factory=dict)
    temps: Mapping[int, Sequence[Location]] = field(default_factory=dict)
    owner: int | None = None
    trail: Trail | None = ()

    def window(self, value: int) -> Window:
        """Where `value` is."""
        if value in self.given:
            return self.given[value]
        found = self.graph.values[value]
        return Window(
            self.storages[found.storage].shifted(found.offset * found.meta.dtype.itemsize), found.meta
        )


@dataclass
class Builder:
    """Collects drafts; `bindings` fills their argument slots.  `trails` says where each
    comes from, `at` where the node is that is being lowered; `kept` are the arena offsets of what a
    node's kernel keeps and of scratch for filling it, which the node's `setups` do.
    """

    bindings: Bindings
    facts: FactsTree
    drafts: list[Draft] = field(default_factory=list)
    kernels: Kernels = field(default_factory=dict)
    kept: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    setups: dict[int, Setup] = field(default_factory=dict)
    trails: list[Trail] = field(default_factory=list)
    at: Trail = ()

    def mark(self, trail: Trail) -> None:
        """The drafts that are new come from there."""
        self.trails.extend([trail] * (len(self.drafts) - len(self.trails)))

    def facts_of(self, scope: Scope, node: Node) -> OperatorFacts:
        """Facts of a node in its scope."""
        return self.facts.get(scope.path, {}).get(node.id, _NO_FACTS)

    def workspace(self, scope: Scope, node: Node, nbytes: int) -> int:
        """The arena offset of a node's workspace.

        Raises ValueError if that is smaller than the `nbytes` that a body of the node needs: what came after
        it in the arena would be overwritten.
        """
        room = workspace_bytes(scope.graph, node, self.facts.get(scope.path, {}))
        if nbytes > room:
            raise ValueError(
                f"node {node.id} has {room} bytes of workspace, its body needs {nbytes}: "
                "its facts do not belong to those of its body; probe them together"
            )
        return scope.workspaces.get(node.id, 0)

    def bind(self, call: Call, node: Node, scope: Scope) -> None:
        """Fill the operands of `call` with the node's inputs."""
        for index, value in enumerate(node.inputs):
            for container, key in call.places.get(index, ()):
                self.bindings.place(scope.window(value), container, key)

    def add(
        self,
        node: Node,
        scope: Scope,
        call: Call,
        targets: Sequence[list[Tensor | None]] = (),
        outputs: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Append a step; `outputs` are the (slot, offset) of the storages that its results back."""
        facts = self.facts_of(scope, node)
        assert isinstance(node.op, Aten)
        temps = [_slot(place) for place in scope.temps.get(node.id, ())]
        requests = plan_requests(facts, temps, outputs)
        owner = node.id if scope.owner is None else scope.owner
        self.drafts.append(Draft(owner, call, targets, requests))


def program_scope(
    graph: Graph, layout: Layout, order: Sequence[int], derived: Mapping[int, int] | None = None
) -> Scope:
    """The scope of a whole program: the caller's values are roots of their own; storages that are `derived`
    from them lie at these arena offsets.
    """
    own = {storage: Location("arena", 0, offset) for storage, offset in (derived or {}).items()}
    storages = {**layout.locate(), **own}
    given: dict[int, Window] = {}
    for value in graph.inputs:
        found = graph.values[value]
        if found.storage in own:
            continue
        kind = "host" if found.meta.device == "host" else "resident"
        given[value] = Window(Location(kind, value), found.meta)  # type: ignore[arg-type]
        start = Location(kind, value, -found.offset * found.meta.dtype.itemsize)  # type: ignore[arg-type]
        storages.setdefault(found.storage, start)
    return Scope(graph, (), storages, layout.workspaces(order), given, layout.temps(order))


def lower_graph(scope: Scope, order: Sequence[int], builder: Builder, after: Callable[[int], None]) -> None:
    """Append the steps of all nodes in `order`; `after(k)` is called when those of step k are there.

    Raises NotImplementedError for an operation without a lowering.
    """
    for step, node_id in enumerate(order):
        node = scope.graph.node[node_id]
        trail = None if scope.trail is None else (*scope.trail, step)
        builder.at = builder.at if trail is None else trail
        if not scope.graph.is_view(node):
            lowering = LOWERINGS.get(type(node.op))
            if lowering is None:
                raise NotImplementedError(f"node {node.id} ({type(node.op).__name__}) has no lowering")
            lowering(node, scope, builder)
        after(step)
        if trail is not None:
            builder.mark(trail)


def lower_aten(node: Node, scope: Scope, builder: Builder) -> None:
    """One call: into its outputs, served by the hook, or copied; as the facts say."""
    assert isinstance(node.op, Aten)
    if not node.outputs:
        call = prepare_call(node.op)
        builder.bind(call, node, scope)
        builder.add(node, scope, call)
        return
    if variant_of(node.op, builder.facts_of(scope, node)) == "out":
        _lower_out(node, node.op, scope, builder)
        return
    call = prepare_call(node.op)
    builder.bind(call, node, scope)
    targets: list[list[Tensor | None]] = [[None] for _ in node.outputs]
    for target, value in zip(targets, node.outputs, strict=True):
        builder.bindings.place(scope.window(value), target, 0)
    builder.add(node, scope, call, targets, [_slot_of(scope, value) for value in node.outputs])


def _lower_out(node: Node, op: Aten, scope: Scope, builder: Builder) -> None:
    variant = out_variant(op.overload)
    assert variant is not None
    first = scope.graph.values[node.inputs[0]].offset if node.inputs else 0
    call = prepare_out_call(from_first_element(op, first), variant)
    builder.bind(call, node, scope)
    for name, value in zip(variant.names, node.outputs, strict=True):
        call.kwargs[name] = None
        builder.bindings.place(scope.window(value), call.kwargs, name)
    builder.add(node, scope, call)


def _slot_of(scope: Scope, value: int) -> tuple[int, int]:
    return _slot(scope.storages[scope.graph.values[value].storage])


def _slot(place: Location) -> tuple[int, int]:
    """Slot number and offset of a storage or temporary, as the hook counts them."""
    return place.index if place.kind == "output" else 0, place.offset_bytes


def lower_fused(node: Node, scope: Scope, builder: Builder) -> None:
    """One compiled kernel; or call by call, with what is inside in the node's workspace."""
    assert isinstance(node.op, Fused)
    body = node.op.body
    path = (*scope.path, node.id)
    kernel = kernel_of(node.op, builder.kernels)
    if kernel is not None and path not in builder.facts:
        _lower_kernel(node, kernel, scope, builder)
        return
    if path not in builder.facts:
        raise ValueError(
            f"the kernel of node {node.id} is not there, and the arena has no room to run its body: "
            "Plan.use_kernels lays the arena out for the kernels that there are"
        )
    order = [inner.id for inner in body.nodes]
    layout = lay_out(body, order, builder.facts.get(path, {}), body=True)
    base = builder.workspace(scope, node, layout.nbytes)
    pairs = [
        *zip(body.inputs, node.inputs, strict=True),
        *zip(body.outputs, node.outputs, strict=True),
    ]
    given = {mine: scope.window(outer) for mine, outer in pairs}
    owner = node.id if scope.owner is None else scope.owner
    inner = body_scope(body, path, layout, order, base, given, owner)
    lower_graph(inner, order, builder, lambda step: None)


def _lower_kernel(node: Node, kernel: KernelCall, scope: Scope, builder: Builder) -> None:
    """One call, its scratch in the node's workspace."""
    assert isinstance(node.op, Fused)
    inputs, outputs = ([scope.window(value) for value in values] for values in (node.inputs, node.outputs))
    if not fits(node.op.body, inputs, outputs):
        raise ValueError(f"the operands of node {node.id} do not lie as its body says")
    start = builder.workspace(scope, node, kernel.scratch_bytes)
    scratch = _address(builder, start, kernel.scratch_bytes)
    places = zip(
        _kept_at(node, kernel, scope, builder), (kernel.prepared_bytes, kernel.scratch_bytes), strict=True
    )
    kept = [_address(builder, place, nbytes) for place, nbytes in places]
    call, setup = kernel_step(kernel, inputs, outputs, scratch, builder.bindings, *kept)
    builder.setups.update({node.id: setup} if setup else {})
    builder.drafts.append(Draft(node.id if scope.owner is None else scope.owner, call))


def _address(builder: Builder, start: int, nbytes: int) -> int:
    """Where `nbytes` at an arena offset are; nowhere if there are none."""
    place = Window(Location("arena", 0, start), TensorMeta((nbytes,), (1,), torch.uint8))
    return builder.bindings.fixed(place).data_ptr() if nbytes else 0


def _kept_at(node: Node, kernel: KernelCall, scope: Scope, builder: Builder) -> tuple[int, int]:
    """The arena offsets of what the kernel keeps, and of scratch for that.

    Raises ValueError if the plan has no room for it.
    """
    if not kernel.prepared_bytes:
        return 0, 0
    if scope.path or node.id not in builder.kept:
        raise ValueError(
            f"the kernel of node {node.id} keeps {kernel.prepared_bytes} bytes, for which there is no room"
        )
    return builder.kept[node.id]


def lower_fission(node: Node, scope: Scope, builder: Builder) -> None:
    """The body once per part, on one set of offsets (see `lowtide.run.fission_steps`)."""
    assert isinstance(node.op, Fission)
    ways, here = deliveries(scope.graph, node), builder.at
    for number, part in enumerate(node.op.parts):
        body = node.op.bodies[part.body]
        path = (*scope.path, node.id, part.body)
        layout = lay_out_body(body, ways, builder.facts.get(path, {}))
        given = {
            mine: part_window(scope.window(outer), piece, body.values[mine].meta)
            for mine, outer, piece in zip(body.inputs, node.inputs, part.inputs, strict=True)
        }
        targets = [
            part_window(scope.window(outer), piece, body.values[mine].meta)
            for mine, outer, piece in zip(body.outputs, node.outputs, part.outputs, strict=True)
        ]
        plan = plan_part(node.op, number, ways, targets)
        owner = node.id if scope.owner is None else scope.owner
        order = [inner.id for inner in plan.graph.nodes]
        base = builder.workspace(scope, node, layout.nbytes)
        inner = body_scope(plan.graph, path, layout, order, base, {**given, **plan.given}, owner)
        inner = replace(inner, trail=(*here, number))
        lower_graph(inner, order, builder, partial(_add_merges, plan, inner, builder))


def _add_merges(plan: PartPlan, scope: Scope, builder: Builder, step: int) -> None:
    """The steps that bring what step `step` of a part made to where it belongs."""
    for op, value, target in plan.merges.get(step, ()):
        call = prepare_call(op)
        for index, window in enumerate((target, scope.window(value))):
            for container, key in call.places[index]:
                builder.bindings.place(window, container, key)
        assert scope.owner is not None
        builder.drafts.append(Draft(scope.owner, call, merge=op.overload))


def body_scope(
    body: Graph,
    path: Path,
    layout: Layout,
    order: Sequence[int],
    base: int,
    given: Mapping[int, Window],
    owner: int,
) -> Scope:
    """The scope of a body: `given` are its inputs (and outputs, if any), everything else lies in the arena
    from `base`.
    """
    around: dict[int, Location] = {}
    for value, where in given.items():
        found = body.values[value]
        start = where.location.shifted(-found.offset * found.meta.dtype.itemsize)
        around.setdefault(found.storage, start)
    storages = {
        storage: place.shifted(base) for storage, place in layout.locate().items() if place.kind == "arena"
    }
    slots = [next(around[each] for each in buffer.storages if each in around) for buffer in layout.slots]
    for buffer, outer in zip(layout.slots, slots, strict=True):  # what a result takes over lies where it does
        storages.update(dict.fromkeys(buffer.storages, outer))
    storages |= around
    workspaces = {node: offset + base for node, offset in layout.workspaces(order).items()}
    temps = {
        node: [
            place.shifted(base)
            if place.kind == "arena"
            else slots[place.index - 1].shifted(place.offset_bytes)
            for place in places
        ]
        for node, places in layout.temps(order).items()
    }
    return Scope(body, path, storages, workspaces, given, temps, owner, None)


Lowering = Callable[[Node, Scope, Builder], None]

LOWERINGS: dict[type[Op], Lowering] = {Aten: lower_aten, Fused: lower_fused, Fission: lower_fission}
