"""Made-up operands have the right windows and values that their operator accepts."""

import pytest
import torch

from lowtide.ir.aten import call
from lowtide.ir.graph import Graph
from lowtide.ir.text import parse_graph
from lowtide.run.operands import make_operands, window

CASES = {
    "embedding": """
        input %0: f32[7,4] param
        input %1: i64[50]
        %2: f32[50,4] = aten.embedding.default(%0, %1)
        return %2
    """,
    "nll_loss2d": """
        input %0: f32[2,3,8,8]
        input %1: i64[2,8,8]
        %2: f32[], %3: f32[] = aten.nll_loss2d_forward.default(%0, %1, None, 1, -100)
        return %2
    """,
    "gather": """
        input %0: f32[4,3]
        input %1: i64[4,9]
        %2: f32[4,9] = aten.gather.default(%0, 1, %1)
        return %2
    """,
    "batch_norm": """
        input %0: f32[8,3]
        input %1: f32[3] buffer
        %2: f32[8,3], %3: f32[0], %4: f32[0] = CALL(%0, None, None, %1, %1, False, 0.1, 1e-05)
        return %2
    """,
    "bernoulli": """
        input %0: f32[64]
        %1: f32[64] = aten.bernoulli.default(%0)
        return %1
    """,
}


def _graph(name: str) -> Graph:
    lines = CASES[name].replace("CALL", "aten.native_batch_norm.default").strip().splitlines()
    return parse_graph("\n".join(line.strip() for line in lines))


@pytest.mark.parametrize("name", CASES)
def test_operator_accepts_them(name: str) -> None:
    graph = _graph(name)
    node = graph.nodes[0]
    result = call(node.op, make_operands(graph, node))  # type: ignore[arg-type]
    first = result[0] if isinstance(result, tuple) else result
    assert bool(torch.isfinite(first).all())


def test_windows_are_as_in_the_graph_and_equal_inputs_are_shared() -> None:
    graph = parse_graph(
        "input %0: f32[4,8](1,4)\ninput %1: f32[4,1](1,0)\n"
        "%2: f32[4,8] = aten.addcmul.default($0, $1, $0) <- (%0, %1, %0)\nreturn %2\n"
    )
    first, second, third = make_operands(graph, graph.nodes[0])
    assert first.stride() == (1, 4) and first.untyped_storage().nbytes() == 4 * 8 * 4
    assert second.stride() == (1, 0)
    assert third is first


def test_window_starts_at_the_byte() -> None:
    base = torch.arange(16, dtype=torch.int32)
    meta = parse_graph("input %0: i32[2,3](3,1)\nreturn %0\n").values[0].meta
    assert window(base.untyped_storage(), 8, meta).tolist() == [[2, 3, 4], [5, 6, 7]]
