"""Loop axes of one operator call: what may be split, and how the parts become the whole.

Problem.  ATen operators do not say which of their dimensions are independent loops, which are sums,
and which are neither.  Fission has to know exactly that, for inputs and outputs.

Method.  A rule looks at one `Call` (arguments by schema name, shapes) and yields `Link`s: for one
loop, the dimension of each argument and output that it runs over.  `Axis` is the same thing by input
position.  Rules of fixed rank are written like einsum ("self=mk mat2=kn -> mn"); `einsum` turns the
text into a rule.

Invariants.  Cutting every listed dimension into [start, stop) at the same fraction, running the
operator on that part (integer arguments in `scaled` cut in the same proportion) and merging the
results gives the whole: WRITE where an output has the dimension, ADD where it lacks it and the loop
is a sum (LOGSUMEXP and MOMENTS likewise, see `lowtide.analysis.merging`).  A part begins and ends at
multiples of ``size / extent``.  A dimension of size 1 that is broadcast is shared, never cut.
`tests/property/test_axis_rules.py` checks each rule on real inputs.

Not done here.  Halos (`lowtide.analysis.windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from lowtide.ir.aten import resolve
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Arg, Aten, Merge, Ref, refs_in

__all__ = [
    "Axis",
    "Call",
    "Dims",
    "Link",
    "Rule",
    "Scaled",
    "arguments_of",
    "at_part",
    "axis_of",
    "describe_call",
    "einsum",
    "is_pointwise",
    "masked",
    "with_argument",
]

Dims = tuple[int | None, ...]
"""Per tensor the dimension that is cut; None: shared by all parts (input) or merged (output)."""

Scaled = tuple[tuple[str, int | None], ...]
"""Integer arguments that shrink with the part: (name, element of the list or None)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop of an operator call.

    extent: number of indivisible units; every cut size is a multiple of it.
    inputs, outputs: the dimension of each of the node's inputs and outputs.
    merges: per output; None means that no merge is right, so the output must not be needed outside.
    """

    extent: int
    inputs: Dims
    outputs: Dims
    merges: tuple[Merge | None, ...]
    scaled: Scaled = ()


@dataclass(frozen=True)
class Link:
    """An `Axis` by argument name, as rules write it; a list argument takes a tuple of dimensions.

    Arguments that are absent are shared.  Outputs without the dimension are sums over it, except
    those in `unmerged`, which no merge makes right, or are combined by another `merge`.
    """

    extent: int
    arguments: Mapping[str, int | Dims | None]
    outputs: Dims
    scaled: Scaled = ()
    unmerged: tuple[int, ...] = ()
    merge: Merge = Merge.ADD


@dataclass(frozen=True)
class Call:
    """One operator call: TensorMeta, number, tuple or None per schema argument (defaults filled in)."""

    overload: str
    arguments: Mapping[str, object]
    outputs: tuple[TensorMeta, ...]

    def meta(self, name: str) -> TensorMeta:
        """The tensor argument `name`; raises KeyError if the call has none."""
        found = self.arguments[name]
        if not isinstance(found, TensorMeta):
            raise KeyError(f"argument {name} of {self.overload} is not a tensor here")
        return found

    def has(self, name: str) -> bool:
        """Whether `name` is present and not None."""
        return self.arguments.get(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor argument `name`."""
        return self.meta(name).shape

    def rank(self, name: str) -> int:
        """Number of dimensions of the tensor argument `name`."""
        return len(self.meta(name).shape)

    def tensors(self, name: str) -> tuple[TensorMeta | None, ...]:
        """The entries of a list argument, None where an entry is no tensor."""
        found = self.arguments[name]
        entries = found if isinstance(found, tuple) else (found,)
        return tuple(entry if isinstance(entry, TensorMeta) else None for entry in entries)

    def integer(self, name: str) -> int:
        """An integer (or bool) argument."""
        found = self.arguments[name]
        if not isinstance(found, int):
            raise KeyError(f"argument {name} of {self.overload} is not an integer here")
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """An integer list; a single integer counts as a list of one, None as empty."""
        found = self.arguments[name]
        if isinstance(found, int):
            return (found,)
        return tuple(item for item in found if isinstance(item, int)) if isinstance(found, tuple) else ()

    def dim(self, name: str, rank: int) -> int:
        """An argument that names a dimension of a tensor of `rank`, made non-negative."""
        return self.integer(name) % max(rank, 1)

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """A list of dimensions made non-negative; an empty or absent list means all."""
        return tuple(dim % max(rank, 1) for dim in self.integers(name)) or tuple(range(rank))


Rule = Callable[[Call], Iterable[Link]]


@cache
def _schema(overload: str) -> tuple[tuple[str, object], ...]:
    """Argument names with their defaults, in order."""
    schema = resolve(overload)._schema
    return tuple((str(argument.name), argument.default_value) for argument in schema.arguments)


def arguments_of(op: Aten) -> dict[str, Arg]:
    """The arguments of `op` by schema name; those left at their default are absent."""
    names = [name for name, _ in _schema(op.overload)]
    return {**dict(zip(names, op.args, strict=False)), **dict(op.kwargs)}


def describe_call(op: Aten, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> Call:
    """`op` with its arguments by name and its tensors as TensorMeta."""

    def fill(arg: object) -> object:
        if isinstance(arg, Ref):
            return inputs[arg.index]
        if isinstance(arg, tuple | list):
            return tuple(fill(item) for item in arg)
        return arg

    arguments = {name: fill(default) for name, default in _schema(op.overload)}
    arguments.update({name: fill(arg) for name, arg in arguments_of(op).items()})
    return Call(op.overload, arguments, outputs)


def axis_of(op: Aten, link: Link, inputs: int) -> Axis | None:
    """`link` by input position; None if one input would have to be cut in two ways."""
    found: dict[int, int | None] = {}
    for name, arg in arguments_of(op).items():
        positions = refs_in(arg)
        if not positions:
            continue
        dims = link.arguments.get(name)
        per_ref = dims if isinstance(dims, tuple) else (dims,) * len(positions)
        for position, dim in zip(positions, per_ref, strict=True):
            if found.setdefault(position, dim) != dim:
                return None
    merges = tuple(
        Merge.WRITE if dim is not None else None if position in link.unmerged else link.merge
        for position, dim in enumerate(link.outputs)
    )
    return Axis(
        extent=link.extent,
        inputs=tuple(found.get(position) for position in range(inputs)),
        outputs=link.outputs,
        merges=merges,
        scaled=link.scaled,
    )


def at_part(op: Aten, axis: Axis, part: int, whole: int) -> Aten:
    """`op` for a part of ``part / whole`` of the axis: its integer arguments in `axis.scaled` shrink.

    Raises ValueError if such an argument does not divide.
    """
    for name, element in axis.scaled:
        op = with_argument(op, name, _scale(arguments_of(op)[name], element, part, whole))
    return op


def _scale(arg: Arg, element: int | None, part: int, whole: int) -> Arg:
    if isinstance(arg, tuple) and element is not None:
        return tuple(_scale(item, None, part, whole) if k == element else item for k, item in enumerate(arg))
    if not isinstance(arg, int):
        raise ValueError(f"{arg!r} is not a size that can be cut")
    if arg == -1:
        return arg
    if arg * part % whole:
        raise ValueError(f"size {arg} cannot be cut to {part}/{whole}")
    return arg * part // whole


def with_argument(op: Aten, name: str, new: Arg) -> Aten:
    """`op` with another value for the schema argument `name`, wherever it is passed.

    Raises ValueError if the operator has no such argument.
    """
    schema = _schema(op.overload)
    position = [each for each, _ in schema].index(name)
    if name in dict(op.kwargs):
        return replace(op, kwargs=tuple((key, new if key == name else old) for key, old in op.kwargs))
    if position < len(op.args):
        return replace(op, args=(*op.args[:position], new, *op.args[position + 1 :]))
    between = tuple(_as_arg(default) for _, default in schema[len(op.args) : position])
    return replace(op, args=(*op.args, *between, new))


def _as_arg(default: object) -> Arg:
    """A schema's default value as an argument of the graph."""
    if isinstance(default, list | tuple):
        return tuple(_as_arg(item) for item in default)
    assert default is None or isinstance(default, int | float | str)
    return default


# --- rules of fixed rank, written like einsum -----------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    operands: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    mask: str
    scaled: Mapping[str, Scaled]


def einsum(text: str, mask: str = "", scaled: Mapping[str, Scaled] | None = None) -> Rule:
    """A rule from text: ``"self=mk mat2=kn -> mn"``.

    Lower-case letters are loops, upper-case ones are never cut.  ``*`` stands for any number of
    loops, ``#`` for any number of dimensions that are never cut, ``-`` for no dimension.  Operands
    of lower rank are aligned at the right; a dimension of size 1 is broadcast.  A loop that an
    output lacks is a sum; an output without elements is ignored.  `mask` names the argument that
    says which outputs exist.  `scaled` names, per letter (``*0`` is the first of ``*``), integer
    arguments that shrink.
    """
    left, right = text.split("->")
    operands = tuple((name, letters) for name, _, letters in (item.partition("=") for item in left.split()))
    spec = _Spec(operands, tuple(right.split()), mask, dict(scaled or {}))
    return lambda call: _einsum_links(call, spec)


def masked(call: Call, mask: str, results: tuple[str, ...]) -> tuple[str, ...]:
    """The entries of `results` whose output exists, by the bool list argument `mask`."""
    wanted = call.integers(mask)
    return tuple(each for each, keep in zip(results, wanted, strict=True) if keep)


def _letters(pattern: str, rank: int) -> tuple[str, ...] | None:
    """One letter per dimension; None if the pattern does not fit the rank."""
    pattern = "" if pattern == "-" else pattern
    wild = next((mark for mark in "*#" if mark in pattern), None)
    if wild is None:
        letters = tuple(pattern)
    else:
        before, after = pattern.split(wild)
        many = rank - len(before) - len(after)
        name = "*" if wild == "*" else "D"
        letters = (*before, *(f"{name}{k}" for k in range(many)), *after)
    return letters[len(letters) - rank :] if rank <= len(letters) else None


_Lettered = tuple[tuple[str, ...], tuple[int, ...]]
"""Letters and sizes of one operand, in order of its dimensions."""


def _einsum_links(call: Call, spec: _Spec) -> Iterator[Link]:
    inputs: dict[str, _Lettered] = {}
    outputs: list[_Lettered] = []
    for name, pattern in spec.operands:
        if call.has(name):
            shape = call.shape(name)
            letters = _letters(pattern, len(shape))
            if letters is None:
                return
            inputs[name] = (letters, shape)
    results = masked(call, spec.mask, spec.results) if spec.mask else spec.results
    empty = tuple(position for position, out in enumerate(call.outputs) if out.numel == 0)
    for pattern, out in zip(results, call.outputs, strict=True):
        letters = _letters(pattern, len(out.shape))
        if letters is None:
            return
        outputs.append((letters, out.shape) if out.numel else ((), ()))
    for letter, extent in _loops([*inputs.values(), *outputs]).items():
        dims = tuple(_find(letter, operand, extent) for operand in outputs)
        if any(dim is None and letter in letters for dim, (letters, _) in zip(dims, outputs, strict=True)):
            continue  # an output is broadcast: that is no loop of it
        arguments = {name: _find(letter, operand, extent) for name, operand in inputs.items()}
        yield Link(extent, arguments, dims, spec.scaled.get(letter, ()), empty)


def _loops(operands: Iterable[_Lettered]) -> dict[str, int]:
    """The letters that may be cut, with their size."""
    sizes: dict[str, set[int]] = {}
    for letters, shape in operands:
        for letter, size in zip(letters, shape, strict=True):
            if not letter[0].isupper():
                sizes.setdefault(letter, set()).add(size)
    return {letter: max(seen) for letter, seen in sizes.items() if max(seen) > 1 and seen <= {1, max(seen)}}


def _find(letter: str, operand: _Lettered, extent: int) -> int | None:
    for dim, (each, size) in enumerate(zip(*operand, strict=True)):
        if each == letter and size == extent:
            return dim
    return None


def is_pointwise(overload: str) -> bool:
    """Whether PyTorch tags the operator as pointwise, and it is neither random nor in place."""
    operator = resolve(overload)
    tags = operator.tags
    if torch.Tag.nondeterministic_seeded in tags or operator._schema.is_mutable:
        return False
    return torch.Tag.pointwise in tags
