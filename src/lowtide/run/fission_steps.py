"""A Fission in the arena: its parts unrolled into steps, all on one set of offsets.

Problem.  Parts run one after the other in the same memory; their inputs are slices of what is there,
their results belong into slices of the outputs, and nothing may be allocated for either.

Method.  The body is laid out once, in the node's workspace.  Each part lowers it again in a scope whose
inputs are windows on the slices, and whose delivered outputs (`lowtide.analysis.parts`) are windows on the
node's outputs.  A result that lies elsewhere is merged by a step of its own, directly after its producer.

    workspace   [ body of part 0 ][ body of part 1 ][ body of part 2 ]   time ->
    output      [ rows 0..2      ][ rows 3..5      ][ rows 6..7      ]   written in place
    gradient    [ mm             ][ addmm_         ][ addmm_         ]

Invariants.  The first part of a sum writes, so outputs are never cleared.  Steps of a body belong to the
Fission's node.

Not done.  Parts in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.analysis.facts import Facts
from lowtide.analysis.merging import combinations
from lowtide.analysis.parts import Delivery, body_as_run, is_product, terms_of
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Aten, Fission, Ref, Slice
from lowtide.run.bindings import Window
from lowtide.run.layout import Layout, lay_out

__all__ = ["PartPlan", "lay_out_body", "part_window", "plan_part"]

_COPY = Aten("aten.copy_.default", (Ref(0), Ref(1)))
_ADD = Aten("aten.add_.Tensor", (Ref(0), Ref(1)))
_ACCUMULATE = Aten("aten.addmm_.default", (Ref(0), Ref(1), Ref(2)))

Merge = tuple[Aten, int, Window]
"""An operator on (target, value of the body)."""


@dataclass(frozen=True)
class PartPlan:
    """One part: its graph, the body's outputs that lie in the node's outputs, merges by step of the graph."""

    graph: Graph
    given: Mapping[int, Window]
    merges: Mapping[int, Sequence[Merge]]


def lay_out_body(body: Graph, ways: Sequence[Delivery], facts: Facts) -> Layout:
    """Where a body's own values lie in the workspace of its node, in the body's order."""
    run = body_as_run(body, ways)
    return lay_out(run, [node.id for node in run.nodes], facts, body=True)


def part_window(whole: Window, piece: Slice, part: TensorMeta) -> Window:
    """The window of one part on `whole`, with the part's shape and the whole's strides."""
    if piece.axis is None:
        return whole
    step = whole.meta.stride[piece.axis] * whole.meta.dtype.itemsize
    meta = TensorMeta(part.shape, whole.meta.stride, whole.meta.dtype, whole.meta.device)
    return Window(whole.location.shifted(piece.start * step), meta)


def plan_part(op: Fission, number: int, ways: Sequence[Delivery], targets: Sequence[Window]) -> PartPlan:
    """How part `number` delivers; `targets` are the windows on the node's outputs."""
    body, first = op.bodies[op.parts[number].body], number == 0
    plan = _Drafted(body_as_run(body, ways))
    for value, way, target in zip(body.outputs, ways, targets, strict=True):
        if way == "direct":
            plan.given[value] = Window(target.location, body.values[value].meta)
        elif way == "copy":
            plan.merge(_COPY, value, target)
        elif way != "combine" or first:
            terms = terms_of(body, value) if way == "terms" else (value,)
            for position, term in enumerate(sorted(terms, key=plan.step)):
                product = way not in ("add", "combine") and is_product(body, term)
                plan.add(term, target, product, first and position == 0)
    for step in () if first else combinations(op, number):
        plan.merge(step.op, body.outputs[step.value], targets[step.target])
    return plan.finish()


@dataclass
class _Drafted:
    """A PartPlan in the making; `accumulated` are products that are added to what is there."""

    graph: Graph
    given: dict[int, Window] = field(default_factory=dict)
    merges: dict[int, list[Merge]] = field(default_factory=dict)
    accumulated: set[int] = field(default_factory=set)

    def step(self, value: int) -> int:
        """The step that makes a value."""
        maker = self.graph.producer[value]
        return next(step for step, node in enumerate(self.graph.nodes) if node.id == maker)

    def merge(self, op: Aten, value: int, target: Window) -> None:
        """Bring a value to its target once it is made."""
        self.merges.setdefault(self.step(value), []).append((op, value, target))

    def add(self, value: int, target: Window, product: bool, first: bool) -> None:
        """Deliver one term of a sum."""
        meta = self.graph.values[value].meta
        whole = meta == target.meta and self.graph.storage_of(value).nbytes == meta.span_bytes
        if first and (product or whole):
            self.given[value] = Window(target.location, meta)
        elif product:
            self.given[value] = target
            self.accumulated.add(value)
        else:
            self.merge(_COPY if first else _ADD, value, target)

    def finish(self) -> PartPlan:
        graph = _accumulating(self.graph, self.accumulated) if self.accumulated else self.graph
        return PartPlan(graph, self.given, self.merges)


def _accumulating(body: Graph, values: set[int]) -> Graph:
    """`body` with the products that make `values` added to what is there.

    The new nodes have ids of their own, as the facts of the product do not hold for them.
    """
    fresh = max(node.id for node in body.nodes) + 1
    nodes = []
    for step, node in enumerate(body.nodes):
        if values.isdisjoint(node.outputs):
            nodes.append(node)
            continue
        (value,) = node.outputs
        nodes.append(Node(fresh + step, _ACCUMULATE, (value, *_operands(node)), (), (value,), node.origin))
    return replace(body, nodes=tuple(nodes), inputs=(*body.inputs, *sorted(values)))


def _operands(node: Node) -> tuple[int, int]:
    """The two factors of a product; a square of one value mentions it twice."""
    assert isinstance(node.op, Aten)
    left, right = (node.inputs[arg.index] for arg in node.op.args if isinstance(arg, Ref))
    return left, right
