"""A plan: a captured step with an order, a placement and an executor; what the user calls.

Problem.  Between the search's result and the user stand the user's own objects: arguments by name,
gradients that must not be there, a learning rate that changed, two threads.

Method.  `build_plan` probes the graph's operators, lays out its Buffers, and wraps the arena executor.
A call binds the caller's tensors through the program (which raises ShapeMismatch or Stale), runs the steps,
and rebuilds the user's result.  The recipe (graph, order, facts, layout) is frozen; the executor allocates
its arena at the first call.

Invariants.  ``predicted_peak_bytes == resident + arena + outputs + what cannot be placed``.  One call at a
time: others wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.analysis.facts import Facts, workspace_bytes
from lowtide.analysis.timeline import Timeline, timeline
from lowtide.capture.program import Program
from lowtide.capture.recording import named_tensors
from lowtide.errors import UsageError
from lowtide.ir.graph import Graph, Node, Role
from lowtide.ir.ops import Fission, Fused
from lowtide.place.problem import Placement
from lowtide.run.allocator import Hook, load_hook
from lowtide.run.arena import ArenaExecutor, Tap
from lowtide.run.derived import Derivation, arena_size, derivation_of, packed_by
from lowtide.run.events import peak_bytes, record_with_profiler
from lowtide.run.kernels import NO_KERNELS, KernelCall, Kernels, kernel_of
from lowtide.run.layout import Layout, lay_out
from lowtide.run.probe import FactsTree, probe_tree
from lowtide.run.probe import Path as FactsPath
from lowtide.run.steps import Watch
from lowtide.run.store import ProfileStore
from lowtide.run.unplaced import unplaced_bytes
from lowtide.run.watching import StepRun, step_runs
from lowtide.schedule.schedule import Schedule

HERE = "cpu"
"""The device of plans that run on this machine."""

Look = Callable[[str, Tensor], None]

__all__ = ["Allocations", "Plan", "Recipe", "build_plan", "update_nodes"]


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a plan does: everything that is saved.

    `unplaced_bytes` is the most that one operator takes beside arena and results, `bookkeeping_bytes` what
    re-reading the optimizer's numbers takes before the first operator runs, `moves` counts the applied
    transformations by kind, `rules` the algebraic ones by rule.  `derivation` is what is kept beside the
    caller's weights.  `device` is the one that the plan is for.
    """

    graph: Graph
    order: tuple[int, ...]
    facts: FactsTree
    layout: Layout
    unplaced_bytes: int = 0
    bookkeeping_bytes: int = 0
    moves: tuple[tuple[str, int], ...] = ()
    device: str = HERE
    derivation: Derivation | None = None
    rules: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Allocations:
    """Allocator requests of one call: answered from the arena, or not (and then their bytes together)."""

    served: int
    missed: int
    missed_bytes: int


class Plan:
    """A step that runs within its predicted peak.

    `plan(*args, **kwargs)` runs an inference; `plan.step(*args, *targets, **kwargs)` a training step.
    """

    def __init__(
        self,
        program: Program,
        recipe: Recipe,
        hook: Hook | None = None,
        *,
        kernels: Kernels = NO_KERNELS,
        poison: bool = False,
    ) -> None:
        self.program = program
        self.recipe = recipe
        self.hook = hook
        self.kernels = kernels
        self._poison = poison
        self._lock = threading.Lock()
        self._executor = self._execute(recipe)
        self._updates = update_nodes(program, recipe.graph)

    # -- running --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these arguments.

        Raises ShapeMismatch, Stale, UsageError (the plan is of a training step).
        """
        if self.program.mode != "infer":
            raise UsageError("this plan is a training step", remedy="call plan.step(*args, *targets)")
        return self._run(args, kwargs, ())

    def step(self, *args: Any, keep_grads: bool = False, **kwargs: Any) -> Any:
        """One training step: the model's arguments, then the loss's targets.  Returns the loss, detached.

        Parameters, buffers and optimizer state are updated in place; gradients stay None, or are left in
        `p.grad` with `keep_grads`.  Raises ShapeMismatch, Stale, UsageError (inference; `p.grad` is set).
        """
        if self.program.mode != "train":
            raise UsageError("this plan is an inference", remedy="call plan(*args)")
        self._check_gradients()
        count = len(self.program.workload.args)
        if not keep_grads:
            return self._run(args[:count], kwargs, args[count:])
        return self._run_keeping(args[:count], kwargs, args[count:])

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        targets: tuple[Any, ...],
        taps: Mapping[int, Tap] | None = None,
        watch: Watch | None = None,
    ) -> Any:
        self._check_here()
        with self._lock:
            residents = self.program.bind(args, kwargs, targets)
            outputs = self._executor.run(residents, self.program.scalars(), taps, watch)
            self.program.advance()
        mine, theirs = self.graph.outputs, self.program.graph.outputs
        named = {old: outputs[new] for old, new in zip(theirs, mine, strict=True)}
        return self.program.result.rebuild({**residents, **named})

    def _run_keeping(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> Any:
        kept: dict[str, Tensor] = {}

        def keep(name: str, gradient: Tensor) -> None:
            with torch.inference_mode(False):  # the user may compute with it
                kept[name] = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype)
            kept[name].copy_(gradient)

        result = self.step_tapped(args, kwargs, targets, keep)
        for named in named_tensors(self.program.workload):
            if named.role is Role.PARAM:
                named.tensor.grad = kept.get(named.names[0])
        return result

    def step_tapped(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...], look: Look
    ) -> Any:
        """A training step that shows `look(name, gradient)` every gradient directly before its update.

        What it is shown lies in the arena: it may be read until `look` returns.
        """
        return self._run(args, kwargs, targets, self._gradient_taps(look))

    def watched(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
    ) -> tuple[StepRun, ...]:
        """Run once, timing every prepared step."""
        watch: Watch = []
        self._run(args, kwargs, targets, watch=watch)
        return step_runs(watch, self._executor.steps)

    def _gradient_taps(self, look: Look) -> dict[int, Tap]:
        taps: dict[int, Tap] = {}
        for name, node_id in self._updates.items():
            gradient = self.graph.node[node_id].inputs[1]
            taps[node_id] = functools.partial(self._show, look, name, gradient)
        return taps

    def _show(self, look: Look, name: str, gradient: int) -> None:
        look(name, self._executor.peek(gradient))

    def _check_here(self) -> None:
        if self.recipe.device != HERE:
            raise UsageError(
                f"this plan was made for {self.recipe.device}, from predictions, and cannot run here",
                remedy="make a plan without a device to run on this machine",
            )

    def _check_gradients(self) -> None:
        for named in named_tensors(self.program.workload):
            if named.tensor.grad is not None:
                raise UsageError(
                    f"parameter {named.names[0]} already has a gradient",
                    remedy="call optimizer.zero_grad(set_to_none=True) before plan.step",
                )

    # -- looking --------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The program as it runs, with every applied transformation."""
        return self.recipe.graph

    @property
    def schedule(self) -> Schedule:
        """The order of its nodes."""
        return Schedule(self.recipe.order)

    @property
    def placement(self) -> Placement:
        """Arena offsets by the id of Buffers and of pieces of workspace."""
        return Placement(self.recipe.layout.offsets, self.recipe.layout.nbytes)

    @property
    def facts(self) -> Facts:
        """What its operators allocate, as the arena executor runs them."""
        return self.recipe.facts[()]

    @property
    def timeline(self) -> Timeline:
        """Live bytes per step, in-place reuse included."""
        return timeline(self.graph, self.recipe.order, self.facts, inplace=True)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, with what is kept in it."""
        return arena_size(self.recipe.layout, self.recipe.derivation)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the arena that hold weights derived from the caller's."""
        return self.recipe.derivation.nbytes if self.recipe.derivation else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the caller's tensors."""
        return self.graph.resident_bytes - _derived_bytes(self.recipe)

    @property
    def predicted_peak_bytes(self) -> int:
        """Resident bytes, arena, results, and what cannot be placed."""
        fresh_bytes = self.recipe.layout.output_bytes + self.recipe.unplaced_bytes
        return self.resident_bytes + self.arena_bytes + max(fresh_bytes, self.recipe.bookkeeping_bytes)

    @property
    def hidden_bytes(self) -> int:
        """The most that one operator takes outside the allocator: only the kernel's count shows it."""
        return max((facts.hidden_bytes for facts in self.facts.values()), default=0)

    @property
    def moves(self) -> dict[str, int]:
        """Applied transformations by kind."""
        return dict(self.recipe.moves)

    def save(self, path: str | Path) -> None:
        """Write the plan to one file, without the model; see `lowtide.run.saved`."""
        from lowtide.run.saved import save_plan  # it knows plans, so it cannot be imported above

        save_plan(self, path)

    def use_kernels(self, kernels: Kernels) -> None:
        """Run fused bodies as these kernels (`lowtide.fusion.kernels`) from the next call on, others unfused.

        Where the recipe was laid out for other kernels, for none, or for another number of threads, the arena
        is laid out anew; its size may change.
        """
        with self._lock:
            if not _suits(self.recipe, kernels):
                self.recipe = _laid_out_again(self.recipe, kernels, self.hook)
            self.kernels = kernels
            self._executor = self._execute(self.recipe)

    def _execute(self, recipe: Recipe) -> ArenaExecutor:
        return ArenaExecutor(
            recipe.graph,
            recipe.order,
            recipe.facts,
            recipe.layout,
            self.hook,
            self._poison,
            kernels=self.kernels,
            derivation=recipe.derivation,
        )

    def refresh(self) -> None:
        """Make weights that are derived from the model's anew in the next call.

        Only needed where a few elements of a large weight were changed behind PyTorch's back (`p.data`,
        NumPy): every other change is noticed.
        """
        with self._lock:
            self._executor.refresh()

    def release(self) -> None:
        """Give the arena back; the next call allocates it again."""
        with self._lock:
            self._executor.release()

    @property
    def step_count(self) -> int:
        """Prepared steps per call."""
        return self._executor.step_count

    def count_allocations(self, *args: Any, **kwargs: Any) -> Allocations:
        """Run once (`step` or call) and count the allocator requests of its operators."""
        before = self._executor.table_counts
        self.step(*args, **kwargs) if self.program.mode == "train" else self(*args, **kwargs)
        after = self._executor.table_counts
        return Allocations(*(now - then for now, then in zip(after, before, strict=True)))


def update_nodes(program: Program, graph: Graph) -> dict[str, int]:
    """Parameter name -> its update node in `graph` (an edited form of the program's graph)."""
    names = {program.names[f"param:{name}"]: name for name in program.updates}
    return {
        names[node.inputs[0]]: node.id
        for node in graph.nodes
        if isinstance(node.op, Fused) and node.op.kind == "update"
    }


def build_plan(
    program: Program,
    graph: Graph | None = None,
    order: Sequence[int] | None = None,
    *,
    placement: Placement | None = None,
    facts: FactsTree | None = None,
    moves: Mapping[str, int] | None = None,
    hook: Hook | None = None,
    store: ProfileStore | None = None,
    poison: bool = False,
    device: str = HERE,
    kernels: Kernels = NO_KERNELS,
    derivation: Derivation | None = None,
    rules: Mapping[str, int] | None = None,
) -> Plan:
    """A plan that runs `graph` (default: as captured) in `order` (default: program order).

    `placement` gives arena offsets by block id of ``placement_problem(graph, order, facts[()])``; greedy if
    absent.  `facts` are probed if absent, and remembered in `store`.  `hook` defaults to the
    process's hook.  `poison` fills dead memory after each step: slow, for tests.
    Fused nodes run as `kernels` where there is one, else call by call.
    `derivation` makes the inputs of `graph` that are not the program's, and what kernels keep; `rules` counts
    the algebraic rules that were applied.
    A plan for another `device` needs `facts`, and is only for looking at.
    """
    graph = program.graph if graph is None else graph
    hook = hook or load_hook()
    steps = tuple(node.id for node in graph.nodes) if order is None else tuple(order)
    if facts is None:
        tree: FactsTree = probe_tree(graph, "arena", store=store, hook=hook, kernels=kernels)
    else:
        tree = facts
    recipe = Recipe(
        graph=graph,
        order=steps,
        facts=tree,
        layout=lay_out(graph, steps, tree[()], placement),
        unplaced_bytes=unplaced_bytes(graph, tree, derivation, hook, store),
        bookkeeping_bytes=_bookkeeping_bytes(program) if device == HERE else 0,
        moves=tuple(sorted((moves or {}).items())),
        device=device,
        derivation=derivation,
        rules=tuple(sorted((rules or {}).items())),
    )
    return Plan(program, recipe, hook, kernels=kernels, poison=poison)


def _derived_bytes(recipe: Recipe) -> int:
    """Bytes of the graph's inputs that lie in the arena."""
    derived = recipe.derivation.storages if recipe.derivation else ()
    storages = recipe.graph.storages
    return sum(storages[storage].nbytes for storage in derived if storage in storages)


def _suits(recipe: Recipe, kernels: Kernels) -> bool:
    """Whether every fused node has the room that it takes with these kernels."""

    def suits(graph: Graph, path: FactsPath) -> bool:
        facts = recipe.facts[path]
        for node in graph.nodes:
            inside = (*path, node.id)
            if isinstance(node.op, Fused):
                kernel = kernel_of(node.op, kernels)
                if (kernel is None) != (inside in recipe.facts):
                    return False
                if kernel is not None and not _has_room(graph, node, facts, kernel):
                    return False
            elif isinstance(node.op, Fission):
                bodies = enumerate(node.op.bodies)
                if not all(suits(body, (*inside, number)) for number, body in bodies):
                    return False
        return True

    packed = recipe.derivation.packed if recipe.derivation else ()
    return packed == packed_by(recipe.graph, kernels) and suits(recipe.graph, ())


def _has_room(graph: Graph, node: Node, facts: Facts, kernel: KernelCall) -> bool:
    scratch = kernel.scratch_bytes <= workspace_bytes(graph, node, facts)
    return scratch and set(facts[node.id].inplace) <= set(kernel.inplace)


def _laid_out_again(recipe: Recipe, kernels: Kernels, hook: Hook | None) -> Recipe:
    """The recipe with facts and places as these kernels (and no others) need them."""
    tree = probe_tree(recipe.graph, "arena", hook=hook, kernels=kernels)
    layout = lay_out(recipe.graph, recipe.order, tree[()])
    preparation = recipe.derivation.graph if recipe.derivation else None
    derivation = derivation_of(recipe.graph, preparation, kernels, hook=hook)
    beside = unplaced_bytes(recipe.graph, tree, derivation, hook, None) if hook else recipe.unplaced_bytes
    return replace(recipe, facts=tree, layout=layout, unplaced_bytes=beside, derivation=derivation)


def _bookkeeping_bytes(program: Program) -> int:
    with torch.random.fork_rng(devices=[]):  # keys of draws by counter are drawn
        _, log = record_with_profiler(program.scalars, before=program.scalars)
    return peak_bytes(log)
