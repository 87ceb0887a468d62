"""Facts are what operators really ask of the allocator, measured once."""

import warnings
from pathlib import Path

import pytest
import torch
from tests.unit.run import graphs

from lowtide.analysis.facts import workspace_bytes
from lowtide.ir.text import parse_graph
from lowtide.run import probe as probing
from lowtide.run.calls import out_variant
from lowtide.run.probe import probe, probe_tree, variant_of
from lowtide.run.store import ProfileStore


def test_storage_larger_than_the_result_is_seen() -> None:
    graph = parse_graph(
        "input %0: f32[64,64]\ninput %1: f32[64,64]\n%2: f32[] = aten.mse_loss.default(%0, %1)\nreturn %2\n"
    )
    node = graph.nodes[0]
    reference = probe(graph, "reference", store=ProfileStore(None))[node.id]
    assert reference.output_bytes == (64 * 64 * 4,)
    assert reference.transient_bytes >= 2 * 64 * 64 * 4
    arena = probe(graph, "arena", store=ProfileStore(None))[node.id]
    assert arena.output_bytes == (4,)  # the big storage is a temporary, the number is copied out of it
    assert variant_of(node.op, arena) == "copied"  # type: ignore[arg-type]


def test_out_form_that_resizes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph(
        "input %0: f32[64,64]\ninput %1: f32[64,64]\n%2: f32[] = aten.mse_loss.default(%0, %1)\nreturn %2\n"
    )
    monkeypatch.setattr("lowtide.run.calls._RESIZING", frozenset())
    out_variant.cache_clear()
    try:
        assert out_variant("aten.mse_loss.default") is not None
        facts = probe(graph, "arena", store=ProfileStore(None))[2]
        assert variant_of(graph.nodes[0].op, facts) == "copied"  # type: ignore[arg-type]
        assert facts.output_bytes == (4,)
    finally:
        out_variant.cache_clear()


def test_sequence_names_outputs_and_temporaries() -> None:
    graph = graphs.network()
    facts = probe(graph, "arena", store=ProfileStore(None))
    conv = facts[4]
    outputs = [target for _, target in conv.sequence if target >= 0]
    assert outputs == [0] and conv.output_bytes == (4 * 8 * 16 * 16 * 4,)
    assert {-1 - target for _, target in conv.sequence if target < 0} == set(range(len(conv.temps)))
    assert workspace_bytes(graph, graph.node[4], facts) == conv.transient_bytes - conv.output_bytes[0]
    assert facts[9].transient_bytes == 0  # a view
    assert variant_of(graph.node[4].op, conv) == "served"  # type: ignore[arg-type]
    assert variant_of(graph.node[10].op, facts[10]) == "out"  # type: ignore[arg-type]


def test_python_number_is_a_temporary() -> None:
    graph = graphs.network()
    facts = probe(graph, "reference", store=ProfileStore(None))[10]
    assert [temp.nbytes for temp in facts.temps] == [8, 4]
    assert facts.transient_bytes == facts.output_bytes[0] + 12


def test_arena_workspace_does_not_exceed_what_the_allocator_holds_by_more_than_padding() -> None:
    graph = graphs.network()
    store = ProfileStore(None)
    reference, arena = probe(graph, "reference", store=store), probe(graph, "arena", store=store)
    for node in graph.nodes:
        padding = 64 * (len(arena[node.id].temps) + 1)
        assert arena[node.id].transient_bytes <= reference[node.id].transient_bytes + padding


def test_equal_nodes_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph(
        "input %0: f32[8,8]\n%1: f32[8,8] = aten.exp.default(%0)\n%2: f32[8,8] = aten.exp.default(%1)\n"
        "%3: f32[8,8] = aten.sin.default(%2)\nreturn %3\n"
    )
    calls: list[str] = []
    measure = probing._Prober._measure

    def count(self: probing._Prober, graph: object, node: object) -> object:
        calls.append(str(node))
        return measure(self, graph, node)  # type: ignore[arg-type]

    monkeypatch.setattr(probing._Prober, "_measure", count)
    first = probe(graph, store=ProfileStore(tmp_path / "profile.sqlite"))
    assert len(calls) == 2
    again = probe(graph, store=ProfileStore(tmp_path / "profile.sqlite"))
    assert len(calls) == 2 and again == first


def test_update_follows_from_its_body() -> None:
    graph = graphs.update()
    store = ProfileStore(None)
    nbytes = 32 * 16 * 4
    reference = probe(graph, "reference", store=store)[9]
    assert reference.transient_bytes == 2 * nbytes  # the scaled state and its root
    tree = probe_tree(graph, "arena", store=store)
    assert tree.keys() == {(), (9,)}
    assert tree[()][9].transient_bytes < 2 * nbytes  # the root is written over what it is taken of


def test_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    probe(graphs.random_graph(), store=ProfileStore(None))
    assert torch.equal(before, torch.get_rng_state())


def test_operator_that_fails_is_assumed_with_a_warning() -> None:
    graph = parse_graph(
        "input %0: f32[3,4]\ninput %1: f32[3,4]\n"
        "%2: f32[3,4] = aten.mm.default(%0, %1)  # enc.0 model.py:3\nreturn %2\n"
    )
    with pytest.warns(
        RuntimeWarning, match=r"aten\.mm\.default \(node 2, enc\.0\) fails on made-up operands"
    ):
        facts = probe(graph, store=ProfileStore(None))
    assert facts[2].output_bytes == (48,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            probe(graph, store=ProfileStore(None))


def test_an_out_form_that_computes_something_else_is_not_used() -> None:
    """Batch norm without running statistics, of a slice of channels."""
    name = "aten._native_batch_norm_legit.no_stats"
    graph = parse_graph(
        "input %0: f64[2,16,4,4](1024,16,4,1)\n"
        f"%1: f64[2,16,4,4], %2: f64[16], %3: f64[16] = {name}(%0, None, None, True, 0.1, 1e-05)\nreturn %1\n"
    )
    node = graph.nodes[0]
    assert out_variant(name) is not None
    facts = probe(graph, "arena", store=ProfileStore(None))[node.id]
    assert variant_of(node.op, facts) == "served"  # type: ignore[arg-type]


def test_what_nobody_measured_is_run_and_copied() -> None:
    graph = parse_graph(
        "input %0: f32[8,8]\n%1: f32[8,8] = aten.exp.default(%0)\n"
        "%2: f32[8,8] = aten.copy.default(%1, %0)\nreturn %2\n"
    )
    facts = probe(graph, "assumed", store=ProfileStore(None))
    exponential, copy = graph.nodes
    assert facts[1].assumed and facts[1].sequence == () and facts[1].output_bytes == (256,)
    assert variant_of(exponential.op, facts[1]) == "copied"  # type: ignore[arg-type]
    assert variant_of(copy.op, facts[2]) == "out"  # type: ignore[arg-type]  # it is Lowtide's own
    assert not probe(graph, "arena", store=ProfileStore(None))[1].assumed


def test_an_operator_that_fails_takes_its_result_outside_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: object, node: object) -> list[object]:
        raise RuntimeError("not with these")

    monkeypatch.setattr(probing, "make_operands", fail)
    graph = parse_graph("input %0: f32[8,8]\n%1: f32[8,8] = aten.exp.default(%0)\nreturn %1\n")
    with pytest.warns(RuntimeWarning, match="its memory is assumed: not with these"):
        facts = probe(graph, "arena", store=ProfileStore(None))
    assert facts[1].assumed and facts[1].foreign_bytes == 256


def test_an_out_form_that_fails_on_outputs_in_one_storage_is_not_used() -> None:
    """linalg.qr asks whether its outputs are aliases, which in the arena they all are."""
    graph = parse_graph(
        "input %0: f64[6,4]\n"
        "%1: f64[6,4](1,6), %2: f64[4,4](1,4) = aten.linalg_qr.default(%0)\nreturn %1, %2\n"
    )
    facts = probe(graph, "arena", store=ProfileStore(None))[graph.nodes[0].id]
    assert out_variant("aten.linalg_qr.default") is not None
    assert variant_of(graph.nodes[0].op, facts) == "served"  # type: ignore[arg-type]
