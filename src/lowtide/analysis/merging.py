"""How the parts of a reduction that is no plain sum are combined with what is there.

    log-sum-exp   whole = log(exp(whole) + exp(part)), without overflow
    moments       variance and mean of two sets from those of each (Chan, Golub, LeVeque 1979):
                      delta = mean_b - mean_a,  w = n_b / (n_a + n_b)
                      var   = (1 - w) var_a + w var_b + w (1 - w) delta^2
                      mean  = mean_a + w delta

Invariants.  The steps work in place on the whole and on the part's own result, which nobody else reads; they
take no memory.  Moments are a pair of results of one operator, the variance without correction.

Not done.  Sums rescaled by a running maximum (attention over keys in one pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.ir.graph import Graph
from lowtide.ir.ops import Aten, Fission, Merge, Ref

__all__ = ["Combination", "combinations"]

_LOG_ADD_EXP = Aten("aten.logaddexp.out", (Ref(0), Ref(1)), (("out", Ref(0)),))
_SUBTRACT = Aten("aten.sub_.Tensor", (Ref(1), Ref(0)))


@dataclass(frozen=True, slots=True)
class Combination:
    """`op` on Ref(0), the whole of output `target`, and Ref(1), the part's result for output `value`."""

    op: Aten
    target: int
    value: int


def combinations(op: Fission, number: int) -> tuple[Combination, ...]:
    """The steps that combine part `number` (not the first) with what the parts before it left."""
    body = op.bodies[op.parts[number].body]
    found: list[Combination] = []
    for position, merge in enumerate(op.merges):
        if merge is Merge.LOGSUMEXP:
            found.append(Combination(_LOG_ADD_EXP, position, position))
        elif merge is Merge.MOMENTS:
            found.extend(_moments(op, number, body, position))
    return tuple(found)


def _moments(op: Fission, number: int, body: Graph, position: int) -> Iterator[Combination]:
    """Steps for the pair that starts at a variance; a mean is combined with its variance."""
    maker = body.node[body.producer[body.outputs[position]]]
    if body.outputs[position] != maker.outputs[0]:
        return
    mean = body.outputs.index(maker.outputs[1])
    counts = [_count(op, each, position) for each in range(number + 1)]
    share = counts[-1] / sum(counts)
    spread = Aten("aten.addcmul_.default", (Ref(0), Ref(1), Ref(1)), (("value", share * (1 - share)),))
    yield Combination(_SUBTRACT, mean, mean)
    yield Combination(Aten("aten.lerp_.Scalar", (Ref(0), Ref(1), share)), position, position)
    yield Combination(spread, position, mean)
    yield Combination(Aten("aten.add_.Tensor", (Ref(0), Ref(1)), (("alpha", share),)), mean, mean)


def _count(op: Fission, number: int, position: int) -> int:
    """How many numbers of a part go into one variance."""
    body = op.bodies[op.parts[number].body]
    value = body.outputs[position]
    maker = body.node[body.producer[value]]
    return body.values[maker.inputs[0]].meta.numel // max(body.values[value].meta.numel, 1)
