"""Which axes of a single operator are offered."""

from __future__ import annotations

from lowtide.ir.text import parse_graph
from lowtide.search.splits import single_split
from lowtide.transforms import fission

WEIGHT = """
input %0: f32[8,16,32,32]
input %1: f32[8,4,32,32]
input %2: f32[16,4,3,3]
%3: f32[16,4,3,3], %4: f32[16] = aten.convolution_backward.default(%0, %1, %2, """
WEIGHT += """[16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True])
return %3, %4
"""


def test_images_are_offered_beside_channels_where_they_cut_far_more() -> None:
    graph = fission.prepare(parse_graph(WEIGHT), masks=False)
    (node,) = graph
    split = single_split(graph, node.id, counts=(2, 4))
    assert split is not None
    merges = [
        {merge.value for each in fission.apply(graph, c).graph for merge in getattr(each.op, "merges", ())}
        for c in split.candidates
    ]
    assert merges == [{"write"}, {"write"}, {"add"}, {"add"}]  # channels of the result, then images
