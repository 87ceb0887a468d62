"""Bodies of a region along rows: one is timed, the others follow from its rows."""

from __future__ import annotations

import pytest

from lowtide.cost.profiled import bodies_s, largest_body
from lowtide.cost.siblings import Siblings
from lowtide.ir import Fission, Graph
from lowtide.ir.text import parse_graph
from lowtide.transforms import halo
from lowtide.transforms.rows import row_candidates


def relu(rows: int, channels: int = 4) -> Graph:
    shape = f"f32[1,{channels},{rows},8]"
    return parse_graph(f"input %0: {shape}\n%1: {shape} = aten.relu.default(%0)\nreturn %1\n")


def test_a_time_on_other_rows_is_guessed_in_proportion() -> None:
    siblings = Siblings()
    (node,) = relu(10)
    assert siblings.guess(relu(10), node) is None
    siblings.learn(relu(10), node, 1.0)
    siblings.learn(relu(30), node, 6.0)
    assert siblings.guess(relu(12), node) == pytest.approx(1.2)
    assert siblings.guess(relu(25), node) == pytest.approx(5.0)  # the nearest, not the first
    assert siblings.guess(relu(4), node) is None  # too few to compare
    assert siblings.guess(relu(12, channels=8), node) is None  # another loop was cut as well


CHAIN = """
input %0: f32[1,2,24,8]
input %1: f32[2,2,3,3]
%2: f32[1,2,24,8] = aten.convolution.default(%0, %1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
%3: f32[1,2,24,8] = aten.relu.default(%2)
%4: f32[1,2,24,8] = aten.convolution.default(%3, %1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
return %4
"""


def test_the_other_bodies_follow_from_the_largest() -> None:
    graph = parse_graph(CHAIN)
    ((candidate,),) = next(iter(row_candidates(graph, (4,))))
    (node,) = [each for each in halo.apply(graph, candidate).graph if isinstance(each.op, Fission)]
    op = node.op
    assert isinstance(op, Fission)
    assert len(op.bodies) == 3
    largest = largest_body(op)
    body = op.bodies[largest]
    costs = {each.id: 0.0 if body.is_view(each) else 1.0 for each in body}
    seconds = bodies_s(op, costs)
    assert seconds[largest] == max(seconds) == sum(costs.values())
    assert min(seconds) > 0.5 * max(seconds)
