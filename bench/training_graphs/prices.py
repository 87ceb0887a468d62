"""What an operator costs on the device of a file: the roofline that made the file's table, for any shape.

Problem.  Rewrites and parts have shapes that the table lacks.

Method.  Views and bookkeeping cost nothing.  A copy between device and host costs its latency and its bytes
over the bus.  Matrix products and convolutions are lowered to B products of M x N x K in tiles of 128 x
128; a product of few tiles is split along K; whole waves of tiles over the processors are paid, or the
bytes moved if that takes longer.  Everything else moves its operands and its result once.

Invariants.  Milliseconds.  Agrees with every entry of a file's table (tests).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .model import SCALAR_TIME, Graph, Node, Shape, elements

__all__ = ["FREE_OPS", "node_bytes", "node_time", "op_time"]

FREE_OPS = frozenset(
    {"placeholder", "index_out", "fission", "fission_out", "slice", "concat", "reshape", "permute"}
)
_TILE = 128
_LEAST_K = 512


def op_time(
    op: str, ins: Sequence[Shape], out: Shape, attrs: Mapping[str, Any], hw: Mapping[str, Any]
) -> float:
    """Milliseconds of one call."""
    if op in FREE_OPS:
        return SCALAR_TIME
    if op in ("store", "load"):
        return 1e3 * float(hw["swap_lat"] + elements(out) * hw["dsize"] / hw["pcie"])
    results = attrs["multi_out_shapes"] if op == "layer_norm" else [out]
    moved = (sum(map(elements, ins)) + sum(map(elements, results))) * hw["dsize"] / hw["bw"]
    product = _as_products(op, ins, out, attrs)
    work = _wave_time(*product, hw) if product else 0.0
    return 1e3 * float(hw["launch"] + max(work, moved))


def _wave_time(count: int, rows: int, columns: int, depth: int, hw: Mapping[str, Any]) -> float:
    """Seconds of `count` products of rows x columns x depth."""
    processors = hw["sms"]
    tiles = count * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    pieces = max(1, min(processors // tiles if tiles < processors else 1, depth // _LEAST_K))
    waves = math.ceil(tiles * pieces / processors)
    return float(waves * processors * _TILE * _TILE * 2 * math.ceil(depth / pieces) / hw["flops"])


def _as_products(
    op: str, ins: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]
) -> tuple[int, int, int, int] | None:
    """(count, rows, columns, depth); None for what is no product."""
    if op == "matmul":
        a, b = ins
        depth, rows = (a[-2], a[-1]) if attrs["trans_a"] else (a[-1], a[-2])
        return elements(a[:-2]), rows, (b[-2] if attrs["trans_b"] else b[-1]), depth
    if op == "flex_matmul":
        a, b = ins
        batch, reduced = attrs["n_batch_dims"], attrs["n_reduce_dims"]
        count = elements(a[:batch])
        depth = elements(a[batch : batch + reduced] if attrs["trans_a"] else a[len(a) - reduced :])
        return count, elements(a) // count // depth, elements(b) // count // depth, depth
    if op == "conv2d":
        return 1, out[0] * out[2] * out[3], ins[1][0], elements(ins[1][1:])
    if op == "conv2d_bwd_inp":
        rows, columns = out[0] * out[2] * out[3], ins[1][1]
        flops = 2 * elements(ins[0]) * elements(ins[1][1:])
        return 1, rows, columns, max(1, math.ceil(flops / (2 * rows * columns)))
    if op == "conv2d_bwd_wgt":
        g = ins[1]
        return 1, out[0], elements(out[1:]), g[0] * g[2] * g[3]
    return None


def node_time(graph: Graph, node: Node, hw: Mapping[str, Any]) -> float:
    """Milliseconds of a node; a region's are its body's and not counted here."""
    return op_time(node.op, graph.in_shapes(node), node.shape, node.attrs, hw)


def node_bytes(graph: Graph, node: Node, dsize: int) -> int:
    """Bytes that the result holds on the device."""
    if node.free:
        return 0
    if node.op == "fission":
        readers = (graph.node[reader] for reader in graph.readers[node.id])
        return sum(reader.count for reader in readers if reader.op == "fission_out") * dsize
    return node.count * dsize
