"""Loops whose parts overlap: rows of convolutions, pools, interpolation and padding.

Problem.  Row o of a convolution reads rows ``o * stride - padding`` and the ``reach`` from there: a part
needs more rows than it makes (a halo), and only the first and the last part see the padding.

Method.  A `Window` says for an interval of output rows which input rows it `need`s, and, given the rows
that are there, which it `take`s, which output rows result, and what the operator's arguments are then:

    rows of x       0 . . . . . . . . . . . . 15          3x3 convolution, padding 1, in three parts
    part 0 needs    0 . . . . 5                            makes 0..4 (5 is made too, and wrong: dropped)
    part 1 needs            4 . . . . . 10                 without padding: makes 5..9
    part 2 needs                      9 . . . 15           with padding: makes 10..15 (9, wrong)

A part at the border keeps the operator's own padding on both sides.  What it adds on the inner side makes
rows that are wrong; nobody needs them, and they are carried along or cut off, never read.

Invariants.  Rows in ``take(...).made`` that were asked for are exact: the same products as in the whole.
Extents are in rows; intervals are half-open.  An operator without an entry has no window.

Not done.  Windows with fractional steps (interpolation by a factor that is no whole number, corners
aligned); reflected padding; two spatial axes at once (nest instead).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from lowtide.analysis.axis import Axis, Call, arguments_of, describe_call, with_argument
from lowtide.ir.graph import Graph, Node, TensorMeta
from lowtide.ir.ops import Arg, Aten, Merge, Ref

__all__ = ["Span", "Taken", "Window", "WindowAxis", "windows", "windows_of", "with_arguments"]

Span = tuple[int, int]
"""Rows ``[start, stop)`` of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows that an operator is given, those that it makes, and the arguments that it needs for that.

    arguments: (name, value).  zeros: rows of zeros to put before and behind what it is given.
    """

    used: Span
    made: Span
    arguments: tuple[tuple[str, Arg], ...] = ()
    zeros: Span = (0, 0)


class Window(Protocol):
    """How output rows depend on input rows."""

    def need(self, out: Span) -> Span:
        """The input rows that the output rows `out` depend on."""

    def take(self, out: Span, there: Span) -> Taken:
        """What to run for `out` where the rows `there` (at least those needed) are given."""


@dataclass(frozen=True)
class WindowAxis(Axis):
    """An `Axis` along which parts overlap at the inputs that have a window; elsewhere rows are rows."""

    windows: tuple[Window | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    """One number of an integer list argument."""

    name: str
    numbers: tuple[int, ...]
    element: int

    def at(self, number: int) -> tuple[str, Arg]:
        """The argument with another number."""
        return self.name, tuple(number if k == self.element else n for k, n in enumerate(self.numbers))


@dataclass(frozen=True, slots=True)
class Gather:
    """Output row o reads input rows ``o * stride - padding ... + reach - 1``: convolution, pools."""

    size: int
    reach: int
    stride: int
    padding: int
    argument: Entry

    def _raw(self, out: Span) -> Span:
        first = out[0] * self.stride - self.padding
        return first, (out[1] - 1) * self.stride - self.padding + self.reach

    def need(self, out: Span) -> Span:
        start, stop = self._raw(out)
        if stop > self.size:  # the operator's own padding at the end counts windows from the first row given
            start -= start % self.stride
        return max(start, 0), min(stop, self.size)

    def take(self, out: Span, there: Span) -> Taken:
        first, last = self._raw(out)
        inner = first >= 0 and last <= self.size
        padding = 0 if inner else self.padding
        start = there[0] + ((first if inner else 0) - there[0]) % self.stride
        row = (start + self.padding - padding) // self.stride
        count = (there[1] - start + 2 * padding - self.reach) // self.stride + 1
        return Taken((start, there[1]), (row, row + count), (self.argument.at(padding),))


@dataclass(frozen=True, slots=True)
class Spread:
    """Input row i adds to output rows ``i * stride - padding ... + reach - 1``: transposed convolution."""

    size: int
    reach: int
    stride: int
    padding: int
    extra: int

    def need(self, out: Span) -> Span:
        first = -((self.reach - 1 - out[0] - self.padding) // self.stride)
        last = (out[1] - 1 + self.padding) // self.stride
        # Rows count from the first row given, and padding crops as many rows behind as before.
        first = min(first, out[0] // self.stride)
        cropped = out[1] - 1 - self.extra + 2 * self.padding - (self.reach - 1)
        last = max(last, -(-cropped // self.stride), 0)
        return max(min(first, self.size - 1), 0), min(last + 1, self.size)

    def take(self, out: Span, there: Span) -> Taken:
        row = there[0] * self.stride
        count = (there[1] - there[0] - 1) * self.stride - 2 * self.padding + self.reach + self.extra
        return Taken(there, (row, row + count))


@dataclass(frozen=True, slots=True)
class Scale:
    """Interpolation by a whole factor: nearest (`taps` 0), or from the two nearest rows (`taps` 1)."""

    size: int
    factor: int
    taps: int
    argument: Entry

    def need(self, out: Span) -> Span:
        if not self.taps:
            return out[0] // self.factor, (out[1] - 1) // self.factor + 1
        first = (2 * out[0] + 1 - self.factor) // (2 * self.factor)
        last = (2 * out[1] - 1 - self.factor) // (2 * self.factor) + 1
        return max(first, 0), min(last + 1, self.size)

    def take(self, out: Span, there: Span) -> Taken:
        made = there[0] * self.factor, there[1] * self.factor
        return Taken(there, made, (self.argument.at(made[1] - made[0]),))


@dataclass(frozen=True, slots=True)
class Shift:
    """Rows of a constant before and behind; their numbers are at `place` in `pad`."""

    size: int
    before: int
    behind: int
    pad: tuple[int, ...]
    place: int

    def need(self, out: Span) -> Span:
        start = min(max(out[0] - self.before, 0), self.size - 1)
        return start, max(min(out[1] - self.before, self.size), start + 1)

    def take(self, out: Span, there: Span) -> Taken:
        before = self.before if there[0] == 0 else 0
        behind = self.behind if there[1] == self.size else 0
        made = there[0] + self.before - before, there[1] + self.before + behind
        pad = (*self.pad[: self.place], before, behind, *self.pad[self.place + 2 :])
        return Taken(there, made, (("pad", pad),))


@dataclass(frozen=True, slots=True)
class Summed:
    """As `Gather` for the input of a weight gradient: nothing may be added twice, so zeros are put on."""

    gather: Gather

    def need(self, out: Span) -> Span:
        first, last = self.gather._raw(out)
        start = min(max(first, 0), self.gather.size - 1)
        return start, max(min(last, self.gather.size), start + 1)

    def take(self, out: Span, there: Span) -> Taken:
        first, last = self.gather._raw(out)
        used = self.need(out)
        zeros = (max(used[0] - first, 0), max(last - used[1], 0))
        return Taken(used, out, (self.gather.argument.at(0),), zeros)


# --- rules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Site:
    """One spatial loop of a call, by argument name; `unmerged`: outputs that parts do not give."""

    windows: Mapping[str, tuple[int, Window | None]]
    outputs: tuple[int | None, ...]
    extent: int
    unmerged: tuple[int, ...] = ()


_Rule = Callable[[Call], Iterator[_Site]]


def _listed(call: Call, name: str, count: int, default: int) -> tuple[int, ...]:
    """An integer list argument that may be empty or hold one number for all."""
    found = call.integers(name) or (default,)
    return found * count if len(found) == 1 else found


def _gather(call: Call, k: int, size: int) -> Gather:
    space = call.rank("input") - 2
    padding = _listed(call, "padding", space, 0)
    reach = _listed(call, "dilation", space, 1)[k] * (call.shape("weight")[2 + k] - 1) + 1
    stride = _listed(call, "stride", space, 1)[k]
    return Gather(size, reach, stride, padding[k], Entry("padding", padding, k))


def _spread(call: Call, k: int, size: int) -> Spread:
    window = _gather(call, k, size)
    extra = _listed(call, "output_padding", call.rank("input") - 2, 0)[k]
    return Spread(size, window.reach, window.stride, window.padding, extra)


def _convolution(call: Call) -> Iterator[_Site]:
    rank = call.rank("input")
    if rank != call.rank("weight"):
        return
    space = rank - 2
    for k in range(space):
        size, made = call.shape("input")[2 + k], call.outputs[0].shape[2 + k]
        window: Window = _gather(call, k, size)
        if call.integer("transposed"):
            window = _spread(call, k, size)
            if 2 * window.padding >= window.reach:
                continue
        yield _Site({"input": (2 + k, window)}, (2 + k,), made)


def _weight_gradient(call: Call) -> Iterator[_Site]:
    """The gradients of weight and bias (not of the input) of a convolution that is not transposed."""
    if call.integers("output_mask")[0] or call.integer("transposed"):
        return
    space = call.rank("input") - 2
    for k in range(space):
        gather = _gather(call, k, call.shape("input")[2 + k])
        windows = {"grad_output": (2 + k, None), "input": (2 + k, Summed(gather))}
        yield _Site(windows, (None,) * len(call.outputs), call.shape("grad_output")[2 + k])


def _pool(kinds: int, space: int, unmerged: tuple[int, ...] = ()) -> _Rule:
    """Pools; their positions within the whole (output 1) are not those within a part."""

    def rule(call: Call) -> Iterator[_Site]:
        rank = call.rank("self")
        kernel = _listed(call, "kernel_size", space, 1)
        for k in range(space):
            dim = rank - space + k
            size, made = call.shape("self")[dim], call.outputs[0].shape[dim]
            stride = _listed(call, "stride", space, 0)[k] or kernel[k]
            padding = _listed(call, "padding", space, 0)
            dilation = _listed(call, "dilation", space, 1)[k] if call.has("dilation") else 1
            reach = dilation * (kernel[k] - 1) + 1
            # Rounded up, a part could be given more rows than the whole has there.
            if stride == 1 or not call.integer("ceil_mode"):
                window = Gather(size, reach, stride, padding[k], Entry("padding", padding, k))
                yield _Site({"self": (dim, window)}, (dim,) * kinds, made, unmerged)

    return rule


def _interpolation(taps: int) -> _Rule:
    def rule(call: Call) -> Iterator[_Site]:
        if taps and call.integer("align_corners"):
            return
        for k, scale in enumerate(("scales_h", "scales_w")):
            size, made = call.shape("self")[2 + k], call.outputs[0].shape[2 + k]
            factor, rest = divmod(made, size)
            if rest == 0 and call.arguments.get(scale) in (None, float(factor)):
                window = Scale(size, factor, taps, Entry("output_size", call.integers("output_size"), k))
                yield _Site({"self": (2 + k, window)}, (2 + k,), made)

    return rule


def _constant_pad(call: Call) -> Iterator[_Site]:
    pad, rank = call.integers("pad"), call.rank("self")
    for place in range(0, len(pad), 2):
        dim = rank - 1 - place // 2
        if min(pad[place], pad[place + 1]) >= 0:
            window = Shift(call.shape("self")[dim], pad[place], pad[place + 1], pad, place)
            yield _Site({"self": (dim, window)}, (dim,), call.outputs[0].shape[dim])


WINDOW_RULES: dict[str, _Rule] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _weight_gradient,
    "aten.max_pool2d_with_indices.default": _pool(2, 2, unmerged=(1,)),
    "aten.avg_pool2d.default": _pool(1, 2),
    "aten.upsample_nearest2d.default": _interpolation(0),
    "aten.upsample_bilinear2d.default": _interpolation(1),
    "aten.constant_pad_nd.default": _constant_pad,
}


# --- by input position ----------------------------------------------------------------------------


def _axis(op: Aten, site: _Site, inputs: int) -> WindowAxis:
    given: list[tuple[int | None, Window | None]] = [(None, None)] * inputs
    for name, arg in arguments_of(op).items():
        if isinstance(arg, Ref) and name in site.windows:
            given[arg.index] = site.windows[name]
    merges = tuple(
        None if k in site.unmerged else Merge.ADD if dim is None else Merge.WRITE
        for k, dim in enumerate(site.outputs)
    )
    return WindowAxis(
        site.extent,
        tuple(dim for dim, _ in given),
        site.outputs,
        merges,
        windows=tuple(window for _, window in given),
    )


@lru_cache(maxsize=1 << 14)
def windows_of(
    op: Aten, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
) -> tuple[WindowAxis, ...]:
    """The loops of one call along which parts overlap; none for an operator without an entry."""
    rule = WINDOW_RULES.get(op.overload)
    if rule is None or not outputs or len(set(_positions(op))) < len(_positions(op)):
        return ()
    sites = [site for site in rule(describe_call(op, inputs, outputs)) if site.extent > 1]
    return tuple(_axis(op, site, len(inputs)) for site in sites)


def _positions(op: Aten) -> list[int]:
    return [arg.index for arg in arguments_of(op).values() if isinstance(arg, Ref)]


def windows(graph: Graph, node: Node) -> tuple[WindowAxis, ...]:
    """The loops of `node` along which parts overlap."""
    if not isinstance(node.op, Aten) or node.writes:
        return ()
    inputs = tuple(graph.values[value].meta for value in node.inputs)
    return windows_of(node.op, inputs, tuple(graph.values[value].meta for value in node.outputs))


def with_arguments(op: Aten, arguments: tuple[tuple[str, Arg], ...]) -> Aten:
    """`op` with other values for some of its arguments; those left at the same default stay away."""
    for name, value in arguments:
        if name in arguments_of(op) or any(value if isinstance(value, tuple) else (value,)):
            op = with_argument(op, name, value)
    return op
