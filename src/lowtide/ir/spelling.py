"""How single words of the printed form are spelled: element types, devices, literals.

Problem.  `print_graph` and `parse_graph` have to agree, exactly, on every argument that an operator
may carry, and reading a text must never run code.

Method.  Tables in both directions, written out; whatever has no word is refused when it is printed,
not when it is read back.

    f32  bf16  i64  bool          element types
    cuda:0/f32[8]                 a device other than the CPU precedes the element type
    $0                            Ref(0): the node's first input
    [1, 2]                        a tuple
    device("cpu")  strided  channels_last  complex(0.0, 1.0)  "text"  None  True  -inf
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import torch

from lowtide.ir.graph import Role, TensorMeta, Value
from lowtide.ir.ops import Arg, Ref, Slice

__all__ = [
    "DTYPES",
    "NAMED",
    "TextError",
    "contiguous_stride",
    "default_bytes",
    "spell_arg",
    "spell_meta",
    "spell_slice",
    "spell_string",
]


class TextError(ValueError):
    """A text is not a graph, or a graph cannot be written as text; the message names the line."""


_SHORT = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
}


def _short_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> ``f32``; types without a plain width keep their own name (``float8_e5m2``)."""
    name = str(dtype).removeprefix("torch.")
    word = name.rstrip("0123456789")
    return _SHORT[word] + name[len(word) :] if word in _SHORT and word != name else name


DTYPES: dict[str, torch.dtype] = {
    _short_name(found): found
    for found in (getattr(torch, name) for name in sorted(dir(torch)))
    if isinstance(found, torch.dtype)
}
"""Word -> element type, for every element type of this torch."""

_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr)

NAMED: dict[str, Arg] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
    **{str(word).removeprefix("torch."): word for word in (*_FORMATS, *_LAYOUTS)},
    **DTYPES,
}
"""Every literal that is a bare word."""


def spell_meta(meta: TensorMeta) -> str:
    """``f32[8,16]``, with strides where they are not contiguous (``f32[8,16](1,8)``)."""
    device = "" if meta.device == "cpu" else f"{meta.device}/"
    shape = ",".join(map(str, meta.shape))
    strides = "" if meta.stride == contiguous_stride(meta.shape) else f"({','.join(map(str, meta.stride))})"
    return f"{device}{_short_name(meta.dtype)}[{shape}]{strides}"


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as PyTorch gives them to a fresh tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def default_bytes(value: Value, role: Role) -> int:
    """The size of a storage that ends where its first value ends; a HOST number has no bytes."""
    return 0 if role is Role.HOST else value.offset * value.meta.dtype.itemsize + value.meta.span_bytes


def spell_arg(arg: Arg, spell_ref: Callable[[Ref], str]) -> str:
    """One argument; `spell_ref` decides how a tensor operand is written."""
    if isinstance(arg, Ref):
        return spell_ref(arg)
    if isinstance(arg, tuple):
        return "[" + ", ".join(spell_arg(item, spell_ref) for item in arg) + "]"
    if isinstance(arg, str):
        return spell_string(arg)
    if isinstance(arg, torch.dtype):
        return _short_name(arg)
    if isinstance(arg, torch.device):
        return f"device({spell_string(str(arg))})"
    if isinstance(arg, complex):
        return f"complex({arg.real!r}, {arg.imag!r})"
    word = (
        str(arg).removeprefix("torch.") if isinstance(arg, torch.layout | torch.memory_format) else repr(arg)
    )
    if arg is None or isinstance(arg, int | float) or word in NAMED:
        return word
    raise TextError(f"{arg!r} of type {type(arg).__name__} has no printed form; it is no Arg")


def spell_slice(piece: Slice) -> str:
    """``0:4:8`` for rows 4 to 8, ``*`` for the whole."""
    if piece == Slice(None):
        return "*"
    return f"{'*' if piece.axis is None else piece.axis}:{piece.start}:{piece.stop}"


def spell_string(text: str) -> str:
    """A quoted string on one line."""
    return json.dumps(text)
