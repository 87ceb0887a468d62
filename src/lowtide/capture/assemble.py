"""From a trace to the finished graph: SSA, write-backs, update nodes, roles, clean-up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowtide.capture.passes import drop_statistics, drop_unread_constants, eliminate_dead_code
from lowtide.capture.recorder import meta_of
from lowtide.capture.storages import Ssa
from lowtide.capture.trace import Trace
from lowtide.capture.update import NUMBER, UpdateClass, Updates, body_of
from lowtide.ir.graph import Graph, Origin, Role
from lowtide.ir.ops import Aten, Fused, Ref

__all__ = ["Assembled", "assemble"]


@dataclass(frozen=True, eq=False)
class Assembled:
    """A graph with the names of its inputs, its results, and the update node of each parameter."""

    graph: Graph
    names: Mapping[str, int]
    results: Mapping[str, int]
    updates: Mapping[str, int]

    @property
    def gradients(self) -> dict[str, int]:
        """Parameter name -> the value of its gradient."""
        return {
            name.removeprefix("grad:"): value
            for name, value in self.results.items()
            if name.startswith("grad:")
        }


def assemble(trace: Trace, updates: Updates | None) -> Assembled:
    """The graph of a trace; `updates` adds the optimizer's part."""
    ssa = Ssa(trace)
    ssa.run()
    rebound = {path: _unshared(ssa, ssa.read(window, Origin())) for path, window in trace.rebound.items()}
    ssa.write_back()
    results = {name: ssa.read(window, Origin()) for name, window in trace.results.items()}
    replaced = {ssa.builder.values[ssa.names[f"buffer:{path}"]].storage for path in rebound}
    for name, value in results.items():
        if ssa.builder.values[value].storage in replaced:  # the model returns the tensor that it replaced
            results[name] = _unshared(ssa, value)
    for path, value in rebound.items():
        ssa.store(f"buffer:{path}", value, Origin())
    nodes = _add_updates(ssa, updates, results) if updates is not None else {}
    returned = [value for name, value in results.items() if not name.startswith("grad:")]
    _mark_roles(ssa, returned, [value for name, value in results.items() if name.startswith("grad:")])
    graph = ssa.builder.graph(list(dict.fromkeys(returned)))
    graph = drop_unread_constants(eliminate_dead_code(drop_statistics(graph), results.values()))
    names = {name: value for name, value in ssa.names.items() if value in graph.values}
    return Assembled(graph, names, results, nodes)


def _unshared(ssa: Ssa, value: int) -> int:
    """`value`, copied if it lies in the caller's memory, where a later write would change it."""
    if not ssa.builder.storage_of(value).role.resident:
        return value
    return ssa.builder.compute(Aten("aten.clone.default", (Ref(0),)), (value,))[0]


def _mark_roles(ssa: Ssa, outputs: list[int], gradients: list[int]) -> None:
    for role, values in ((Role.GRAD, gradients), (Role.OUTPUT, outputs)):
        for value in values:
            storage = ssa.builder.storage_of(value)
            if not storage.role.resident:
                ssa.builder.change_role(storage.id, role)


def _add_updates(ssa: Ssa, updates: Updates, results: Mapping[str, int]) -> dict[str, int]:
    """Append one node per parameter, in the optimizer's order."""
    nodes: dict[str, int] = {}
    bodies: dict[Any, Graph] = {}
    for index, members in enumerate(updates.classes):
        scalars = _add_scalars(ssa, index, members)
        for update in members.updates:
            parameter, gradient = ssa.names[f"param:{update.name}"], results[f"grad:{update.name}"]
            state = _add_state(ssa, updates, members, update.name, parameter)
            metas = tuple(ssa.builder.values[value].meta for value in (parameter, gradient, *state))
            if (index, metas) not in bodies:
                bodies[index, metas] = body_of(members.text, metas[0], metas[1], metas[2:])
            body = bodies[index, metas]
            inputs = (parameter, gradient, *state, *scalars)
            writes = _written(body, inputs)
            nodes[update.name] = len(ssa.builder.nodes)
            origin = Origin(update.name.rpartition(".")[0], "", "update")
            ssa.builder.node(Fused(body, "update"), inputs, (), writes, origin)
    return nodes


def _written(body: Graph, inputs: tuple[int, ...]) -> list[int]:
    """Which of the node's inputs its body overwrites."""
    inside = {value for node in body for value in node.writes}
    return [outer for outer, inner in zip(inputs, body.inputs, strict=True) if inner in inside]


def _add_scalars(ssa: Ssa, index: int, members: UpdateClass) -> list[int]:
    values = []
    for number in range(len(members.text.numbers)):
        value = ssa.builder.input(NUMBER, ssa.builder.storage(0, Role.HOST))
        ssa.names[f"scalar:update[{index}].scalar[{number}]"] = value
        values.append(value)
    return values


def _add_state(ssa: Ssa, updates: Updates, members: UpdateClass, name: str, parameter: int) -> list[int]:
    pattern = members.exemplar.state(updates.optimizer.param_groups[members.group])
    (like,) = ssa.builder.predict(Aten("aten.zeros_like.default", (Ref(0),)), [parameter])
    values = []
    for key, tensor in pattern.items():
        meta = replace(meta_of(like if tensor.dim() else tensor), dtype=tensor.dtype)
        value = ssa.builder.input(meta, ssa.builder.storage(meta.span_bytes, Role.STATE))
        ssa.names[f"state:{name}:{key}"] = value
        values.append(value)
    return values
