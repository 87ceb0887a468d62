"""Axis rules of matrix products, convolutions and attention, forward and backward.

A bias makes the contracted dimension indivisible (each part would add it again), so `addmm` and a
convolution with bias have no sum; `mm` has.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.analysis.axis import Call, Link, Rule, Scaled, einsum, masked

__all__ = ["PRODUCT_RULES"]


def _linear(call: Call) -> Iterator[Link]:
    contracted = "K" if call.has("bias") else "k"
    rule = einsum(f"input=*{contracted} weight=n{contracted} bias=n -> *n")
    return iter(rule(call))


def _convolution(call: Call) -> Iterator[Link]:
    """Batch; output channels; input channels (a sum) without bias; groups."""
    rank = call.rank("input")
    if rank != call.rank("weight"):
        return  # no batch dimension
    transposed, groups = call.integer("transposed"), call.integer("groups")
    batch, channels = call.shape("input")[:2]
    yield Link(batch, {"input": 0}, (0,))
    if groups > 1:
        yield Link(groups, {"input": 1, "weight": 0, "bias": 0}, (1,), (("groups", None),))
        return
    yield Link(call.outputs[0].shape[1], {"weight": 1 if transposed else 0, "bias": 0}, (1,))
    if not call.has("bias"):
        yield Link(channels, {"input": 1, "weight": 0 if transposed else 1}, (None,))


_GRADIENTS = ("input", "weight", "bias")


def _convolution_backward(call: Call) -> Iterator[Link]:
    """As `_convolution`; summed over the batch are the gradients of weight and bias."""
    transposed, groups = call.integer("transposed"), call.integer("groups")
    wanted = masked(call, "output_mask", _GRADIENTS)
    bias: Scaled = (("bias_sizes", 0),) if call.has("bias_sizes") else ()
    batch, channels = call.shape("input")[:2]

    def outputs(**dims: int | None) -> tuple[int | None, ...]:
        return tuple(dims.get(name) for name in wanted)

    yield Link(batch, {"grad_output": 0, "input": 0}, outputs(input=0))
    if groups > 1:
        cut = {"grad_output": 1, "input": 1, "weight": 0}
        yield Link(groups, cut, outputs(input=1, weight=0, bias=0), (("groups", None), *bias))
        return
    out, into = (1, 0) if transposed else (0, 1)
    cut = {"grad_output": 1, "weight": out}
    yield Link(call.shape("grad_output")[1], cut, outputs(weight=out, bias=0), bias)
    if "bias" not in wanted:  # each part would give the whole bias gradient
        yield Link(channels, {"input": 1, "weight": into}, outputs(input=1, weight=into))


def _attention(call: Call) -> Iterator[Link]:
    """A causal mask counts rows and columns from 0, so only its batch and heads can be cut."""
    if call.arguments["dropout_p"] != 0.0:
        return iter(())
    query = "Q" if call.integer("is_causal") else "q"
    rule = einsum(f"query=bh{query}D key=bhKD value=bhKD attn_mask=bh{query}K -> bh{query}D bh{query}")
    return iter(rule(call))


def _attention_backward(call: Call) -> Iterator[Link]:
    """With the forward's log-sum-exp given, keys are independent too: the query gradient is a sum."""
    if call.arguments["dropout_p"] != 0.0:
        return iter(())
    q, k = ("Q", "K") if call.integer("is_causal") else ("q", "k")
    rule = einsum(
        f"grad_out=bh{q}D query=bh{q}D key=bh{k}D value=bh{k}D out=bh{q}D logsumexp=bh{q} "
        f"attn_mask=bh{q}{k} -> bh{q}D bh{k}D bh{k}D"
    )
    return iter(rule(call))


PRODUCT_RULES: dict[str, Rule] = {
    "aten.mm.default": einsum("self=mk mat2=kn -> mn"),
    "aten.bmm.default": einsum("self=bmk mat2=bkn -> bmn"),
    "aten.addmm.default": einsum("self=mn mat1=mK mat2=Kn -> mn"),
    "aten.baddbmm.default": einsum("self=bmn batch1=bmK batch2=bKn -> bmn"),
    "aten.mv.default": einsum("self=mk vec=k -> m"),
    "aten.addmv.default": einsum("self=m mat=mK vec=K -> m"),
    "aten.dot.default": einsum("self=k tensor=k -> -"),
    "aten.linear.default": _linear,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
}
