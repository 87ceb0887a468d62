"""Plans on disk: saved without a model, loaded onto one.

Problem.  A plan belongs to a live model, optimizer and arguments; none of them is in the file.

Method.  The file holds the program as names and metas beside the recipe.  Loading looks the names up in the
model that is given, compares metas, and asks the given optimizer to spell its update anew: if that is not
what the file's update nodes do, the plan is refused.  Where the whole workload is at hand (`load_for`), it is
captured again instead and has to give the very same graph.

Invariant.  Loading runs no code from the file.

Not done.  A loss module with parameters or buffers of its own, when only model and optimizer are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from lowtide.analysis.key import graph_key
from lowtide.capture.binding import Binding, Seen, address_of, group_members
from lowtide.capture.counted import captured
from lowtide.capture.fingerprint import Fingerprint, same
from lowtide.capture.guards import Guards, attributes_of
from lowtide.capture.internals import pytree
from lowtide.capture.program import Program
from lowtide.capture.recorder import meta_of
from lowtide.capture.recording import named_tensors
from lowtide.capture.result import Constant, Result
from lowtide.capture.update import Update, Updates, body_of, classify
from lowtide.errors import PlanFileError, Stale, UsageError
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Fused
from lowtide.ir.text import print_graph
from lowtide.run.allocator import load_hook
from lowtide.run.archive import (
    decode_constant,
    decode_meta,
    encode_constant,
    encode_meta,
    encode_recipe,
    graph_of,
    read_archive,
    reading,
    recipe_of,
    write_archive,
)
from lowtide.run.operands import window
from lowtide.run.plan import HERE, Plan
from lowtide.run.snapshot import bytes_of
from lowtide.workload import Workload

__all__ = ["inspect_plan", "load_for", "load_plan", "save_plan"]

AnyPlan = TypeVar("AnyPlan", bound=Plan)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write `plan` to one file.

    Raises UsageError if the file cannot be written, for an argument or result that has no plain form, and for
    a plan for a device that is not here.
    """
    if plan.recipe.device != HERE:
        raise UsageError(
            f"a plan for {plan.recipe.device} is a prediction, which cannot be loaded and run",
            remedy="keep its report or JSON record instead",
        )
    program, workload = plan.program, plan.program.workload
    about = {
        "torch": torch.__version__,
        "workload": workload.name,
        "mode": program.mode,
        "threads": torch.get_num_threads(),
        "key": graph_key(program.graph),
    }
    parts = encode_recipe(plan.recipe)
    parts["captured.txt"] = print_graph(program.graph)
    parts["program.json"] = json.dumps(_encode_program(program))
    for value, tensor in program.binding.constants.items():
        parts[f"constants/{value}"] = bytes_of(tensor).tobytes()
    write_archive(Path(path), about, parts)


def _encode_program(program: Program) -> dict[str, Any]:
    binding, workload = program.binding, program.workload
    return {
        "names": dict(program.names),
        "gradients": dict(program.gradients),
        "updates": dict(program.updates),
        "opaque": program.opaque,
        "rng": program.rng,
        "draws": program.draws,
        "leaves": [
            leaf if isinstance(leaf, int) else [encode_constant(leaf.content)]
            for leaf in program.result.leaves
        ],
        "spec": pytree.treespec_dumps(program.result.spec),
        "owned": {
            name: [encode_meta(seen.meta), seen.requires_grad] for name, seen in binding.owned_names.items()
        },
        "inputs": {name: encode_meta(meta) for name, meta in binding.inputs.items()},
        "constants": {value: encode_meta(meta_of(tensor)) for value, tensor in binding.constants.items()},
        "arguments": {name: encode_constant(content) for name, content in binding.leaves.items()},
        "training": dict(binding.training),
        "args": len(workload.args),
        "targets": len(workload.targets),
        "clip_grad_norm": workload.clip_grad_norm,
        "autocast": encode_constant(workload.autocast),
        "attributes": {
            name: encode_constant(content) for name, content in attributes_of(workload.model).items()
        },
    }


def load_plan(
    path: str | Path,
    model: nn.Module,
    optimizer: optim.Optimizer | None = None,
    *,
    loss: Any = None,
    kind: type[AnyPlan] = Plan,  # type: ignore[assignment]
) -> AnyPlan:
    """The plan in `path`, for `model` and (a training step) `optimizer`.

    `loss` is only needed if it is a module with tensors of its own.  Raises PlanFileError for a file that is
    damaged, foreign or newer, Stale for a model or optimizer that is not like the one it was made for.
    """
    file = Path(path)
    about, parts = read_archive(file)
    if (about.get("mode") == "train") != (optimizer is not None):
        given = (
            "needs the model's optimizer" if optimizer is None else "is an inference: it takes no optimizer"
        )
        raise PlanFileError(f"the plan in {file} {given}")
    with reading(file):
        content = json.loads(parts["program.json"])
        recipe = recipe_of(parts)
        graph = graph_of(parts["captured.txt"])
        constants = _constants(content, parts)
    workload = _workload(about, content, model, optimizer, loss)
    program = _program(graph, content, constants, workload)
    return kind(program, recipe, load_hook())


def load_for(path: str | Path, workload: Workload, kind: type[AnyPlan] = Plan) -> AnyPlan:  # type: ignore[assignment]
    """The plan in `path` for a whole workload, which is captured and has to be the one it was made for.

    Raises PlanFileError, CaptureError.
    """
    file = Path(path)
    about, parts = read_archive(file)
    with reading(file):
        recipe = recipe_of(parts)
        key, rng = about["key"], json.loads(parts["program.json"])["rng"]
    program = captured(workload, rng)
    if graph_key(program.graph) != key:
        raise PlanFileError(
            f"the plan in {file} was made for another workload ({about.get('workload', 'unknown')})",
            remedy=f"{workload.name} gives another graph: shapes, options and optimizer have to be the same",
        )
    return kind(program, recipe, load_hook())


def inspect_plan(path: str | Path) -> Plan:
    """The plan in `path` without a model: to be looked at, not to be run.  Raises PlanFileError."""
    file = Path(path)
    about, parts = read_archive(file)
    with reading(file):
        content = json.loads(parts["program.json"])
        program = Program(
            graph=graph_of(parts["captured.txt"]),
            mode=about["mode"],
            workload=Workload(nn.Identity(), name=about["workload"]),
            names=content["names"],
            gradients=content["gradients"],
            updates=content["updates"],
            result=Result((), pytree.tree_structure(())),
            binding=Binding(content["names"], {}, {}, {}, {}, {}, ()),
            opaque=tuple(content["opaque"]),
            rng=content["rng"],
        )
        return Plan(program, recipe_of(parts))


def _constants(content: Mapping[str, Any], parts: Mapping[str, bytes]) -> dict[int, Tensor]:
    found = {}
    for value, encoded in content["constants"].items():
        meta, raw = decode_meta(encoded), bytearray(parts[f"constants/{value}"])
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        dense = window(flat.untyped_storage(), 0, _dense(meta))
        found[int(value)] = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).copy_(dense)
    return found


def _dense(meta: TensorMeta) -> TensorMeta:
    """The same shape, contiguous."""
    return TensorMeta(meta.shape, torch.empty(meta.shape, device="meta").stride(), meta.dtype)


def _workload(
    about: Mapping[str, Any],
    content: Mapping[str, Any],
    model: nn.Module,
    optimizer: optim.Optimizer | None,
    loss: Any,
) -> Workload:
    """A workload whose arguments are unknown: the plan gets them with every call."""
    return Workload(
        model,
        args=(None,) * content["args"],
        targets=(None,) * content["targets"],
        loss=loss if loss is not None else (_unknown_loss if content["targets"] else None),
        optimizer=optimizer,
        clip_grad_norm=content["clip_grad_norm"],
        autocast=decode_constant(content["autocast"]),
        name=str(about.get("workload", "")),
    )


def _unknown_loss(*_: Any) -> Tensor:
    raise NotImplementedError("a loaded plan contains its loss; it does not know the function")


def _program(
    graph: Graph, content: Mapping[str, Any], constants: Mapping[int, Tensor], workload: Workload
) -> Program:
    updates = _updates(graph, content, workload)
    return Program(
        graph=graph,
        mode="train" if workload.training else "infer",
        workload=workload,
        names=content["names"],
        gradients=content["gradients"],
        updates=content["updates"],
        result=Result(
            tuple(
                leaf if isinstance(leaf, int) else Constant(decode_constant(leaf[0]))
                for leaf in content["leaves"]
            ),
            pytree.treespec_loads(content["spec"]),
        ),
        binding=_binding(content, constants, workload, updates),
        optimizer=updates,
        opaque=tuple(content["opaque"]),
        rng=content["rng"],
        draws=tuple(content["draws"]),
    )


def _binding(
    content: Mapping[str, Any],
    constants: Mapping[int, Tensor],
    workload: Workload,
    updates: Updates | None,
) -> Binding:
    """The facts of capture, at the addresses of the model that is here."""
    live = {f"{named.role.value}:{named.names[0]}": named.tensor for named in named_tensors(workload)}
    owned = {}
    for name, (encoded, requires_grad) in content["owned"].items():
        if name not in live:
            raise Stale(f"the model has no {name}", remedy="load the plan onto the model it was made for")
        owned[name] = Seen(decode_meta(encoded), address_of(live[name]), requires_grad)
    binding = Binding(
        names=content["names"],
        owned_names=owned,
        inputs={name: decode_meta(meta) for name, meta in content["inputs"].items()},
        leaves={name: decode_constant(leaf) for name, leaf in content["arguments"].items()},
        constants=constants,
        training=content["training"],
        groups=group_members(updates) if updates is not None else (),
        guards=Guards.of(Fingerprint({"model": workload.model, "loss": workload.loss}), workload),
    )
    binding.check(workload, updates)
    _check_attributes(content, workload.model)
    return binding


def _check_attributes(content: Mapping[str, Any], model: nn.Module) -> None:
    """Raises Stale for a model of other classes or numbers: the plan holds those of its own."""
    found = attributes_of(model)
    for name, encoded in content.get("attributes", {}).items():
        then, now = decode_constant(encoded), found.get(name)
        if name not in found or not same(then, now):
            raise Stale(
                f"{name or 'the model'} is {now!r}, the plan was made with {then!r}",
                remedy="build the model as when the plan was made",
            )


def _updates(graph: Graph, content: Mapping[str, Any], workload: Workload) -> Updates | None:
    """The optimizer's classes, which have to compute what the file's update nodes compute."""
    if workload.optimizer is None:
        return None
    named = {id(one.tensor): one.names[0] for one in named_tensors(workload)}
    pairs = [
        (number, Update(named[id(parameter)], parameter))
        for number, group in enumerate(workload.optimizer.param_groups)
        for parameter in group["params"]
        if named.get(id(parameter)) in content["updates"]
    ]
    if len(pairs) != len(content["updates"]):
        raise Stale(
            f"the optimizer updates {len(pairs)} of the plan's {len(content['updates'])} parameters",
            remedy="give it the parameters that it had when the plan was made",
        )
    updates = classify(workload.optimizer, pairs)
    for members in updates.classes:
        for update in members.updates:
            node = graph.node[content["updates"][update.name]]
            if not _same_update(graph, node, members.text):
                raise Stale(
                    f"the optimizer ({type(workload.optimizer).__name__}) updates {update.name} by other "
                    "operators than the plan",
                    remedy="construct it as when the plan was made",
                )
    return updates


def _same_update(graph: Graph, node: Node, text: Any) -> bool:
    if not isinstance(node.op, Fused):
        return False
    metas = [graph.values[value].meta for value in node.inputs]
    state = 2 + len(text.state)
    if len(metas) != state + len(text.numbers):
        return False
    body = body_of(text, metas[0], metas[1], tuple(metas[2:state]))
    return graph_key(body) == graph_key(node.op.body)
