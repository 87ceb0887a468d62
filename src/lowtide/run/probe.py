"""Facts about operators, by running each distinct one once with made-up operands.

Problem.  What an operator allocates is not in its schema: workspaces, storages larger than the result,
temporaries for a Python number.  A predicted peak that is true to the byte needs them, and serving an
operator from planned addresses needs its exact sequence of requests.

Method.  Nodes with equal keys (operator, arguments, operand windows) are one measurement, kept on disk.
The operator runs twice to warm up and once under the allocator's log: blocks that back a result are
outputs, blocks that were released are temporaries.  A further run watches the process's high-water mark
for memory that the allocator does not see.

  reference   the call as the reference executor makes it: everything comes from the allocator;
  arena       as the arena executor makes it: results in place (out= variant) or served by the hook,
              temporaries in the arena as well.  `variant_of` reads from the facts
              which of the two it is, so that executor and probe cannot disagree;
  assumed     nothing runs: what the graph implies, for a device that is not here.

Fused nodes follow from their kernels, or like Fissions from their bodies.  The random generator is left as
it was.

Invariant.  Never more than one node's operands and results exist.
Not done.  Swap nodes (assumed from the graph); operators that fail on made-up operands are
assumed too, with a warning.  The arena executor lets an operator whose facts are assumed allocate where it
likes, and copies: neither its requests nor whether its out= form keeps the outputs is known.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from lowtide.analysis.facts import Facts, OperatorFacts, Temp, assumed_facts, fresh_outputs
from lowtide.analysis.key import node_key
from lowtide.analysis.parts import body_as_run, deliveries
from lowtide.analysis.timeline import timeline
from lowtide.ir.aten import tensors_of
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Fission, Fused
from lowtide.ir.random import is_random
from lowtide.run.allocator import Hook, load_hook
from lowtide.run.calls import Call, out_variant, prepare_call, prepare_out_call, written_out
from lowtide.run.events import Block, Log, blocks_of, peak_bytes, record_with_hook, record_with_profiler
from lowtide.run.kernels import NO_KERNELS, Kernels, kernel_of
from lowtide.run.layout import lay_out
from lowtide.run.operands import make_operands, window
from lowtide.run.resident import NOISE_BYTES, high_water
from lowtide.run.store import ProfileStore, machine_key
from lowtide.run.temps import ALIGNMENT, HELD, align, held_bytes

__all__ = [
    "FactsTree",
    "How",
    "Path",
    "Variant",
    "parse_facts",
    "print_facts",
    "probe",
    "probe_tree",
    "variant_of",
]

Path = tuple[int, ...]
FactsTree = Mapping[Path, Facts]
"""Facts of the program under (), of the body of fused node n under (n,), of body b of Fission n under (n, b),
and so on inwards.  A fused node whose body has none runs as a compiled kernel."""

How = Literal["reference", "arena", "assumed"]
Variant = Literal["out", "served", "copied"]


def variant_of(op: Aten, facts: OperatorFacts) -> Variant:
    """How the arena executor runs `op`: into given outputs, served by the hook, or copied into place."""
    if written_out(op.overload):
        return "out"
    if facts.assumed:
        return "copied"
    if any(target >= 0 for _, target in facts.sequence):
        return "served"
    copied = any(temp.stop == HELD for temp in facts.temps)
    return "copied" if copied or out_variant(op.overload) is None else "out"


def probe(
    graph: Graph,
    how: How = "reference",
    *,
    store: ProfileStore | None = None,
    hook: Hook | None = None,
    kernels: Kernels = NO_KERNELS,
) -> dict[int, OperatorFacts]:
    """Facts of every node of `graph`; measured once per node key, threads, PyTorch version, processor.

    `store` defaults to the user's cache and `hook` to the process's hook.  Fused nodes run as `kernels` where
    there is one (arena only), else call by call.
    """
    prober = _Prober(how, store or ProfileStore.default(), hook or load_hook(), kernels)
    return prober.facts_of(graph)


def probe_tree(
    graph: Graph,
    how: How = "arena",
    *,
    store: ProfileStore | None = None,
    hook: Hook | None = None,
    kernels: Kernels = NO_KERNELS,
) -> dict[Path, Facts]:
    """`probe` of the graph and of every body in it; a body that runs as a kernel has no facts of its own."""
    prober = _Prober(how, store or ProfileStore.default(), hook or load_hook(), kernels)
    found: dict[Path, Facts] = {}
    _probe_into(found, prober, graph, ())
    return found


def _probe_into(found: dict[Path, Facts], prober: _Prober, graph: Graph, path: Path) -> None:
    found[path] = prober.facts_of(graph)
    for node in graph.nodes:
        if isinstance(node.op, Fused):
            if kernel_of(node.op, prober.kernels) is None:
                _probe_into(found, prober, node.op.body, (*path, node.id))
        elif isinstance(node.op, Fission):
            for number, body in enumerate(node.op.bodies):
                _probe_into(found, prober, body, (*path, node.id, number))


@dataclass(frozen=True)
class _Prober:
    how: How
    store: ProfileStore
    hook: Hook | None
    kernels: Kernels

    def facts_of(self, graph: Graph) -> dict[int, OperatorFacts]:
        assumed = assumed_facts(graph)
        return {node.id: self._facts(graph, node, assumed[node.id]) for node in graph.nodes}

    def _facts(self, graph: Graph, node: Node, assumed: OperatorFacts) -> OperatorFacts:
        if isinstance(node.op, Fused):
            kernel = kernel_of(node.op, self.kernels) if self.how != "reference" else None
            if kernel is None:
                return self._around(assumed, self._inside(node.op.body))
            return replace(self._around(assumed, align(kernel.scratch_bytes)), inplace=kernel.inplace)
        if isinstance(node.op, Fission):
            inside = max(map(self._inside, self._bodies(graph, node, node.op)), default=0)
            return self._around(assumed, inside)
        if self.how == "assumed" or not isinstance(node.op, Aten) or graph.is_view(node):
            return assumed
        key = machine_key("facts", self.how, str(self.hook is not None), node_key(graph, node))
        known = self._known(key)
        if known is not None:
            return known
        measured = self._measure(graph, node)
        if measured is None:
            outside_bytes = sum(assumed.output_bytes) if self.how == "arena" else 0
            return replace(assumed, foreign_bytes=outside_bytes)
        self.store.write(key, print_facts(measured))
        return measured

    def _around(self, assumed: OperatorFacts, inside_bytes: int) -> OperatorFacts:
        """Facts of a node that holds `inside_bytes` of its bodies beside its outputs."""
        transient_bytes = sum(assumed.output_bytes) + inside_bytes
        return replace(assumed, transient_bytes=transient_bytes, assumed=self.how == "assumed")

    def _known(self, key: str) -> OperatorFacts | None:
        """What the store has; a text of another kind is nothing."""
        text = self.store.read(key)
        try:
            return parse_facts(text) if text is not None else None
        except (ValueError, TypeError):
            return None

    def _bodies(self, graph: Graph, node: Node, op: Fission) -> tuple[Graph, ...]:
        """The bodies as they run: the plain executor holds every result of a part until it is merged."""
        if self.how == "reference":
            return op.bodies
        return tuple(body_as_run(body, deliveries(graph, node)) for body in op.bodies)

    def _inside(self, body: Graph) -> int:
        """Bytes that a body holds at once beside its inputs."""
        facts = self.facts_of(body)
        order = [node.id for node in body.nodes]
        if self.how == "reference":
            return timeline(body, order, facts).peak_above_bytes
        return lay_out(body, order, facts, body=True).nbytes

    def _measure(self, graph: Graph, node: Node) -> OperatorFacts | None:
        assert isinstance(node.op, Aten)
        grad_mode = torch.no_grad() if self.how == "reference" else torch.inference_mode()
        with torch.random.fork_rng(devices=[]), grad_mode:
            try:
                operands = make_operands(graph, node)
                if self.how == "arena" and node.outputs and out_variant(node.op.overload) is not None:
                    given = self._measure_out(graph, node, operands)
                    if given is not None and (self.hook is None or not _takes_more(given)):
                        return given
                    served = self._measure_result(graph, node, operands)
                    return served if given is None else min(given, served, key=_transient_bytes)
                return self._measure_result(graph, node, operands)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
                where = node.origin.module or "no module"
                warnings.warn(
                    f"{node.op.overload} (node {node.id}, {where}) fails on made-up operands, its memory is "
                    f"assumed: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None

    def _measure_result(self, graph: Graph, node: Node, operands: Sequence[Any]) -> OperatorFacts:
        """The functional call."""
        assert isinstance(node.op, Aten)
        call = prepare_call(node.op)
        _bind(call, operands)
        result, log, hidden_bytes = self._run(call)
        results = tensors_of(result) if node.outputs else ()
        sizes, needed = _output_bytes(graph, node, results), _needed_bytes(graph, node)
        if self.how == "reference" or (_as_planned(graph, node, results) and sizes == needed):
            facts = _describe(log, results)
        else:  # laid out otherwise, or on a storage that is too big to be kept
            facts, sizes = _describe(log, (), results), needed
        return self._finish(node.op, replace(facts, output_bytes=sizes, hidden_bytes=hidden_bytes))

    def _measure_out(self, graph: Graph, node: Node, operands: Sequence[Any]) -> OperatorFacts | None:
        """The out= form, with outputs that exist before, in one storage as in the arena.

        None if it moves or resizes them, refuses what lies so, or computes other numbers than the operator.
        """
        assert isinstance(node.op, Aten)
        variant = out_variant(node.op.overload)
        assert variant is not None
        call = prepare_out_call(node.op, variant)
        _bind(call, operands)
        given = _empty([graph.values[out].meta for out in node.outputs])
        call.kwargs.update(zip(variant.names, given, strict=True))
        before = [_place(tensor) for tensor in given]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about resizing, which is looked at here
            try:
                _, log, hidden_bytes = self._run(call)
            except RuntimeError:  # linalg.qr takes outputs in one storage for one tensor
                return None
        if [_place(tensor) for tensor in given] != before or not _agrees(node.op, operands, given):
            return None
        sizes = _needed_bytes(graph, node)
        facts = _describe(log, ())
        return self._finish(node.op, replace(facts, output_bytes=sizes, hidden_bytes=hidden_bytes))

    def _run(self, call: Call) -> tuple[Any, Log, int]:
        for _ in range(2):  # caches inside libraries fill
            call()
        if self.hook is not None:
            result, log = record_with_hook(self.hook, call)
        else:
            result, log = record_with_profiler(call)
        again, rise = high_water(call)
        del again
        hidden_bytes = (rise or 0) - peak_bytes(log)
        return result, log, hidden_bytes if hidden_bytes >= NOISE_BYTES else 0

    def _finish(self, op: Aten, facts: OperatorFacts) -> OperatorFacts:
        """In the arena temporaries have their places; without a hook they are not in it."""
        if self.how == "reference":
            return facts
        held = held_bytes(op, facts) if self.hook is not None else sum(facts.output_bytes)
        return replace(facts, transient_bytes=held)


def _bind(call: Call, operands: Sequence[Any]) -> None:
    for index, operand in enumerate(operands):
        call.bind(index, operand)


def _empty(metas: Sequence[TensorMeta]) -> list[Tensor]:
    """Windows on one block of memory."""
    starts = list(accumulate((align(meta.span_bytes) for meta in metas), initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8).untyped_storage()
    return [window(block, start, meta) for start, meta in zip(starts, metas, strict=False)]


def _agrees(op: Aten, operands: Sequence[Any], given: Sequence[Tensor]) -> bool:
    """Whether an out= form made the operator's numbers: that of batch norm leaves sliced images undone."""
    if is_random(op) or written_out(op.overload) or "empty" in op.overload:
        return True
    call = prepare_call(op)
    _bind(call, operands)
    pairs = zip(tensors_of(call()), given, strict=False)
    return all(torch.allclose(theirs, ours, 0.0, 0.0, equal_nan=True) for theirs, ours in pairs)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What an out= form must leave as it was."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape, tensor.stride()


def _transient_bytes(facts: OperatorFacts) -> int:
    return facts.transient_bytes


def _takes_more(facts: OperatorFacts) -> bool:
    """Whether an out= form holds more than its outputs: asked for them, the operator may do so afterwards."""
    return any(temp.nbytes > ALIGNMENT for temp in facts.temps)


def _as_planned(graph: Graph, node: Node, results: Sequence[Tensor]) -> bool:
    """Whether the results have the windows that the graph gives them, each output in a block of its own."""
    metas = [graph.values[out].meta for out in node.outputs]
    return len(metas) == len(results) and all(
        tuple(result.shape) == meta.shape
        and result.stride() == meta.stride
        and result.dtype == meta.dtype
        and result.storage_offset() == graph.values[out].offset
        for result, meta, out in zip(results, metas, node.outputs, strict=True)
    )


def _output_bytes(graph: Graph, node: Node, results: Sequence[Tensor]) -> tuple[int, ...]:
    fresh = {position for positions in fresh_outputs(graph, node).values() for position in positions}
    return tuple(
        result.untyped_storage().nbytes() if position in fresh else 0
        for position, result in enumerate(results[: len(node.outputs)])
    )


def _needed_bytes(graph: Graph, node: Node) -> tuple[int, ...]:
    """What the values on each fresh output's storage need."""
    sizes = [0] * len(node.outputs)
    for storage, positions in fresh_outputs(graph, node).items():
        for position in positions:
            sizes[position] = graph.storages[storage].nbytes
    return tuple(sizes)


def _describe(log: Log, results: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> OperatorFacts:
    """Temporaries and the request sequence; blocks behind `results` are outputs.

    Results that are `dropped` after a copy are temporaries to the end.  Any other block that is still held is
    a library's own: it ends the sequence, so that it is never served from the arena.
    """
    backing: dict[int, int] = {}
    for position, result in enumerate(results):
        backing.setdefault(result.untyped_storage().data_ptr(), position)
    passing = {result.untyped_storage().data_ptr() for result in dropped}
    blocks = blocks_of(log)
    temps: list[Temp] = []
    sequence: list[tuple[int, int]] = []
    for block in blocks:
        if block.stop is None and block.address in backing:
            sequence.append((block.nbytes, backing[block.address]))
        elif block.stop is None and block.address not in passing:
            break
        else:
            temps.append(_temp_of(block))
            sequence.append((block.nbytes, -len(temps)))
    return OperatorFacts((), peak_bytes(log), tuple(temps), tuple(sequence), foreign_bytes=log.foreign_bytes)


def _temp_of(block: Block) -> Temp:
    return Temp(block.nbytes, block.start, HELD if block.stop is None else block.stop)


def print_facts(facts: OperatorFacts) -> str:
    """Facts as text, for the profile store and saved plans."""
    temps = [[temp.nbytes, temp.start, temp.stop] for temp in facts.temps]
    beside = [facts.hidden_bytes, facts.foreign_bytes, facts.assumed, facts.inplace]
    return json.dumps([facts.output_bytes, facts.transient_bytes, temps, facts.sequence, *beside])


def parse_facts(text: str) -> OperatorFacts:
    """The inverse of `print_facts`; raises ValueError or TypeError for another text."""
    outputs, transient_bytes, temps, sequence, hidden_bytes, foreign_bytes, *rest = json.loads(text)
    assumed, inplace = rest
    return OperatorFacts(
        output_bytes=tuple(outputs),
        transient_bytes=transient_bytes,
        temps=tuple(Temp(*temp) for temp in temps),
        sequence=tuple((nbytes, target) for nbytes, target in sequence),
        hidden_bytes=hidden_bytes,
        foreign_bytes=foreign_bytes,
        assumed=assumed,
        inplace=tuple((output, source) for output, source in inplace),
    )
