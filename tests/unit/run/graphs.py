"""Hand-written graphs for the executors' tests."""

from lowtide.ir.graph import Graph
from lowtide.ir.text import parse_graph

NETWORK = """
input %0: f32[4,8,16,16]
input %1: f32[8,8,3,3] param
input %2: f32[8] param
input %3: f32[8] param
%4: f32[4,8,16,16] = aten.convolution.default(%0, %1, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
%5: f32[4,8,16,16], %6: f32[8], %7: f32[8] = CALL(%4, %2, %3, None, None, True, 0.1, 1e-05)
%8: f32[4,8,16,16] = aten.relu.default(%5)
%9: f32[4,2048] @s8 = aten.view.default(%8, [4, 2048])
%10: f32[4,2048] = aten.mul.Tensor(%9, 2.0)
%11: f32[4] = aten.sum.dim_IntList(%10, [1])
%12: f32[4,8,8,8], %13: i64[4,8,8,8] = aten.max_pool2d_with_indices.default(%8, [2, 2], [2, 2])
%14: f32[] = aten.mean.default(%12)
return %14, %11
""".replace("CALL", "aten.native_batch_norm.default")

RANDOM = """
input %0: f32[64,64]
%1: f32[64,64] = aten.bernoulli.p(%0, 0.5)
%2: f32[64,64] = aten.rand_like.default(%0)
%3: f32[64,64] = aten.mul.Tensor(%1, %2)
%4: f32[64,64] = aten.exp.default(%3)
return %4
"""

UPDATE = """
input %0: f32[32,16] param
input %1: f32[32,16] state
input %2: f32[8,32]
input %3: f32[8,16]
input %4: host/f64[] host
%5: f32[32,8](1,32) @s2 = aten.t.default(%2)
%6: f32[32,16] = aten.mm.default(%5, %3)
%7: f32[8,16] = aten.mm.default(%2, %0)
%8: f32[] = aten.mean.default(%7)
n9: fused "update"(%0!, %6, %1!, %4) {
  input %0: f32[32,16] param
  input %1: f32[32,16] grad
  input %2: f32[32,16] state
  input %3: host/f64[] host
  n4: aten.mul_.Tensor(%2!, 0.9)
  n5: aten.add_.Tensor(%2!, %1)
  %6: f32[32,16] = aten.mul.Tensor(%2, %3)
  %7: f32[32,16] = aten.sqrt.default(%6)
  n8: aten.sub_.Tensor(%0!, %7)
}
return %8
"""


def network() -> Graph:
    """Convolution, normalisation, pooling; two outputs."""
    return parse_graph(NETWORK)


def random_graph() -> Graph:
    """Two draws and a chain."""
    return parse_graph(RANDOM)


def update() -> Graph:
    """A gradient and its update with momentum; the loss reads the old weight."""
    return parse_graph(UPDATE)
