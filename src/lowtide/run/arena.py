"""The arena executor: a program as a flat list of prepared steps over one block of memory.

Problem.  A plan's peak has to hold when it runs, to the byte, and running it may not cost more than the
operators do.

Method.  One arena is allocated when the program first runs and stays.  Every value that nobody outside
sees is a window on it at its planned offset; results of the graph are fresh tensors per call.  Operators
write into place by their out= variant, through the allocation hook, or (last resort) by a copy; see
`lowtide.run.steps` and `docs/design/arena.md`.  A call refreshes the moving operands (arguments, host
scalars, parameters whose memory moved), runs the steps under inference mode, and hands out the results.

Invariants.  Random nodes draw from PyTorch's own generator in program order.  Results never view the
arena.  Nothing of the caller's arguments is kept after a call.
If a step raises, the exception carries a note with node, module and source line; results are lost, and
what earlier steps wrote into the caller's tensors (updates, statistics) stays written.

With `poison`, arena and results are filled with 0xFF (NaN, -1) before the first step, and every Buffer
again after its last use: a step that reads what is gone computes NaN instead of a plausible number.

Not done.  Concurrency: `Plan` holds a lock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lowtide.ir.graph import Graph, Node, Role, TensorMeta
from lowtide.ir.ops import Aten, Ref
from lowtide.run.allocator import Hook
from lowtide.run.bindings import Bindings, Window, fresh_output
from lowtide.run.calls import prepare_call
from lowtide.run.derived import Derivation, Upkeep, arena_size, sources_of
from lowtide.run.kernels import NO_KERNELS, Kernels, Setup
from lowtide.run.layout import Layout, Location
from lowtide.run.lower import Builder, Scope, lower_graph, program_scope
from lowtide.run.probe import FactsTree
from lowtide.run.steps import Draft, Prepared, Trail, Watch, finish
from lowtide.run.temps import align

__all__ = ["ArenaExecutor", "Tap", "describe_node"]

Tap = Callable[[], None]

_POISON = 0xFF


class ArenaExecutor:
    """Runs `graph` in `order` with the storages where `layout` says.

    `facts` are the arena facts of the program and its bodies; `hook` None copies what has no out= variant;
    fused nodes whose bodies have no facts run as `kernels`.  What `derivation` says is kept in the arena.
    Nothing is allocated before the first call of `run`.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[int],
        facts: FactsTree,
        layout: Layout,
        hook: Hook | None,
        poison: bool = False,
        *,
        kernels: Kernels = NO_KERNELS,
        derivation: Derivation | None = None,
    ) -> None:
        self.graph = graph
        self.order = tuple(order)
        self.layout = layout
        self._facts = facts
        self._hook = hook
        self._poison = poison
        self._derivation = derivation
        self._derived = derivation.placed(layout) if derivation else {}
        self._scope: Scope = program_scope(graph, layout, self.order, self._derived)
        self._arguments = [v for v in graph.inputs if graph.storage_of(v).role is Role.INPUT]
        self._results = [(value, self._scope.window(value)) for value in graph.outputs]
        self._slot_metas = _slot_metas(graph, layout)
        self._bindings: Bindings | None = None
        self._prepared: Prepared | None = None
        self._upkeep: Upkeep | None = None
        self._kernels = kernels

    def prepare(self) -> tuple[Bindings, Prepared]:
        """Allocate the arena and build the steps, the first time."""
        if self._bindings is None or self._prepared is None:
            nbytes = arena_size(self.layout, self._derivation)
            # Made here, not in inference mode, so that nobody is surprised by where it can be used.
            arena = self._hook.new_arena(nbytes) if self._hook else torch.empty(nbytes, dtype=torch.uint8)
            self._bindings = Bindings(arena)
            with torch.inference_mode():
                self._prepared = self._build(self._bindings)
        return self._bindings, self._prepared

    def release(self) -> None:
        """Give the arena back; the next call of `run` prepares again."""
        self._bindings = self._prepared = self._upkeep = None

    def refresh(self) -> None:
        """Make what is derived from the caller's weights anew in the next call."""
        if self._upkeep is not None:
            self._upkeep.forget()

    def run(
        self,
        residents: Mapping[int, Tensor],
        scalars: Mapping[int, float],
        taps: Mapping[int, Tap] | None = None,
        watch: Watch | None = None,
    ) -> dict[int, Tensor]:
        """One call.  Returns the graph's outputs by value id.

        `residents` are the caller's tensors and `scalars` the host scalars by value id; `taps[n]` is called
        directly before node n runs and may look at values with `peek`.  `watch` is filled with every step's
        times.
        """
        bindings, prepared = self.prepare()
        outputs = self._fresh_outputs()
        bindings.set_numbers(scalars)
        try:
            with _undisturbed():
                bindings.set_residents(residents)
                bindings.set_outputs(outputs)
                self._keep_up(residents)
                self._run_steps(bindings, prepared, outputs, taps or {}, watch)
            with torch.no_grad():
                return {value: _result(bindings, where, residents) for value, where in self._results}
        finally:
            bindings.release(self._arguments)

    def time_runs(
        self, residents: Mapping[int, Tensor], scalars: Mapping[int, float], count: int
    ) -> list[float]:
        """Seconds of the bare steps of `count` runs, one after the other."""
        bindings, prepared = self.prepare()
        outputs = self._fresh_outputs()
        bindings.set_numbers(scalars)
        times: list[float] = []
        with _undisturbed():
            bindings.set_residents(residents)
            bindings.set_outputs(outputs)
            self._keep_up(residents)
            for _ in range(count):
                with _serving(prepared, bindings.arena, outputs):
                    start = time.perf_counter()
                    for run in prepared.runs:
                        run()
                    times.append(time.perf_counter() - start)
        return times

    def peek(self, value: int) -> Tensor:
        """The tensor of `value` as it is now; for taps, valid until the next step."""
        bindings, _ = self.prepare()
        return bindings.tensor(self._scope.window(value))

    @property
    def table_counts(self) -> tuple[int, int, int]:
        """Requests served, missed, and bytes missed, since the executor was prepared."""
        table = self._prepared.table if self._prepared else None
        return (table.served, table.missed, table.missed_bytes) if table else (0, 0, 0)

    @property
    def step_count(self) -> int:
        """Prepared steps per call."""
        return len(self.prepare()[1].runs)

    @property
    def steps(self) -> Sequence[tuple[Trail, str]]:
        """Per prepared step, where it comes from and the operator by which it merges (else empty)."""
        prepared = self.prepare()[1]
        return tuple(zip(prepared.trails, prepared.merges, strict=True))

    def _fresh_outputs(self) -> list[Tensor]:
        with torch.no_grad():
            return [
                fresh_output(buffer.nbytes, meta)
                for buffer, meta in zip(self.layout.slots, self._slot_metas, strict=True)
            ]

    def _build(self, bindings: Bindings) -> Prepared:
        kept = self._derivation.nodes_at(self.layout) if self._derivation else {}
        builder = Builder(bindings, self._facts, kernels=self._kernels, kept=kept)
        if self._poison:
            builder.drafts.extend(_fill(bindings, *each) for each in _everything(self.layout))
            builder.mark(())
        dying = _dying_at(self.layout) if self._poison else {}

        def after(step: int) -> None:
            builder.drafts.extend(_fill(bindings, *each) for each in dying.get(step, ()))

        lower_graph(self._scope, self.order, builder, after)
        if self._derivation is not None:
            self._upkeep = self._upkeep_of(self._derivation, bindings, builder.setups)
        return finish(builder.drafts, self._hook, 1 + len(self.layout.slots), builder.trails)

    def _upkeep_of(self, derivation: Derivation, bindings: Bindings, setups: Mapping[int, Setup]) -> Upkeep:
        order = [each for each in derivation.sequence if each >= 0]
        builder = Builder(bindings, derivation.facts)
        scope = program_scope(derivation.graph, derivation.layout, derivation.sequence, self._derived)
        counts: list[int] = []
        lower_graph(scope, order, builder, lambda step: counts.append(len(builder.drafts)))
        prepared = finish(builder.drafts, self._hook, 1, builder.trails)
        runs = _interleaved(derivation.sequence, prepared, counts, setups)

        def make() -> None:
            with _serving(prepared, bindings.arena, ()):
                for run in runs:
                    run()

        sources = sources_of(self.graph, derivation, self._kernels)
        spans = [self.graph.values[value].meta.span_bytes for value in sources]
        return Upkeep(sources, spans, make, self._hook)

    def _keep_up(self, residents: Mapping[int, Tensor]) -> None:
        if self._upkeep is not None:
            self._upkeep.refresh(residents)

    def _run_steps(
        self,
        bindings: Bindings,
        prepared: Prepared,
        outputs: Sequence[Tensor],
        taps: Mapping[int, Tap],
        watch: Watch | None,
    ) -> None:
        with _serving(prepared, bindings.arena, outputs):
            try:
                if taps:
                    _run_tapped(prepared, taps)
                elif watch is not None:
                    _run_watched(prepared, watch)
                else:
                    for run in prepared.runs:
                        run()
            except Exception as error:
                error.add_note(self._where(prepared))
                raise

    def _where(self, prepared: Prepared) -> str:
        number = prepared.cell.value
        if not number:
            return "in Lowtide, before the first step"
        node = self.graph.node.get(prepared.nodes[number - 1])
        place = describe_node(node) if node else "a fill of the arena"
        return f"in step {number} of {len(prepared.runs)}: {place}; earlier steps stay done, results are lost"


def _interleaved(
    sequence: Sequence[int], prepared: Prepared, counts: Sequence[int], setups: Mapping[int, Setup]
) -> list[Callable[[], object]]:
    """The steps of the preparation, node k's up to `counts[k]`, and the kernels' packing in turn."""
    runs: list[Callable[[], object]] = []
    done = node = 0
    for each in sequence:
        if each < 0:
            runs.append(setups[-1 - each])
            continue
        runs += prepared.runs[done : counts[node]]
        done, node = counts[node], node + 1
    return runs


def describe_node(node: Node) -> str:
    """``node 12 (aten.mm.default) of enc.0, at model.py:31``."""
    operation = node.op.overload if isinstance(node.op, Aten) else type(node.op).__name__
    module = f" of {node.origin.module}" if node.origin.module else ""
    source = f", at {node.origin.source}" if node.origin.source else ""
    return f"node {node.id} ({operation}){module}{source}"


def _run_tapped(prepared: Prepared, taps: Mapping[int, Tap]) -> None:
    before = {prepared.first_of[node]: tap for node, tap in taps.items() if node in prepared.first_of}
    for position, run in enumerate(prepared.runs):
        if position in before:
            prepared.cell.value = 0
            before[position]()
        run()


def _run_watched(prepared: Prepared, watch: Watch) -> None:
    clock = time.perf_counter_ns
    for run in prepared.runs:
        start = clock()
        copied = run()
        watch.append((start, clock(), copied or 0))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Inference mode without autocast, and no garbage collection in the middle of an operator.

    A finaliser that runs between announcing a step and its operator could take the step's place in the arena.
    """
    collecting = gc.isenabled()
    autocast: Any = nullcontext()
    if torch.is_autocast_enabled("cpu"):  # the graph already holds autocast's conversions
        autocast = torch.autocast("cpu", enabled=False)
    gc.disable()
    try:
        with torch.inference_mode(), autocast:
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _serving(prepared: Prepared, arena: Tensor, outputs: Sequence[Tensor]) -> Iterator[None]:
    """The hook answers this thread from the program's table."""
    table = prepared.table
    if table is None:
        prepared.cell.value = 0
        yield
        return
    slots = [(arena.data_ptr(), arena.numel())]
    slots += [(output.data_ptr(), output.untyped_storage().nbytes()) for output in outputs]
    token = table.enter(slots)
    try:
        yield
    finally:
        table.leave(token)
    if table.kept_step:
        raise RuntimeError(
            f"the operator of node {prepared.nodes[table.kept_step - 1]} kept a temporary of its own in the "
            "arena; its facts are wrong: delete Lowtide's profile cache and make the plan again"
        )


def _slot_metas(graph: Graph, layout: Layout) -> list[TensorMeta]:
    """Per output slot the meta of a result that views it."""
    of_storage = {graph.values[v].storage: graph.values[v].meta for v in reversed(graph.outputs)}
    raw = TensorMeta((0,), (1,), torch.uint8)
    return [next((of_storage[s] for s in buffer.storages if s in of_storage), raw) for buffer in layout.slots]


def _result(bindings: Bindings, where: Window, residents: Mapping[int, Tensor]) -> Tensor:
    if where.location.kind == "resident":
        return bindings.derive(where, residents[where.location.index])
    return bindings.tensor(where)


def _everything(layout: Layout) -> list[tuple[Location, int]]:
    """The arena and every output slot, with their bytes."""
    slots = [(Location("output", k), buffer.nbytes) for k, buffer in enumerate(layout.slots, start=1)]
    return [(place, nbytes) for place, nbytes in [(Location("arena"), layout.nbytes), *slots] if nbytes]


def _dying_at(layout: Layout) -> dict[int, list[tuple[Location, int]]]:
    """Step -> the places and bytes of the Buffers whose last use it is."""
    found: dict[int, list[tuple[Location, int]]] = {}
    for buffer in layout.buffers:
        place = layout.place(buffer.id)
        if place is None or not buffer.nbytes:  # a result, or temporaries, whose bytes may be a result's
            continue
        whole = layout.slots[place.index - 1].nbytes if place.kind == "output" else layout.nbytes
        room = whole - place.offset_bytes
        found.setdefault(buffer.stop - 1, []).append((place, min(align(buffer.nbytes), room)))
    return found


def _fill(bindings: Bindings, place: Location, nbytes: int) -> Draft:
    """A step that makes a range of bytes unreadable."""
    call = prepare_call(Aten("aten.fill_.Scalar", (Ref(0), _POISON)))
    for container, key in call.places[0]:
        bindings.place(Window(place, TensorMeta((nbytes,), (1,), torch.uint8)), container, key)
    return Draft(-1, call)
