"""The printed form: what hand-written text means, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from lowtide.ir import Aten, Fission, Fused, Graph, Merge, Origin, Part, Ref, Role, Slice, TensorMeta
from lowtide.ir.text import TextError, parse_graph, print_graph, print_node

SMALL = """
# a comment
input %0: f32[8,16]
input %1: f32[16,16] param

%2: f32[16,16](1,16) @s1 = aten.t.default(%1)
%4: f32[8,16] = aten.mm.default(%0, %2)  # enc.0 model.py:31
n9: aten.copy_.default(%1!, %2)  # - - update
%5: f32[3] @s4+2 = aten.slice.Tensor(%4, 0)
%6: f32[8,16] output = aten.mul.Tensor(%4, %4)
return %6
"""


def only_arg(text: str) -> object:
    graph = parse_graph(f"%1: f32[2] = aten.x.default({text})")
    op = graph.nodes[0].op
    assert isinstance(op, Aten)
    return op.args[0]


def test_defaults_of_hand_written_text() -> None:
    graph = parse_graph(SMALL)
    assert graph.inputs == (0, 1)
    assert graph.outputs == (6,)
    assert [node.id for node in graph.nodes] == [2, 4, 9, 5, 6]
    assert graph.values[2].meta == TensorMeta((16, 16), (1, 16), torch.float32)
    assert graph.storages[0].role is Role.INPUT
    assert graph.storages[4].role is Role.TEMP
    assert graph.storages[4].nbytes == 8 * 16 * 4
    assert (graph.values[5].storage, graph.values[5].offset) == (4, 2)
    assert graph.node[4].origin == Origin("enc.0", "model.py:31")
    assert graph.node[9].origin == Origin(phase="update")
    assert graph.node[9].writes == (1,)


def test_a_value_that_is_mentioned_twice_is_one_input() -> None:
    node = parse_graph(SMALL).node[6]
    assert node.inputs == (4,)
    assert node.op == Aten("aten.mul.Tensor", (Ref(0), Ref(0)))


def test_printing_returns_the_canonical_text() -> None:
    text = print_graph(parse_graph(SMALL))
    assert text == SMALL.lstrip("\n").replace("# a comment\n", "").replace("\n\n", "\n").replace(
        "@s1 ", "@s1+0 "
    )
    assert parse_graph(text) == parse_graph(SMALL)


def test_the_next_unused_number_is_the_id_of_a_node_without_outputs() -> None:
    graph = parse_graph("input %0: f32[2] param\naten.neg_.default(%0!)\naten.neg_.default(%0!)")
    assert [node.id for node in graph.nodes] == [1, 2]


def test_other_inputs_than_the_arguments_in_order() -> None:
    graph = parse_graph(
        "input %0: f32[2]\ninput %1: f32[2]\n%2: f32[2] = aten.sub.Tensor($1, $0) <- (%0, %1)"
    )
    assert graph.nodes[0].inputs == (0, 1)
    assert graph.nodes[0].op == Aten("aten.sub.Tensor", (Ref(1), Ref(0)))
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2", -2),
        ("1.0", 1.0),
        ("1e-05", 1e-05),
        ("-inf", -math.inf),
        ("True", True),
        ("None", None),
        ('"say \\"no\\"\\n"', 'say "no"\n'),
        ("[1, [2.5, None], []]", (1, (2.5, None), ())),
        ("complex(0.0, -1.5)", -1.5j),
        ("bf16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ('device("cuda:1")', torch.device("cuda", 1)),
        ("strided", torch.strided),
        ("channels_last", torch.channels_last),
    ],
)
def test_literals(text: str, value: object) -> None:
    found = only_arg(text)
    assert found == value
    assert type(found) is type(value)
    graph = parse_graph(f"%1: f32[2] = aten.x.default({text}, k={text})")
    assert f"({text}, k={text})" in print_graph(graph)


def test_nan_keeps_its_place() -> None:
    found = only_arg("nan")
    assert isinstance(found, float)
    assert math.isnan(found)
    assert "(nan)" in print_graph(parse_graph("%1: f32[2] = aten.x.default(nan)"))


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        ("f32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bool", torch.bool),
        ("i64", torch.int64),
        ("u8", torch.uint8),
        ("c64", torch.complex64),
        ("float8_e5m2", torch.float8_e5m2),
    ],
)
def test_element_types(word: str, dtype: torch.dtype) -> None:
    graph = parse_graph(f"input %0: {word}[2]")
    assert graph.values[0].meta.dtype is dtype
    assert print_graph(graph).startswith(f"input %0: {word}[2]")


def test_zero_sized_and_odd_strides() -> None:
    text = "input %0: f32[0,3]\ninput %1: f32[1,3](7,1)\ninput %2: f32[2,3](0,1)\nreturn\n"
    graph = parse_graph(text)
    assert graph.values[0].meta.stride == (3, 1)
    assert graph.storages[0].nbytes == 0
    assert graph.storages[2].nbytes == 12
    assert print_graph(graph) == text


def test_bodies() -> None:
    text = """
    input %0: f32[8]
    %1: f32[8] = fused "kernel"(%0) {  # act
      input %3: f32[8] temp
      %4: f32[8] = aten.relu.default(%3)
      return %4
    }
    %2: f32[8] output = fission(%1) merge [write] {
      body {
        input %0: f32[4] temp
        %1: f32[4] = aten.relu.default(%0)
        return %1
      }
      part 0 [0:0:4] -> [0:0:4]
      part 0 [0:4:8] -> [0:4:8]
    }
    return %2
    """
    graph = parse_graph(text)
    fused, fission = (node.op for node in graph.nodes)
    assert isinstance(fused, Fused)
    assert fused.body.inputs == (3,)
    assert graph.nodes[0].origin.module == "act"
    assert isinstance(fission, Fission)
    assert fission.merges == (Merge.WRITE,)
    assert fission.parts[1] == Part(0, (Slice(0, 4, 8),), (Slice(0, 4, 8),))
    assert parse_graph(print_graph(graph)) == graph


def test_orphans_are_printed() -> None:
    text = "value %3: f32[2]\nstorage s7 12B grad\nreturn\n"
    graph = parse_graph(text)
    assert graph.storages[7].role is Role.GRAD
    assert print_graph(graph) == text


def test_print_node_is_one_line_without_bodies() -> None:
    graph = parse_graph(SMALL)
    assert print_node(graph, graph.node[4]) == "%4: f32[8,16] = aten.mm.default(%0, %2)  # enc.0 model.py:31"


def test_what_is_no_argument_is_refused() -> None:
    graph = parse_graph("input %0: f32[2]")
    node = parse_graph("%1: f32[2] = aten.x.default(1)").nodes[0]
    op = Aten("aten.x.default", ({"a": 1},))  # type: ignore[arg-type]
    bad = Graph((type(node)(1, op, (), ()),), graph.values, graph.storages, (0,), ())
    with pytest.raises(TextError, match="dict has no printed form"):
        print_graph(bad)


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("input %0: f33[2]", 1, "element type"),
        ("input %0: f32[2] parm", 1, "expected a role"),
        ("input %0: f32[2](1,1)", 1, "1 sizes but 2 strides"),
        ("input %0: f32[2]\ninput %0: f32[2]", 2, "%0 is declared twice"),
        ("input %0: f32[2]\n%1: f32[2] @s0 8B = aten.x.default(%0)", 2, "has its size and role already"),
        ("input %1: f32[2] @s0\ninput %0: f32[2]", 2, "say on which storage"),
        ("# x\n\n%1: f32[2] = relu(%0)", 3, "'relu' is no operation"),
        ("%1: f32[2] = aten.relu.default(%0", 1, "expected"),
        ("%1: f32[2] = aten.relu.default(foo)", 1, "expected an argument"),
        ("%1: f32[2] = aten.relu.default(%0) ; x", 1, "unexpected character ';'"),
        ("%1: f32[2] = fission(%0) merge [max] {\n}", 1, "expected a merge"),
        ('%1: f32[2] = fused "kernel"(%0) {\n  return', 2, "expected"),
        ('%1: f32[2] = aten.x.default(device("gpu?"))', 1, "no device"),
        ("%1: f32[2] = aten.x.default(complex(1.0))", 1, "two parts"),
    ],
)
def test_slips_are_found_at_their_line(text: str, line: int, word: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_graph(text)
    assert f"line {line}: " in str(caught.value)
    assert word in str(caught.value)
    assert len(str(caught.value)) < 160
