"""Inferences whose weights are prepared: folded, merged and packed once, images channels-last.

Problem.  Weights made from weights save work in every call and take bytes all the time, so whether they pay
depends on the limit; the same step without them has to stay on offer.

Method.  Another form of a realised point (`trials.py`), made after the search like the fused one: rewrite
with derivation, cut off what runs once, lay images channels-last, plan groups as kernels that keep what they
pack (convolutions have kernels only then).  What is kept counts in the form's bytes, so a limit that it would
break refuses it.  Its operators lie otherwise than the plain form's, so groups are not judged one by one: the
whole is, when it runs.

rewrites:   rules that need no prepared weights (`simplified`) are applied ahead of the search, to training
            steps too, where the best order of the result needs no more bytes.

Not done here: keeping some of the weights only; steps with split regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lowtide.analysis.key import graph_key, node_key
from lowtide.analysis.timeline import timeline
from lowtide.fusion.codegen.lower import lower
from lowtide.fusion.codegen.sliding import uses_winograd
from lowtide.fusion.codegen.tensor import Unfusable, Window
from lowtide.fusion.kernels import Foundry
from lowtide.fusion.layout import channels_last
from lowtide.fusion.profit import Pricing
from lowtide.ir import Fission, Graph, Node
from lowtide.ir.extract import extract
from lowtide.ir.graph import Role
from lowtide.run.allocator import load_hook
from lowtide.run.derived import Derivation, derivation_of
from lowtide.schedule.heuristics import best_schedule
from lowtide.search.estimator import Estimator
from lowtide.search.fusing import Fuser
from lowtide.search.levels import Realised, reordered
from lowtide.search.outcome import Move
from lowtide.transforms.rewriting.derived import split_derived
from lowtide.transforms.rewriting.record import Applied, Rewritten
from lowtide.transforms.rewriting.rewrite import RewriteOptions, rewrite

__all__ = ["PreparedForm", "Preparer", "rewrite_moves", "simplified"]

_CONVOLUTION = "aten.convolution.default"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")

LEAST_ROWS = 8
"""A product of fewer rows reads its weight once in any case: packing it only takes memory."""

FAR = 1 << 30
"""Groups of an inference may reach this far: nothing in it was recomputed late."""


@dataclass(frozen=True)
class PreparedForm:
    """A realised graph, some of whose inputs `derivation` makes and keeps."""

    realised: Realised
    derivation: Derivation
    moves: tuple[Move, ...]
    estimator: Estimator

    @property
    def above_bytes(self) -> int:
        """Predicted bytes above resident, without placement's waste."""
        most = max(self.realised.timeline.peak_above_bytes, self.derivation.layout.nbytes)
        return most + self.derivation.nbytes


@dataclass
class Preparer:
    """Makes prepared forms; compiles and measures with an estimator of its own."""

    estimator: Estimator
    fuser: Fuser
    made: dict[str, PreparedForm | None] = field(default_factory=dict)

    @staticmethod
    def beside(estimator: Estimator) -> Preparer:
        """One that shares the store of `estimator`."""
        own = Estimator(store=estimator.store, kernels={})
        fuser = Fuser(own, own.kernels, Foundry(keep=True), Pricing(keep=True), reach=FAR, judged=False)  # type: ignore[arg-type]
        return Preparer(own, fuser)

    def prepared(self, realised: Realised, most_bytes: int) -> PreparedForm | None:
        """The same step with prepared weights; None if nothing would be, or a region is split.

        Nor is there one if what it keeps takes more than `most_bytes` at the first glance.
        """
        graph = realised.graph
        if any(isinstance(node.op, Fission) for node in graph.nodes) or _packed_bytes(graph) > most_bytes:
            return None
        key = graph_key(graph)
        if key not in self.made:
            self.made[key] = self._make(reordered(graph, realised.order), realised)
        return self.made[key]

    def _make(self, graph: Graph, realised: Realised) -> PreparedForm | None:
        rewritten = rewrite(graph, RewriteOptions(derive=True, takes=_takes_factors))
        parts = split_derived(rewritten.graph)
        laid = channels_last(parts.graph).graph
        few = (node for node in laid.nodes if _rows(laid, node) in range(1, LEAST_ROWS))
        self.fuser.lost_products.update(node_key(laid, node) for node in few)
        order = tuple(node.id for node in laid.nodes)
        fused = self.fuser.fuse(Realised(laid, order, realised.timeline, 0.0))
        if fused is None:
            return None
        derivation = derivation_of(
            fused.graph, parts.preparation, self.estimator.kernels, self.estimator.store, load_hook()
        )
        if derivation is None:
            return None
        return PreparedForm(fused, derivation, tuple(rewrite_moves(rewritten, graph)), self.estimator)


def _rows(graph: Graph, node: Node) -> int:
    """Rows of the result of a matrix product; 0 for other nodes."""
    product = getattr(node.op, "overload", "") in _PRODUCTS
    return graph.values[node.outputs[0]].meta.shape[-2] if product else 0


def _packed_bytes(graph: Graph) -> int:
    """About what kernels of convolutions and large products keep: their weights' bytes."""
    found: set[int] = set()
    for node in graph.nodes:
        if getattr(node.op, "overload", "") == _CONVOLUTION or _rows(graph, node) >= LEAST_ROWS:
            found.update(graph.values[value].storage for value in node.inputs)
    weights = (graph.storages[storage] for storage in found)
    return sum(storage.nbytes for storage in weights if storage.role is Role.PARAM)


def _takes_factors(graph: Graph, node: Node) -> bool:
    """Whether a convolution's kernel needs a folded weight only for packing.

    Winograd reads the weight itself again where a result is not finite: with a folded one that would be kept
    as well, and the factors cost next to nothing behind the product.
    """
    try:
        kernel = lower(extract(graph, {node.id}).body, keep=True).kernel
    except Unfusable:
        return True
    return not any(isinstance(each, Window) and uses_winograd(each) for each in kernel.reductions)


def simplified(graph: Graph, estimator: Estimator) -> Rewritten:
    """`graph` with the rules that need no prepared weights, if that takes no more bytes and no more time."""
    done = rewrite(graph)
    if not done.applied:
        return done
    as_written = [_peak(each, estimator, False) for each in (done.graph, graph)]
    if as_written[0] <= as_written[1]:
        return done
    at_best = [_peak(each, estimator, True) for each in (done.graph, graph)]
    return done if at_best[0] <= at_best[1] else Rewritten(graph)


def _peak(graph: Graph, estimator: Estimator, best: bool) -> int:
    """Bytes above resident in program order, or in the best order that is found (which takes longer)."""
    facts = estimator.facts(graph)
    order = best_schedule(graph, facts, inplace=True).order if best else [node.id for node in graph.nodes]
    return timeline(graph, order, facts, inplace=True).peak_above_bytes


def rewrite_moves(done: Rewritten, before: Graph) -> Iterator[Move]:
    """A Rewrite move per applied rule, where the value was that it made anew."""
    for each in done.applied:
        yield Move("rewrite", *_place(each, (before, done.graph)), detail=each.rule)


def _place(applied: Applied, graphs: Sequence[Graph]) -> tuple[str, str]:
    for graph in graphs:
        maker = graph.producer.get(applied.value)
        if maker is not None:
            origin = graph.node[maker].origin
            return origin.module or origin.phase, origin.source
    return "", ""
