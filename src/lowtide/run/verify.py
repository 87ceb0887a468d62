"""Whether a plan computes eager's numbers: judged on one real step before the plan is handed out.

Problem.  A plan that is wrong by a slice is worse than none.  Two whole models in memory would be the easy
way to compare, and impossible where it matters.

Method.  One step each from the same state and random seed, one after the other, results in files between:

    plan's step       gradients are tapped directly before their update; updated state is kept
    eager's step      loss, outputs, buffers, gradients are compared:
                      max|a - b| / max(max|b|, 1e-3 * G), G the largest gradient entry of the model
    update            eager's optimizer is applied to the plan's own gradients: equal bits, or wrong

Where eager does not fit, the captured graph takes its place, run one operator at a time with what is large in
files (`lowtide.run.spilled`), and the optimizer is applied to one parameter after the other.

Invariants.  No plan passes with another set of gradients, another random state at the end, another tree of
outputs, or a NaN that eager does not have.  Everything is afterwards as it was.

Not done.  Verification at another scale (`scaled`).
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.capture.program import Program
from lowtide.capture.recording import named_tensors
from lowtide.ir.graph import Node, Role
from lowtide.run.eager import Tap
from lowtide.run.native import forward_backward, infer
from lowtide.run.plan import Plan
from lowtide.run.snapshot import Snapshot, Spill, preserved
from lowtide.run.spilled import run_spilled
from lowtide.workload import Workload

__all__ = ["Against", "Verdict", "verify"]

Against = Literal["eager", "reference", "scaled", "none"]

_TOLERANCE = 1e-5
_TOLERANCE_HALF = 1e-2
_GRADIENT_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of one step.

    `worst` names the tensor with `max_rel_error`; `faults` are differences that no tolerance covers.
    """

    max_rel_error: float
    bit_equal: bool
    against: Against = "eager"
    worst: str = ""
    tolerance: float = _TOLERANCE
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the plan may be used."""
        return not self.faults and self.max_rel_error <= self.tolerance

    def explain(self) -> str:
        """One line: why it passed or what differs."""
        if self.faults:
            return "; ".join(self.faults)
        if self.bit_equal:
            return f"bit-equal to {self.against}"
        reach = f"at {self.worst}, tolerance {self.tolerance:.0e}"
        return f"within {self.max_rel_error:.1e} of {self.against} ({reach})"


@dataclass
class _Judge:
    """Collects differences; `floor` is the smallest denominator (1e-3 of the largest gradient entry)."""

    floor: float = 0.0
    error: float = 0.0
    worst: str = ""
    equal: bool = True
    faults: list[str] = field(default_factory=list)

    def compare(self, name: str, ours: Tensor, eager: Tensor) -> None:
        """Note the relative error of one tensor."""
        if ours.shape != eager.shape or ours.dtype != eager.dtype:
            self.faults.append(
                f"{name} is {ours.dtype} {list(ours.shape)}, eager's {eager.dtype} {list(eager.shape)}"
            )
            return
        if bits_equal(ours, eager):
            return
        self.equal = False
        error = relative_error(ours, eager, self.floor)
        if error > self.error or not self.worst:
            self.error, self.worst = max(error, self.error), name

    def demand_bits(self, name: str, ours: Tensor, eager: Tensor) -> None:
        """Equal bits, or a fault."""
        if ours.shape != eager.shape or ours.dtype != eager.dtype or not bits_equal(ours, eager):
            self.faults.append(f"{name} differs from eager's optimizer applied to the plan's gradients")

    def demand(self, holds: bool, fault: str) -> None:
        """A fault unless `holds`."""
        if not holds:
            self.faults.append(fault)

    def verdict(self, tolerance: float, against: Against) -> Verdict:
        """What was found."""
        equal = self.equal and not self.faults
        return Verdict(self.error, equal, against, self.worst, tolerance, tuple(self.faults))


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Equal bits, or NaN in the same places and equal elsewhere (NaNs have many encodings)."""
    return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


def relative_error(ours: Tensor, eager: Tensor, floor: float = 0.0) -> float:
    """``max|a - b| / max(max|b|, floor)``; infinite where one is not finite and the other differs."""
    if not ours.numel():
        return 0.0
    a, b = _as_double(ours), _as_double(eager)
    odd = ~(torch.isfinite(a) & torch.isfinite(b))
    if odd.any() and not torch.allclose(a[odd], b[odd], rtol=0.0, atol=0.0, equal_nan=True):
        return math.inf
    difference = torch.where(odd, 0.0, (a - b).abs()).max().item()
    scale = max(torch.where(odd, 0.0, b.abs()).max().item(), floor)
    return difference / scale if scale else (0.0 if difference == 0.0 else math.inf)


def _as_double(tensor: Tensor) -> Tensor:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.detach().to(torch.float64)


def verify(program: Program, plan: Plan, *, eager_fits: bool = True) -> Verdict:
    """Compare one step of `plan` with eager's on the workload's own arguments, from the present state.

    Unless `eager_fits`, eager is never run: the captured graph is, with large tensors in files.  So too where
    the program draws by counter, as its numbers are not eager's.
    `verdict.passed` says whether the plan may be used.  Raises what either step raises.
    """
    workload, eager_fits = program.workload, eager_fits and not program.draws
    judge = _Judge()
    with tempfile.TemporaryDirectory(prefix="lowtide-") as directory:
        spill = Spill(Path(directory))
        other = _Eager(workload) if eager_fits else _Reference(program, Path(directory))
        check = _check_training if workload.training else _check_inference
        check(plan, workload, spill, judge, other)
    return judge.verdict(_tolerance(program), "eager" if eager_fits else "reference")


class _Eager:
    """The user's own step."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def differentiate(self, spill: Spill) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
        """The loss, and how to get each gradient; they stay in place."""
        loss = forward_backward(self._workload)
        grads = {name: p.grad for name, p in _parameters(self._workload) if p.grad is not None}
        return loss, {name: functools.partial(_same, gradient) for name, gradient in grads.items()}

    def rewind(self, start: Snapshot) -> None:
        """Back to before the update; what the forward has written (a weight that it clamps) stays."""
        start.clear_gradients()

    def infer(self) -> Any:
        """The model's output."""
        return infer(self._workload)

    def update(self, gradients: Mapping[str, Callable[[], Tensor]]) -> None:
        """Eager's optimizer on these gradients, all at once."""
        assert self._workload.optimizer is not None
        for name, parameter in _parameters(self._workload):
            if name in gradients:
                gradient = torch.empty_like(parameter)  # dense and laid out as autograd leaves it
                parameter.grad = gradient.copy_(gradients[name]())
        self._workload.optimizer.step()
        self._workload.optimizer.zero_grad(set_to_none=True)


class _Reference:
    """The captured graph, large tensors in files of `directory`."""

    def __init__(self, program: Program, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._names = {node: name for name, node in program.updates.items()}
        self._changed = _changed_before(program)
        self._spill: Spill | None = None

    def differentiate(self, spill: Spill) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
        """The loss, and how to get each gradient: from a file."""

        def keep(node: Node, operands: Mapping[int, Any]) -> None:
            if node.id in self._names:
                name = self._names[node.id]
                spill.put(f"reference:{name}", operands[node.inputs[1]])
                if name in self._changed:
                    spill.put(f"changed:{name}", operands[node.inputs[0]])

        self._spill = spill
        loss = self._run(keep)
        names = [name for name in self._names.values() if f"reference:{name}" in spill.names()]
        return loss, {name: functools.partial(spill.get, f"reference:{name}") for name in names}

    def rewind(self, start: Snapshot) -> None:
        """Back to before the update; weights that the forward has written are as it left them."""
        start.restore()
        for name, parameter in _parameters(self._program.workload):
            if name in self._changed and self._spill is not None:
                parameter.data.copy_(self._spill.get(f"changed:{name}"))

    def infer(self) -> Any:
        """The model's output."""
        return self._run(None)

    def update(self, gradients: Mapping[str, Callable[[], Tensor]]) -> None:
        """Eager's optimizer on these gradients, one parameter after the other."""
        optimizer = self._program.workload.optimizer
        assert optimizer is not None
        for name, parameter in _parameters(self._program.workload):
            if name in gradients:
                parameter.grad = torch.empty_like(parameter).copy_(gradients[name]())
                optimizer.step()
                parameter.grad = None

    def _run(self, tap: Tap | None) -> Any:
        program, workload = self._program, self._program.workload
        inputs: dict[int, Any] = dict(program.bind(workload.args, workload.kwargs, workload.targets))
        inputs.update(program.scalars())
        outputs = run_spilled(program.graph, inputs, self._directory, tap)
        program.advance()
        return program.result.rebuild({**inputs, **outputs})


_Other = _Eager | _Reference


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _changed_before(program: Program) -> frozenset[str]:
    """Parameters that something other than their update writes."""
    updates, graph = set(program.updates.values()), program.graph
    writers = [node for node in graph if node.id not in updates]
    written = {graph.values[value].storage for node in writers for value in node.writes}
    homes = {name: graph.values[program.names[f"param:{name}"]].storage for name in program.updates}
    return frozenset(name for name, home in homes.items() if home in written)


def _tolerance(program: Program) -> float:
    """By the coarsest element type that the step computes in: a model may enter autocast by itself."""
    dtypes = {value.meta.dtype for value in program.graph.values.values()}
    return _TOLERANCE_HALF if dtypes & {torch.bfloat16, torch.float16} else _TOLERANCE


def _check_training(plan: Plan, workload: Workload, spill: Spill, judge: _Judge, other: _Other) -> None:
    with preserved(workload) as start:
        loss = plan.step_tapped(
            workload.args, workload.kwargs, workload.targets, lambda name, g: spill.put(f"grad:{name}", g)
        )
        random_state = torch.get_rng_state()
        for name, tensor in (*_owned(workload), *_state(workload)):
            spill.put(name, tensor)
        homes = {p.untyped_storage().data_ptr() for _, p in _parameters(workload)}
        shared = {name for name, b in _buffers(workload) if b.untyped_storage().data_ptr() in homes}
        start.restore()
        _compare_gradients(spill, judge, loss, other)
        judge.demand(
            torch.equal(random_state, torch.get_rng_state()), "the random generator ends in another state"
        )
        for name, tensor in _buffers(workload):
            if name not in shared:  # else the update has changed it
                judge.compare(name, spill.get(name), tensor)
        other.rewind(start)
        _check_update(workload, spill, judge, other)


def _compare_gradients(spill: Spill, judge: _Judge, loss: Tensor, other: _Other) -> None:
    """Run the other's forward and backward, and compare."""
    eager_loss, eager = other.differentiate(spill)
    judge.floor = _GRADIENT_FLOOR * max((_largest(g()) for g in eager.values()), default=0.0)
    judge.compare("loss", loss, eager_loss)
    ours = {name.removeprefix("grad:") for name in spill.names() if name.startswith("grad:")}
    for name in sorted(ours ^ eager.keys()):
        judge.faults.append(f"{'only the plan' if name in ours else 'only eager'} has a gradient of {name}")
    for name in sorted(ours & eager.keys()):
        judge.compare(f"gradient of {name}", spill.get(f"grad:{name}"), eager[name]())


def _check_update(workload: Workload, spill: Spill, judge: _Judge, other: _Other) -> None:
    """Apply eager's optimizer to the plan's gradients and compare with what the plan's update left."""
    kept = set(spill.names())
    ours = [name.removeprefix("grad:") for name in kept if name.startswith("grad:")]
    other.update({name: functools.partial(spill.get, f"grad:{name}") for name in ours})
    found = dict((*_parameters(workload, prefix="param:"), *_state(workload)))
    for name in sorted(found.keys() ^ {n for n in kept if n.startswith(("param:", "state:"))}):
        judge.faults.append(f"{name} exists on one side only")
    for name in sorted(found.keys() & kept):
        judge.demand_bits(name, spill.get(name), found[name])


def _check_inference(plan: Plan, workload: Workload, spill: Spill, judge: _Judge, other: _Other) -> None:
    with preserved(workload) as start:
        leaves, spec = pytree.tree_flatten(plan(*workload.args, **workload.kwargs))
        random_state = torch.get_rng_state()
        tensors = {index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for index in tensors:
            spill.put(f"output:{index}", leaves[index])
            leaves[index] = None
        for name, tensor in _owned(workload):
            spill.put(name, tensor)
        start.restore()
        theirs, their_spec = pytree.tree_flatten(other.infer())
        if spec != their_spec:
            judge.faults.append(f"the output is {spec}, eager's {their_spec}")
            return
        for index, leaf in enumerate(theirs):
            if index in tensors and isinstance(leaf, Tensor):
                judge.compare(f"output {index}", spill.get(f"output:{index}"), leaf)
            else:
                judge.demand(leaf is leaves[index] or leaf == leaves[index], f"output {index} differs")
        judge.demand(
            torch.equal(random_state, torch.get_rng_state()), "the random generator ends in another state"
        )
        for name, tensor in _owned(workload):
            judge.compare(name, spill.get(name), tensor)


def _parameters(workload: Workload, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Parameters by the name that capture gives them (one of its names, if it is shared)."""
    for named in named_tensors(workload):
        if named.role is Role.PARAM:
            yield prefix + named.names[0], named.tensor


def _buffers(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    for named in named_tensors(workload):
        if named.role is not Role.PARAM:
            yield f"buffer:{named.names[0]}", named.tensor


def _owned(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    yield from _parameters(workload, prefix="param:")
    yield from _buffers(workload)


def _state(workload: Workload) -> Iterator[tuple[str, Tensor]]:
    assert workload.optimizer is not None
    names = {id(parameter): name for name, parameter in _parameters(workload)}
    for parameter, entries in workload.optimizer.state.items():
        for key, entry in entries.items():
            if isinstance(entry, Tensor):
                yield f"state:{names.get(id(parameter), 'a foreign parameter')}:{key}", entry


def _largest(tensor: Tensor) -> float:
    finite = torch.nan_to_num(_as_double(tensor), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max().item()) if tensor.numel() else 0.0
