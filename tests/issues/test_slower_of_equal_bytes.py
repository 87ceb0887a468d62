"""Of plans that take equal bytes the slower is returned (pytorch#149258).

Costs are measured: a slow pointwise operator costs more than a thin product, whatever their arithmetic says.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from lowtide.capture import capture
from lowtide.ir import Graph
from lowtide.ir.ops import Aten
from lowtide.run.store import ProfileStore
from lowtide.search.driver import Frontier, explore
from lowtide.search.estimator import Estimator
from lowtide.search.levels import Level, open_level
from lowtide.search.mirror import Evaluation
from lowtide.workload import Workload

SIZE = 256


class Two(nn.Module):
    """Two results of equal size that the backward needs: of a thin product and of a slow function."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(SIZE, 2)), nn.Parameter(torch.rand(2, SIZE))
        self.scale = nn.Parameter(torch.rand(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sinh(self.left @ self.right) + torch.lgamma(x) * self.scale


def workload() -> Workload:
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, (torch.rand(SIZE, SIZE) + 1,), loss=lambda y: y.sum(), optimizer=optimizer)


def made_by(graph: Graph, overload: str) -> int:
    """The storage that the one operator of this name makes in the forward."""
    forward = [node for node in graph if node.origin.phase == "forward"]
    (node,) = (n for n in forward if isinstance(n.op, Aten) and n.op.overload == overload)
    return graph.values[node.outputs[0]].storage


def judged(level: Level, *storages: int) -> Evaluation:
    mirror = level.search.mirror
    return mirror.evaluate(np.array([storage in storages for storage in mirror.storage_ids], np.bool_))


def test_the_measured_cheaper_one_is_recomputed() -> None:
    """Either of the two would do for the limit."""
    level = open_level(capture(workload()).graph, Estimator(store=ProfileStore(None)), seed=0)
    product, slow = made_by(level.graph, "aten.mm.default"), made_by(level.graph, "aten.lgamma.default")
    whole, thin, thick = judged(level), judged(level, product), judged(level, slow)
    assert thin.peak_bytes == thick.peak_bytes == whole.peak_bytes - 4 * SIZE * SIZE
    assert thin.latency_s < thick.latency_s
    level.search.reach(thin.peak_bytes, level.search.mask(level.search.points[0]), lambda: False)
    best = level.search.cheapest(thin.peak_bytes)
    assert best is not None and slow not in best.chosen
    assert best.latency_s <= thin.latency_s


def test_no_point_of_the_frontier_is_beaten_by_another() -> None:
    frontier: Frontier = explore(workload(), 0.5, seed=0, kind=Frontier)
    points = frontier.points
    assert len({peak for peak, _ in points}) == len(points)
    for peak, seconds in points:
        assert not any((p <= peak and s < seconds) or (p < peak and s <= seconds) for p, s in points)
