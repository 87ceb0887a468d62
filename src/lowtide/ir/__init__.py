"""The frozen graph: one small noun that every other part reads."""

from lowtide.ir.edit import Edit
from lowtide.ir.graph import Graph, Node, Origin, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Aten, Fission, Fused, Load, Merge, Op, Part, Ref, Scalar, Slice, Store

__all__ = [
    "Aten",
    "Edit",
    "Fission",
    "Fused",
    "Graph",
    "Load",
    "Merge",
    "Node",
    "Op",
    "Origin",
    "Part",
    "Ref",
    "Role",
    "Scalar",
    "Slice",
    "Storage",
    "Store",
    "TensorMeta",
    "Value",
]
