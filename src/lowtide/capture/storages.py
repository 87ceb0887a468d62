"""From a trace with in-place effects to a graph in which every value is computed once.

Problem.  ``y[:, 0] = 0`` changes a tensor that others view.  Recomputing, reordering or splitting is only
possible when each node has results that never change afterwards.

Method.  Every traced storage has a current *version*: a storage of the graph and the windows known on it.

    y = conv(x)          version 0 of y's storage = %4
    y.relu_()            whole storage:  %5 = relu(%4)                 version 1 = %5
    y[:, 0] = 0          a part of it:   %7 = select_scatter(%5, 0, 1, 0)   version 2 = %7
    y.mean()             reads version 2; a view of y made earlier is made again on %7

A read of a window that the version does not know replays the recorded view operators from one that it
knows, else takes `aten.as_strided`.  Residents (weights, buffers, arguments) that were written get one
`aten.copy_` of their last version at the end.

Invariants.  All versions of a storage have the same layout, so offsets and strides keep their meaning.
Not done: writes to overlapping arguments, writes through another element type (refused).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lowtide.capture import functional, layout
from lowtide.capture.builder import Builder
from lowtide.capture.trace import Call, Resident, Trace, Window, describe
from lowtide.errors import CaptureError
from lowtide.ir.aten import resolve
from lowtide.ir.graph import Origin, Role, TensorMeta
from lowtide.ir.ops import Aten, Ref

__all__ = ["Ssa"]

Place = tuple[TensorMeta, int]


@dataclass
class _Version:
    """The current contents of a traced storage: windows that exist as values; `root` covers all."""

    storage: int
    root: Window
    values: dict[Place, int] = field(default_factory=dict)


class Ssa:
    """Builds the graph of one trace, call by call."""

    def __init__(self, trace: Trace) -> None:
        self.builder = Builder()
        self.names: dict[str, int] = {}
        self._trace = trace
        self._versions: dict[int, _Version] = {}
        self._views: dict[tuple[int, Place], Call] = {}
        self._twins: dict[int, list[Resident]] = {}
        self._changed: dict[int, Origin] = {}
        for resident in trace.residents:
            self._add_resident(resident)

    def run(self) -> None:
        """Translate all calls."""
        for call in self._trace.calls:
            self._translate(call)

    # -- reading ----------------------------------------------------------------------------------------

    def read(self, window: Window, origin: Origin, asked: frozenset[Window] = frozenset()) -> int:
        """The value that holds a window's current contents; `asked` are those that wait for it."""
        version = self._versions[window.storage]
        found = version.values.get(window.place)
        if found is not None:
            return found
        view = self._views.get((window.storage, window.place))
        if view is not None and asked.isdisjoint(view.inputs):
            inputs = [self.read(parent, origin, asked | {window}) for parent in view.inputs]
            self._emit_view(view, inputs, origin)
            return version.values[window.place]
        return self._restride(version, window, origin)

    def _restride(self, version: _Version, window: Window, origin: Origin) -> int:
        root = version.values[version.root.place]
        offset = self._offset(version, window)
        op = layout.reshaping(self.builder.values[root].meta, window.meta, offset)
        if op is None:
            raise CaptureError(
                "a tensor is changed in place and then read as another element type", source=origin.source
            )
        value = self.builder.value(window.meta, version.storage, offset)
        self.builder.node(op, (root,), (value,), origin=origin)
        version.values[window.place] = value
        return value

    def _offset(self, version: _Version, window: Window) -> int:
        """Where a window starts in the graph: what was assigned may be a part of another storage."""
        root = self.builder.values[version.values[version.root.place]]
        shift_bytes = (root.offset - version.root.offset) * root.meta.dtype.itemsize
        return window.offset + shift_bytes // window.meta.dtype.itemsize

    def _emit_view(self, call: Call, inputs: Sequence[int], origin: Origin) -> None:
        outputs = []
        for window in call.outputs:
            version = self._versions[window.storage]
            value = self.builder.value(window.meta, version.storage, self._offset(version, window))
            version.values[window.place] = value
            outputs.append(value)
        self.builder.node(call.op, inputs, outputs, origin=origin)

    # -- translating ------------------------------------------------------------------------------------

    def _translate(self, call: Call) -> None:
        if functional.changes_only_metadata(call.op.overload):
            call = _without_suffix(call)
        writes = functional.written(call.op)
        if writes:
            self._translate_write(call, [call.inputs[index] for index in writes])
        elif self._is_view(call):
            self._translate_view(call)
        else:
            inputs = [self.read(window, call.origin) for window in call.inputs]
            self.builder.node(call.op, inputs, self._adopt(call.outputs), origin=call.origin)

    def _is_view(self, call: Call) -> bool:
        ours = {window.storage for window in call.inputs}
        return bool(call.outputs) and all(window.storage in ours for window in call.outputs)

    def _translate_view(self, call: Call) -> None:
        known = all(
            window in call.inputs or window.place in self._versions[window.storage].values
            for window in call.outputs
        )
        if known:
            return
        for window in call.outputs:
            self._views.setdefault((window.storage, window.place), call)
        self._emit_view(call, [self.read(window, call.origin) for window in call.inputs], call.origin)

    def _adopt(self, windows: Sequence[Window]) -> list[int]:
        """Values for the results of an operator, on new storages or on known ones."""
        return [self._adopt_one(window) for window in windows]

    def _adopt_one(self, window: Window) -> int:
        if window.storage not in self._versions:
            storage = self.builder.storage(self._trace.nbytes[window.storage], Role.TEMP)
            self._versions[window.storage] = _Version(storage, window)
        version = self._versions[window.storage]
        value = self.builder.value(window.meta, version.storage, window.offset)
        version.values[window.place] = value
        return value

    # -- writing ----------------------------------------------------------------------------------------

    def _translate_write(self, call: Call, targets: Sequence[Window]) -> None:
        self._check_writable(call, targets)
        if call.op.overload == "aten.copy_.default":
            source = self.read(call.inputs[_index(call.op, 1)], call.origin)
            self._assign(targets[0], self._copied(targets[0], source, call.origin), call.origin)
            return
        call = self._with_known_number(call)
        partial = not self._covers(targets[0])
        form = layout.filling(call.op, targets[0].meta, partial) or functional.find(call.op)
        if form is None:
            raise CaptureError(
                f"{describe(call)} changes its argument and has no form that returns the result instead",
                source=call.origin.source,
                remedy="use the operator without trailing underscore",
            )
        results = self._compute(call, form, targets)
        fresh = [window for window in call.outputs if window not in targets]
        self._bind_fresh(fresh[: form.kept], results[: form.kept])
        for target, value in zip(targets, results[form.kept :], strict=True):
            self._assign(target, self._copied(target, value, call.origin), call.origin)

    def _compute(self, call: Call, form: functional.Functional, targets: Sequence[Window]) -> tuple[int, ...]:
        used = sorted(set(layout.indices(form.op)))
        inputs = [self._operand(call, index, targets) for index in used]
        op = layout.compact(form.op, used)
        if call.op.overload == "aten.bernoulli_.float":
            return self._draw(op, inputs, call.origin)
        return self.builder.compute(op, inputs, call.origin)

    def _operand(self, call: Call, index: int, targets: Sequence[Window]) -> int:
        """The value of an operand; where only its shape matters, what it was shaped after."""
        window = call.inputs[index]
        value = self.read(window, call.origin)
        if functional.ignores_contents(call.op.overload) and window in targets:
            return self._pattern(value)
        return value

    def _pattern(self, value: int) -> int:
        """The tensor that an ``empty_like`` value was shaped after, if it has the same layout."""
        for node in reversed(self.builder.nodes):
            if value in node.outputs:
                if isinstance(node.op, Aten) and node.op.overload == "aten.empty_like.default":
                    (source,) = node.inputs
                    same = self.builder.values[source].meta == self.builder.values[value].meta
                    return source if same else value
                return value
        return value

    def _draw(self, op: Aten, inputs: Sequence[int], origin: Origin) -> tuple[int, ...]:
        """A Bernoulli mask with the very bits that the in-place operator draws into this layout."""
        meta = self.builder.values[inputs[0]].meta
        if meta.contiguous:
            return self.builder.compute(op, inputs, origin)
        order = layout.drawing_order(meta)
        forward, back = layout.permutations(order)
        view = self._permuted(inputs[0], forward, origin)
        (drawn,) = self.builder.compute(op, (view,), origin)
        return (self._permuted(drawn, back, origin),)

    def _permuted(self, value: int, order: tuple[int, ...], origin: Origin) -> int:
        if order == tuple(range(len(order))):
            return value
        return self.builder.view(Aten("aten.permute.default", (Ref(0), order)), value, origin)

    def _bind_fresh(self, windows: Sequence[Window], values: Sequence[int]) -> None:
        for window, value in zip(windows, values, strict=True):
            self._versions[window.storage] = _Version(
                self.builder.values[value].storage, window, {window.place: value}
            )

    def _copied(self, target: Window, source: int, origin: Origin) -> int:
        """A value with `source`'s contents in the target's shape, strides and element type."""
        resident = self.builder.storage_of(source).role.resident
        for ops in layout.conversions(self.builder.values[source].meta, target.meta, resident):
            if self._reaches(ops, source, target):
                for op in ops:
                    source = self._apply(op, source, origin)
                return source
        old = self.read(target, origin)
        op = Aten("aten.copy.default", (Ref(0), Ref(1)))
        return self.builder.compute(op, (old, source), origin)[0]

    def _reaches(self, ops: Sequence[Aten], source: int, target: Window) -> bool:
        """Whether the chain ends in the target's meta; for a part of a tensor, strides do not matter."""
        found = self.builder.predict_chain(ops, source)
        if self._covers(target) or target.place == self._versions[target.storage].root.place:
            return found == target.meta
        return replace(found, stride=target.meta.stride) == target.meta

    def _covers(self, target: Window) -> bool:
        return layout.covers(target.meta, target.offset, self._trace.nbytes[target.storage])

    def _with_known_number(self, call: Call) -> Call:
        """``fill_`` with a literal tensor (``y[0] = 1.5``) as ``fill_`` with a number."""
        if call.op.overload != "aten.fill_.Tensor":
            return call
        window = call.inputs[_index(call.op, 1)]
        twins = self._twins.get(window.storage, [])
        if not twins or not twins[0].literal or window.storage in self._changed:
            return call
        op = Aten("aten.fill_.Scalar", (call.op.args[0], twins[0].tensor.item()))
        return replace(call, op=op)

    def _apply(self, op: Aten, source: int, origin: Origin) -> int:
        if op.overload == "aten.expand.default":
            return self.builder.view(op, source, origin)
        return self.builder.compute(op, (source,), origin)[0]

    def _assign(self, target: Window, value: int, origin: Origin) -> None:
        """From here on, the target's storage has `value` in that window."""
        version = self._versions[target.storage]
        self._changed.setdefault(target.storage, origin)
        if self._covers(target):
            storage = self.builder.values[value].storage
            self._versions[target.storage] = _Version(storage, target, {target.place: value})
            return
        base = self.read(version.root, origin)
        merged = self._scatter(base, version.root, target, value, origin)
        storage = self.builder.values[merged].storage
        self._versions[target.storage] = _Version(storage, version.root, {version.root.place: merged})

    def _scatter(self, base: int, root: Window, target: Window, part: int, origin: Origin) -> int:
        """`base` with `part` in the target's place, along the recorded views while they are simple."""
        if target.place == root.place:
            return part
        version, view = self._versions[target.storage], self._views.get((target.storage, target.place))
        simple = layout.scattering(view.op) if view is not None and len(view.inputs) == 1 else None
        if view is None or simple is None:
            op = Aten(
                "aten.as_strided_scatter.default",
                (Ref(0), Ref(1), target.meta.shape, target.meta.stride, self._offset(version, target)),
            )
            return self.builder.compute(op, (base, part), origin)[0]
        parent = view.inputs[0]
        old = self.read(parent, origin)
        merged = self.builder.compute(simple, (old, part), origin)[0]
        return self._scatter(base, root, parent, merged, origin)

    def _check_writable(self, call: Call, targets: Sequence[Window]) -> None:
        for target in targets:
            twins = self._twins.get(target.storage, [])
            if len({twin.window.place for twin in twins}) > 1:
                names = ", ".join(twin.names[0] for twin in twins)
                raise CaptureError(
                    f"the step writes memory that {names} share",
                    source=call.origin.source,
                    remedy="pass a copy of one of them",
                )

    # -- residents --------------------------------------------------------------------------------------

    def _add_resident(self, resident: Resident) -> None:
        window = resident.window
        self._twins.setdefault(window.storage, []).append(resident)
        if window.storage not in self._versions:
            storage = self.builder.storage(self._trace.nbytes[window.storage], resident.role)
            self._versions[window.storage] = _Version(storage, window)
        version = self._versions[window.storage]
        if window.place not in version.values:
            version.values[window.place] = self.builder.input(window.meta, version.storage, window.offset)
        for name in resident.names:
            self.names[name] = version.values[window.place]

    def write_back(self) -> None:
        """Copy the last version of every resident that the step changed into its own memory.

        What is read afterwards is read there: a returned buffer is the user's own tensor.
        """
        for resident in self._trace.residents:
            origin = self._changed.pop(resident.window.storage, None)
            if origin is None or resident.literal:
                continue
            home = self.names[resident.names[0]]
            self.store(resident.names[0], self.read(resident.window, origin), origin)
            self._versions[resident.window.storage] = _Version(
                self.builder.values[home].storage, resident.window, {resident.window.place: home}
            )

    def store(self, name: str, value: int, origin: Origin) -> None:
        """Append the node that overwrites a resident with a value."""
        home = self.names[name]
        op = Aten("aten.copy_.default", (Ref(0), Ref(1)))
        self.builder.node(op, (home, value), (), (home,), origin)


def _without_suffix(call: Call) -> Call:
    """``aten.t_.default`` as the view ``aten.t.default``."""
    namespace, name, variant = call.op.overload.split(".")
    variant = "int" if name == "transpose_" else variant  # the one whose overloads have other names
    overload = f"{namespace}.{name.removesuffix('_')}.{variant}"
    resolve(overload)
    return replace(call, op=replace(call.op, overload=overload))


def _index(op: Aten, position: int) -> int:
    argument = op.args[position]
    assert isinstance(argument, Ref)
    return argument.index
