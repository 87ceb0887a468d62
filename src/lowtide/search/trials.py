"""Plans of one point, to be tried: with its groups as kernels, and without.

Problem.  A point says what is recomputed and split; whether fusing it pays shows when both forms run.

Method.  A fused form is built when asked for, likewise the plain one, each with its own order and placement;
nothing is built that is not tried.  The promise asks for the form that should be better first.

Not done here: verifying and measuring (`promise.py`), choosing groups (`fusing.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lowtide.capture import Program
from lowtide.place import Placement, place
from lowtide.run.kernels import Kernels
from lowtide.run.layout import placement_problem
from lowtide.run.plan import Plan, build_plan
from lowtide.search.bases import realise_base
from lowtide.search.estimator import Estimator
from lowtide.search.explorer import Spot
from lowtide.search.fusing import Fuser, kernel_moves
from lowtide.search.levels import Realised
from lowtide.search.moves import moves_of
from lowtide.search.outcome import Move
from lowtide.search.preparing import PreparedForm, Preparer

__all__ = ["Trial", "Workshop", "placed"]

PLACEMENT_SECONDS = 1.0
"""How long an exact placement may take where the greedy one wastes bytes."""


@dataclass(frozen=True)
class Trial:
    """A form of a point and its plan; `above_bytes` is its predicted peak without placement's waste."""

    spot: Spot
    realised: Realised
    fused: bool
    workshop: Workshop
    prepared: PreparedForm | None = None

    @property
    def above_bytes(self) -> int:
        """Predicted bytes above resident, as far as lifetimes tell, with weights that are kept."""
        return self.prepared.above_bytes if self.prepared else self.realised.timeline.peak_above_bytes

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """What was applied, kernels included."""
        kernels = tuple(kernel_moves(self.realised.graph)) if self.fused else ()
        rewrites = (*self.workshop.rewrites, *(self.prepared.moves if self.prepared else ()))
        return (*moves_of(self.spot, self.workshop.kernels), *kernels, *rewrites)

    @cached_property
    def plan(self) -> Plan:
        """The plan, placed and ready to run."""
        return self.workshop.build(self)


@dataclass(frozen=True)
class Workshop:
    """Builds trials; `enter` is told the stage."""

    program: Program
    estimator: Estimator
    kernels: Kernels
    fuser: Fuser | None
    enter: Callable[[str], None]
    preparer: Preparer | None = None
    rewrites: tuple[Move, ...] = ()

    def trials(self, spot: Spot, most_bytes: int = 0) -> Iterator[Trial]:
        """The fused form of a point, that with prepared weights (if there are such forms), the plain form.

        What is prepared may take up to about `most_bytes` above resident.
        """
        self.enter("build")
        realised = realise_base(spot.base, spot.point, self.estimator)
        fused = self.fused(spot, realised)
        if fused is not None:
            yield fused
        prepared = self.preparer.prepared(realised, most_bytes) if self.preparer else None
        if prepared is not None:
            yield Trial(spot, prepared.realised, True, self, prepared)
        yield Trial(spot, realised, False, self)

    def fused(self, spot: Spot, realised: Realised) -> Trial | None:
        """The fused form of a point as the fuser sees it now."""
        if self.fuser is None:
            return None
        made = self.fuser.fuse(realised)
        return None if made is None else Trial(spot, made, True, self)

    def build(self, trial: Trial) -> Plan:
        """The plan of a trial."""
        realised, prepared = trial.realised, trial.prepared
        return build_plan(
            self.program,
            realised.graph,
            realised.order,
            placement=placed(realised, self.estimator if prepared is None else prepared.estimator),
            moves=dict(Counter(move.kind for move in trial.moves)),
            store=self.estimator.store,
            kernels=self.kernels if prepared is None else prepared.estimator.kernels,
            derivation=prepared.derivation if prepared else None,
            rules=dict(Counter(move.detail for move in trial.moves if move.kind == "rewrite")),
        )


def placed(realised: Realised, estimator: Estimator) -> Placement:
    """The placement of a realised point's Buffers."""
    facts = estimator.facts(realised.graph)
    return place(placement_problem(realised.graph, realised.order, facts), PLACEMENT_SECONDS)
