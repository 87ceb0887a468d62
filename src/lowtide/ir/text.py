"""The one printed form of a graph: for tests, goldens, dumps, saved plans and bug reports.

Problem.  A hand-written graph in a test, a dump between two passes and a saved plan have to be the
same notation, and nothing may be lost on the way through it.

Method.  One line per node, defaults left out; `parse_graph` (in `lowtide.ir.parser`) fills them in.

    # a line that starts with '#' is a comment
    input %0: f32[8,16]                              role input, own storage s0
    input %1: f32[16,16] param
    input %2: host/f64[] host                        a Python number
    %3: f32[16,16](1,16) @s1 = aten.t.default(%1)    a view: it shares storage s1
    %4: f32[8,16] = aten.mm.default(%0, %3)  # enc.0.act model.py:31
    %5: f32[8] @s4+2 = ...                           a view that starts at element 2 of s4
    %6: f32[], %7: f32[8,4] = ...                    two outputs
    n9: aten.copy_.default(%1!, %4)  # - - update    writes %1; node id 9
    return %6

Left out is what follows from the rest: the node id that equals its first output (without outputs:
the next unused number), a storage that equals its value's id, its size when the value just covers
it, strides of a contiguous tensor, the roles `input` of an input and `temp` of a result.  Otherwise
they are written: ``n12:``, ``@s3+0``, ``64B``, ``f32[8,16](1,8)``, ``param``.  Arguments name values, and
the inputs are the distinct ones in order; a node with other inputs is written
``aten.mul.Tensor($1, $0) <- (%4, %5)``.

    %5: f32[8,4] = fused "kernel"(%1, %2) {          inputs bind by position to the body's
      input %0: f32[8,4] temp
      ...
      return %3
    }
    %6: f32[8,4] = fission(%1, %2) merge [write] {
      body { ... }
      part 0 [0:0:4, *] -> [0:0:4]                   body 0; rows 0 to 4 of %1, all of %2
      part 0 [0:4:8, *] -> [0:4:8]
    }

Invariant.  ``parse_graph(print_graph(graph)) == graph``.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Graph, Node, Origin, Role, Storage, Value
from lowtide.ir.ops import Aten, Fission, Fused, Load, Op, Part, Ref, Scalar, Store, refs_in
from lowtide.ir.parser import parse_graph
from lowtide.ir.spelling import TextError, default_bytes, spell_arg, spell_meta, spell_slice, spell_string

__all__ = ["TextError", "parse_graph", "print_graph", "print_node"]

_INDENT = "  "


def print_graph(graph: Graph) -> str:
    """The text of `graph`, ending in a newline.

    Raises TextError for an argument that is no `Arg`.
    """
    return "\n".join(_Printer(graph).lines()) + "\n"


def print_node(graph: Graph, node: Node) -> str:
    """The line of one node, for messages; bodies are left out, unknown values are marked ``?``."""
    printer = _Printer(graph)
    printer.seen.update(graph.values[value].storage for value in node.inputs if value in graph.values)
    return next(printer.node(node))


class _Printer:
    """Prints one graph; knows which storages a reader has met and the highest id so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.seen: set[int] = set()
        self.highest = -1

    def lines(self) -> Iterator[str]:
        declared = dict.fromkeys(self.graph.inputs)
        for value in declared:
            yield f"input {self.value(value, Role.INPUT)}"
        for node in self.graph.nodes:
            declared.update(dict.fromkeys(node.outputs))
            yield from self.node(node)
        for value in self.graph.values:
            if value not in declared:
                yield f"value {self.value(value, Role.TEMP)}"
        for storage in self.graph.storages.values():
            if storage.id not in self.seen:
                yield f"storage s{storage.id} {storage.nbytes}B {storage.role.value}"
        yield f"return {_names(self.graph.outputs)}".rstrip()

    def value(self, number: int, role: Role) -> str:
        """The declaration of a value; `role` is the one that needs no mention here."""
        self.highest = max(self.highest, number)
        value = self.graph.values.get(number)
        if value is None:
            return f"%{number}: ?"
        return f"%{number}: {spell_meta(value.meta)}{self._place(value, role)}"

    def _place(self, value: Value, role: Role) -> str:
        storage = self.graph.storages.get(value.storage)
        first = value.storage not in self.seen
        self.seen.add(value.storage)
        owns = first and value.storage == value.id and value.offset == 0
        where = "" if owns else f" @s{value.storage}+{value.offset}"
        return where + (_spell_storage(storage, value, role) if first and storage else "")

    def node(self, node: Node) -> Iterator[str]:
        """The lines of a node: one, unless it has bodies."""
        outputs = ", ".join(self.value(out, Role.TEMP) for out in node.outputs)
        expected = node.outputs[0] if node.outputs else self.highest + 1
        self.highest = max(self.highest, node.id)
        head = "" if node.id == expected else f"n{node.id}: "
        head += f"{outputs} = " if outputs else ""
        bodies = list(_bodies(node.op))
        head += _spell_op(node) + (" {" if bodies else "")
        yield head + _spell_origin(node.origin)
        if bodies:
            yield from (_INDENT + line for line in bodies)
            yield "}"


def _spell_storage(storage: Storage, value: Value, role: Role) -> str:
    """Size and role of a storage at the first value on it, as far as they do not follow."""
    expected = default_bytes(value, storage.role)
    size = "" if storage.nbytes == expected else f" {storage.nbytes}B"
    return size + ("" if storage.role is role else f" {storage.role.value}")


def _spell_op(node: Node) -> str:
    """The operation applied to its inputs, up to the opening brace of its bodies."""
    marked = tuple(dict.fromkeys(value for value in node.inputs if value in node.writes)) == node.writes
    names = [f"%{value}" + ("!" if marked and value in node.writes else "") for value in node.inputs]
    after = "" if marked else f" writes ({_names(node.writes)})"
    match node.op:
        case Aten():
            return _spell_aten(node.op, names) + after
        case Fused():
            return f"fused {spell_string(node.op.kind)}({', '.join(names)}){after}"
        case Fission():
            merges = ", ".join(merge.value for merge in node.op.merges)
            return f"fission({', '.join(names)}){after} merge [{merges}]"
        case Scalar():
            return f"scalar({', '.join((spell_string(node.op.expr), *names))}){after}"
        case Store() | Load():
            word = type(node.op).__name__.lower()
            return f"{word}({', '.join((spell_string(node.op.tier), *names))}){after}"


def _spell_aten(op: Aten, names: list[str]) -> str:
    refs = (*refs_in(op.args), *(index for _, arg in op.kwargs for index in refs_in(arg)))
    in_order = tuple(dict.fromkeys(refs)) == tuple(range(len(names))) and len(set(names)) == len(names)

    def spell_ref(ref: Ref) -> str:
        return names[ref.index] if in_order else f"${ref.index}"

    args = [spell_arg(arg, spell_ref) for arg in op.args]
    args += [f"{name}={spell_arg(arg, spell_ref)}" for name, arg in op.kwargs]
    return f"{op.overload}({', '.join(args)})" + ("" if in_order else f" <- ({', '.join(names)})")


def _bodies(op: Op) -> Iterator[str]:
    """The lines between the braces of a node."""
    if isinstance(op, Fused):
        yield from _Printer(op.body).lines()
    elif isinstance(op, Fission):
        for body in op.bodies:
            yield "body {"
            yield from (_INDENT + line for line in _Printer(body).lines())
            yield "}"
        for part in op.parts:
            yield _spell_part(part)


def _spell_part(part: Part) -> str:
    inputs = ", ".join(map(spell_slice, part.inputs))
    return f"part {part.body} [{inputs}] -> [{', '.join(map(spell_slice, part.outputs))}]"


def _spell_origin(origin: Origin) -> str:
    """``  # module source phase``; a dash for an empty word, the phase only if it is not forward."""
    if origin == Origin():
        return ""
    words = [_spell_word(origin.module), _spell_word(origin.source)]
    if origin.phase != "forward":
        words.append(_spell_word(origin.phase))
    elif not origin.source:
        words.pop()
    return "  # " + " ".join(words)


def _spell_word(word: str) -> str:
    plain = word and word != "-" and word.isprintable() and not any(c.isspace() or c == '"' for c in word)
    return (word if plain else spell_string(word)) if word else "-"


def _names(values: tuple[int, ...]) -> str:
    return ", ".join(f"%{value}" for value in values)
