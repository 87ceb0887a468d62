"""Graphs that each break one invariant: (its number, how to build the graph, a word of the message)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lowtide.ir import Fission, Graph, Node, Slice
from lowtide.ir.text import parse_graph

SOUND = """
input %0: f32[8,4]
input %1: f32[4,4] param
%2: f32[4,4](1,4) @s1 = aten.t.default(%1)
%3: f32[8,4] = aten.mm.default(%0, %2)  # fc model.py:3
%4: f32[8,4] output = aten.relu.default(%3)
return %4
"""

FISSION = """
input %0: f32[8,4]
input %1: f32[4,4] param
%2: f32[8,4] output = fission(%0, %1) merge [write] {
  body {
    input %0: f32[4,4] temp
    input %1: f32[4,4] temp
    %2: f32[4,4] = aten.mm.default(%0, %1)
    return %2
  }
  part 0 [0:0:4, *] -> [0:0:4]
  part 0 [0:4:8, *] -> [0:4:8]
}
return %2
"""

UPDATE = """
input %0: f32[4] param
input %1: f32[4]
%2: f32[4] = aten.neg.default(%1)
n3: fused "update"(%0!, %2) {
  input %0: f32[4] param
  input %1: f32[4] temp
  %2: f32[4] = aten.mul.Tensor(%1, 0.1)
  aten.add_.Tensor(%0!, %2)
  return
}
return %0
"""

SWAP = """
input %0: f32[4]
%1: f32[4] = aten.relu.default(%0)
%2: f32[4] = store("disk", %1)
%3: f32[4] = load("disk", %2)
%4: f32[4] output = aten.relu.default(%3)
return %4
"""

Build = Callable[[], Graph]


def swapped(text: str, *pairs: tuple[str, str]) -> Build:
    """The graph of `text` with words replaced."""

    def build() -> Graph:
        changed = text
        for old, new in pairs:
            assert old in changed
            changed = changed.replace(old, new)
        return parse_graph(changed)

    return build


def edited(**changes: Callable[[Graph], Any]) -> Build:
    """SOUND with some fields of the graph computed anew."""

    def build() -> Graph:
        graph = parse_graph(SOUND)
        fields = {"nodes": graph.nodes, "values": graph.values, "storages": graph.storages}
        fields |= {"inputs": graph.inputs, "outputs": graph.outputs}
        return Graph(**{**fields, **{name: change(graph) for name, change in changes.items()}})  # type: ignore[arg-type]

    return build


def with_node(graph: Graph, number: int, **changes: Any) -> tuple[Node, ...]:
    return tuple(replace(node, **changes) if node.id == number else node for node in graph.nodes)


def bad_slice() -> Graph:
    graph = parse_graph(FISSION)
    op = graph.nodes[0].op
    assert isinstance(op, Fission)
    part = replace(op.parts[0], inputs=(Slice(0, 0, 4), Slice(1, 0, 2)))
    node = replace(graph.nodes[0], op=replace(op, parts=(part, op.parts[1])))
    return Graph((node,), graph.values, graph.storages, graph.inputs, graph.outputs)


MM = "%3: f32[8,4] = aten.mm.default(%0, %2)  # fc model.py:3"
RELU = "%4: f32[8,4] output = aten.relu.default(%3)"
LAST = "return %4"

BROKEN: list[tuple[int, Build, str]] = [
    (1, edited(nodes=lambda g: with_node(g, 4, id=3)), "2 nodes have the id 3"),
    (1, edited(values=lambda g: {**g.values, 4: replace(g.values[4], id=9)}), "%9 is filed as %4"),
    (1, edited(storages=lambda g: {**g.storages, 4: replace(g.storages[4], id=9)}), "s9 is filed as s4"),
    (2, edited(nodes=lambda g: with_node(g, 4, inputs=(77,))), "%77 does not exist"),
    (2, edited(outputs=lambda g: (78,)), "%78"),
    (
        2,
        edited(values=lambda g: {**g.values, 4: replace(g.values[4], storage=9)}),
        "s9, which does not exist",
    ),
    (3, edited(inputs=lambda g: (0, 1, 1)), "%1 is twice"),
    (3, edited(nodes=lambda g: with_node(g, 4, outputs=(3,))), "%3 comes from node 3 already"),
    (3, edited(nodes=lambda g: with_node(g, 4, outputs=(0,))), "from the graph's inputs already"),
    (3, swapped(SOUND, (LAST, f"value %9: f32[4]\n{LAST}")), "%9 is neither"),
    (4, edited(nodes=lambda g: (g.nodes[1], g.nodes[0], g.nodes[2])), "%2 is read before"),
    (5, swapped(SOUND, (LAST, f"storage s9 16B\n{LAST}")), "s9 has no value"),
    (
        6,
        swapped(SOUND, (MM, MM.replace("f32[8,4]", "f32[8,4] 100B"))),
        "byte 128 of storage s3, which has 100",
    ),
    (6, swapped(SOUND, ("(1,4) @s1", "(1,4) @s1+2")), "byte 72 of storage s1"),
    (6, swapped(SOUND, ("(1,4) @s1", "(1,-4) @s1")), "negative"),
    (7, swapped(SOUND, ("%4: f32[8,4] output", "%4: f32[8,4] @s0")), "none of its inputs'"),
    (7, swapped(SOUND, ("%4: f32[8,4] output", "%4: f32[8,4] param")), "the caller's"),
    (8, swapped(SOUND, ("input %0: f32[8,4]", "input %0: f32[8,4] temp")), "nobody counts"),
    (8, swapped(SOUND, (" output", "")), "dies with the step"),
    (9, edited(nodes=lambda g: with_node(g, 4, writes=(1,))), "is no input"),
    (9, swapped(SOUND, (RELU, f"{RELU}\naten.add_.Tensor(%3!, %0)")), "a temporary has one value"),
    (
        10,
        swapped(
            UPDATE,
            (
                "  aten.add_",
                "  %3: f32[4] @s2 = aten.view.default(%2, [4])\n  aten.mul_.Tensor(%2!, 2.0)\n  aten.add_",
            ),
            ("(%0!, %2)\n  return", "(%0!, %3)\n  return"),
        ),
        "overwritten through %2",
    ),
    (11, swapped(SOUND, (MM, "%3: f32[8,4] = aten.mm.default($0, $2) <- (%0, %2)")), "[0, 2]"),
    (11, swapped(SOUND, (MM, "%3: f32[8,4] = aten.mm.default($0, $0) <- (%0, %2)")), "the node has 2"),
    (12, swapped(SOUND, ("input %1: f32", "input %5: host/f64[]\ninput %1: f32")), "device host"),
    (12, swapped(SOUND, ("input %1: f32", "input %5: host/f64[2] host\ninput %1: f32")), "shape or bytes"),
    (12, swapped(SOUND, (LAST, f"%5: host/f64[] host = aten.item.default(%4)\n{LAST}")), "no Scalar"),
    (13, swapped(UPDATE, ("  input %1: f32[4] temp", "  input %1: f32[2] temp")), "input 1: %2 is"),
    (13, swapped(UPDATE, ("(%0!, %2) {", "(%0!) {")), "the node has 1 inputs, its body 2"),
    (13, swapped(UPDATE, ('"update"(%0!', '"update"(%0')), "the body writes %0, the node says nothing"),
    (
        13,
        swapped(
            UPDATE,
            ("(%0!, %2) {", "(%0!, %0!) {"),
            ("f32[4] temp", "f32[4] param"),
            ("  return", "  aten.mul_.Tensor(%1!, 2.0)\n  return"),
        ),
        "bound 2 times",
    ),
    (
        13,
        swapped(
            SOUND,
            (RELU, 'n4: %4: f32[8,4] output = fused "kernel"(%3) {\n input %0: f32[8,4] temp\n return %0\n}'),
        ),
        "a view of input %3",
    ),
    (
        14,
        swapped(FISSION, ("[0:4:8, *] -> [0:4:8]", "[0:4:8, *] -> [0:3:7]")),
        "[3, 4) of axis 0 is in two parts",
    ),
    (14, swapped(FISSION, ("  part 0 [0:4:8, *] -> [0:4:8]\n", "")), "[4, 8) of axis 0 is in no part"),
    (14, swapped(FISSION, ("[0:4:8, *] ->", "[0:5:9, *] ->")), "not inside"),
    (14, bad_slice, "but the body has"),
    (14, swapped(FISSION, ("part 0 [0:4:8", "part 1 [0:4:8")), "body 1 of 1"),
    (14, swapped(FISSION, ("merge [write]", "merge [write, add]")), "2 merges for 1 outputs"),
    (14, swapped(FISSION, ("[0:4:8, *] ->", "[0:4:8] ->")), "1 input slices"),
    (
        2,
        swapped(
            FISSION,
            ("    %2: f32[4,4] = aten.mm.default(%0, %1)", "    %2: f32[4,4] = aten.mm.default(%1, %3)"),
        ),
        "%3",
    ),
    (15, swapped(SWAP, ('load("disk"', 'load("host"')), "%2 is on tier disk, the Load reads host"),
    (15, swapped(SWAP, ("default(%3)", "default(%2)")), "only its Loads"),
    (
        15,
        swapped(SWAP, ('load("disk", %2)', 'load("disk", %1)')),
        "%1 is on tier device, the Load reads disk",
    ),
    (15, swapped(SWAP, ("%3: f32[4] =", "%3: f32[2] =")), "unlike its original"),
    (15, swapped(SWAP, ("%2: f32[4] =", "%2: f32[4] @s1 =")), "shares its original's storage"),
]
