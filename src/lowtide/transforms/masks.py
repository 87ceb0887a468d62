"""Dropout masks as bits: what a Bernoulli node draws is kept in one bit an element.

Problem.  A mask is drawn once and never again, so it lives from forward to backward, or through a whole
Fission that reads slices of it: four bytes an element for one bit of information.

rewrite:    m = bernoulli(x, p)   ->   bits = pack(bernoulli(x, p)); m = unpack(bits)
            pack:    the last dimension in eights, as a product with (1, 2, 4, ..., 128), to uint8
            unpack:  bits & (1, 2, 4, ..., 128) != 0, to the mask's type
            A last dimension that is no multiple of 8 is kept as bool, one byte an element.
legal when: the mask is contiguous, is no result of the graph, and somebody reads it.
effect:     the drawn tensor dies at once; `unpack` may be recomputed and cut like any pointwise node; a
            few passes over the mask are added.  Exact: sums of distinct powers of two up to 255 are.

Not done.  One kernel for the whole of pack or unpack (fusion makes it).
"""

from __future__ import annotations

import torch

from lowtide.ir import Aten, Edit, Graph, Node, Ref, TensorMeta
from lowtide.ir.graph import Role
from lowtide.ir.ops import Arg
from lowtide.transforms.draft import Draft

__all__ = ["pack_masks"]

_DRAW = "aten.bernoulli.p"
_BITS = 8


def pack_masks(graph: Graph) -> Edit:
    """Keep every mask as bits; masks keep their value ids, which `unpack` now defines."""
    found = graph.memo.get(pack_masks)
    if not isinstance(found, Edit):
        found = graph.memo[pack_masks] = _pack_masks(graph)
    return found


def _pack_masks(graph: Graph) -> Edit:
    draft = Draft(graph)
    powers: dict[torch.dtype, int] = {}
    for node in graph.nodes:
        if _packs(graph, node):
            _emit_packed(draft, node, powers)
        else:
            draft.nodes.append(node)
    changed = len(draft.nodes) > len(graph)
    return Edit(draft.graph(graph.inputs, graph.outputs)) if changed else Edit(graph)


def _packs(graph: Graph, node: Node) -> bool:
    if not isinstance(node.op, Aten) or node.op.overload != _DRAW:
        return False
    (mask,) = node.outputs
    meta, storage = graph.values[mask].meta, graph.storage_of(mask)
    packed = all(_is_pack(graph.node[reader]) for reader in graph.readers[mask])
    return meta.contiguous and meta.numel > 0 and storage.role is Role.TEMP and not packed


def _is_pack(node: Node) -> bool:
    """Whether a reader is the first step of `pack` already: the draw itself is then a temporary."""
    if not isinstance(node.op, Aten):
        return False
    dtype = dict(node.op.kwargs).get("dtype")
    eights = node.op.overload == "aten.view.default" and node.op.args[1] == (-1, _BITS)
    return eights or (node.op.overload == "aten._to_copy.default" and dtype is torch.bool)


def _emit_packed(draft: Draft, node: Node, powers: dict[torch.dtype, int]) -> None:
    assert isinstance(node.op, Aten)
    (mask,) = node.outputs
    meta = draft.values[mask].meta
    (drawn,) = draft.emit(node.op, node.inputs, node.origin, node=node.id)
    if meta.shape and meta.shape[-1] % _BITS == 0:
        flags = _through_bits(draft, node, drawn, meta, powers)
    else:
        (flags,) = draft.emit(_cast(torch.bool), (drawn,), node.origin)
    draft.emit(_cast(meta.dtype), (flags,), node.origin, outputs=(mask,))


def _cast(dtype: torch.dtype) -> Aten:
    return Aten("aten._to_copy.default", (Ref(0),), (("dtype", dtype),))


def _through_bits(
    draft: Draft, node: Node, drawn: int, meta: TensorMeta, powers: dict[torch.dtype, int]
) -> int:
    """Pack and unpack; gives the flags as bool, in the mask's shape."""
    origin = node.origin
    short = (*meta.shape[:-1], meta.shape[-1] // _BITS)
    weights = _emit_powers(draft, node, meta.dtype, powers)
    (eights,) = draft.emit(_view((-1, _BITS)), (drawn,), origin)
    (sums,) = draft.emit(Aten("aten.mv.default", (Ref(0), Ref(1))), (eights, weights), origin)
    (packed,) = draft.emit(_cast(torch.uint8), (sums,), origin)
    (bits,) = draft.emit(_view((*short, 1)), (packed,), origin)
    single = _emit_powers(draft, node, torch.uint8, powers)
    (masked,) = draft.emit(Aten("aten.bitwise_and.Tensor", (Ref(0), Ref(1))), (bits, single), origin)
    (flags,) = draft.emit(Aten("aten.ne.Scalar", (Ref(0), 0)), (masked,), origin)
    (whole,) = draft.emit(_view(meta.shape), (flags,), origin)
    return whole


def _view(shape: tuple[int, ...]) -> Aten:
    return Aten("aten.view.default", (Ref(0), shape))


def _emit_powers(draft: Draft, node: Node, dtype: torch.dtype, powers: dict[torch.dtype, int]) -> int:
    """The vector (1, 2, 4, ..., 128), made once per element type."""
    if dtype not in powers:
        device: Arg = torch.device(draft.values[node.outputs[0]].meta.device)
        counting = Aten("aten.arange.default", (_BITS,), (("device", device), ("dtype", torch.int64)))
        (exponents,) = draft.emit(counting, (), node.origin)
        (whole,) = draft.emit(Aten("aten.pow.Scalar", (2, Ref(0))), (exponents,), node.origin)
        (powers[dtype],) = draft.emit(_cast(dtype), (whole,), node.origin)
    return powers[dtype]
