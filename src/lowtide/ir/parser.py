"""Reads the printed form of a graph; `lowtide.ir.text` describes it.

Problem.  Tests write graphs by hand, saved plans hold them: a slip has to be found at its line, and a
text from anywhere must not be able to run code.

Method.  One regular expression cuts the text into words; a recursive descent with one word of
lookahead builds the graph.  Literals come from the tables of `lowtide.ir.spelling` only.

Not done.  Whether the graph makes sense: that is `lowtide.ir.verify`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lowtide.ir.graph import Graph, Node, Origin, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Arg, Aten, Fission, Fused, Load, Merge, Op, Part, Ref, Scalar, Slice, Store
from lowtide.ir.spelling import DTYPES, NAMED, TextError, contiguous_stride, default_bytes

__all__ = ["parse_graph"]

_WORDS = re.compile(
    r"""
    (?P<comment>\#.*)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<value>%\d+)
    | (?P<ref>\$\d+)
    | (?P<storage>@s\d+)
    | (?P<device>[a-z]+(?::\d+)?/)
    | (?P<size>\d+B\b)
    | (?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
    | (?P<name>[A-Za-z_][\w.]*)
    | (?P<mark>->|<-|[()\[\]{},:=+!*])
    | (?P<newline>\n)
    | (?P<space>[ \t\r]+)
    | (?P<other>.)
    """,
    re.VERBOSE,
)
_ORIGIN_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_ROLES = {role.value: role for role in Role}
_MERGES = {merge.value: merge for merge in Merge}
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class _Word:
    kind: str
    text: str
    line: int

    @property
    def number(self) -> int:
        """The digits of ``%3``, ``$3``, ``@s3``, ``n3``, ``64B``."""
        return int(re.sub(r"\D", "", self.text))


def parse_graph(text: str) -> Graph:
    """The graph that `text` describes.

    Raises TextError that names the line and what was expected there.
    """
    return _GraphReader(_Cursor(_split(text))).read("end")


def _split(text: str) -> list[_Word]:
    """The words of `text`; comments that fill a line are dropped, empty lines too."""
    words: list[_Word] = []
    line = 1
    for match in _WORDS.finditer(text):
        kind = str(match.lastgroup)
        fresh = not words or words[-1].kind == "newline"
        if kind == "other":
            raise TextError(f"line {line}: unexpected character {match.group()!r}")
        if kind != "space" and not (fresh and kind in ("comment", "newline")):
            words.append(_Word(kind, match.group(), line))
        line += kind == "newline"
    return [*words, _Word("newline", "\n", line), _Word("end", "end of text", line)]


@dataclass(slots=True)
class _Cursor:
    """Where the reader is in the words."""

    words: list[_Word]
    at: int = 0

    @property
    def next(self) -> _Word:
        return self.words[self.at]

    def take(self, kind: str, text: str | None = None) -> _Word:
        """The next word, which has to be of this kind (and text)."""
        word = self.next
        if word.kind != kind or (text is not None and word.text != text):
            raise self.error(f"expected {text or kind}")
        self.at += 1
        return word

    def skip(self, *texts: str) -> bool:
        """Step over the next words if they are these."""
        ahead = [word.text for word in self.words[self.at : self.at + len(texts)]]
        if ahead != list(texts):
            return False
        self.at += len(texts)
        return True

    def skip_lines(self) -> None:
        while self.next.kind == "newline":
            self.at += 1

    def error(self, what: str) -> TextError:
        return TextError(f"line {self.next.line}: {what}, found {self.next.text!r}")

    def several(self, read: Callable[[], object], opening: str, closing: str) -> None:
        """Call `read` for each item of a bracketed list, separated by commas."""
        self.take("mark", opening)
        while not self.skip(closing):
            read()
            if not self.skip(","):
                self.take("mark", closing)
                return

    def integers(self, opening: str, closing: str) -> tuple[int, ...]:
        found: list[int] = []
        self.several(lambda: found.append(self.integer()), opening, closing)
        return tuple(found)

    def integer(self) -> int:
        if not _INTEGER.fullmatch(self.next.text):
            raise self.error("expected an integer")
        return int(self.take("number").text)

    def string(self) -> str:
        return str(json.loads(self.take("string").text))


@dataclass(slots=True)
class _Operands:
    """The inputs of one node as its arguments mention them."""

    inputs: list[int] = field(default_factory=list)
    marked: dict[int, None] = field(default_factory=dict)

    def read(self, cursor: _Cursor) -> Ref:
        value = cursor.take("value").number
        self.inputs.append(value)
        if cursor.skip("!"):
            self.marked[value] = None
        return Ref(len(self.inputs) - 1)

    def read_once(self, cursor: _Cursor) -> Ref:
        """As `read`, but a value that is mentioned again is the same input."""
        ref = self.read(cursor)
        first = self.inputs.index(self.inputs[ref.index])
        if first < ref.index:
            self.inputs.pop()
        return Ref(first)


class _GraphReader:
    """Reads one graph or body."""

    def __init__(self, cursor: _Cursor) -> None:
        self.cursor = cursor
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.storages: dict[int, Storage] = {}
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.highest = -1

    def read(self, end: str) -> Graph:
        """Statements up to the word `end`."""
        cursor = self.cursor
        cursor.skip_lines()
        while not (cursor.next.kind == end or cursor.skip(end)):
            self._statement()
            cursor.take("newline")
            cursor.skip_lines()
        return Graph(tuple(self.nodes), self.values, self.storages, tuple(self.inputs), tuple(self.outputs))

    def _statement(self) -> None:
        cursor = self.cursor
        if cursor.skip("input"):
            self.inputs.append(self._value(Role.INPUT))
        elif cursor.skip("value"):
            self._value(Role.TEMP)
        elif cursor.skip("storage"):
            number = cursor.take("name").number
            nbytes = cursor.take("size").number
            self.storages[number] = Storage(number, nbytes, self._role(Role.TEMP))
        elif cursor.skip("return"):
            while cursor.next.kind == "value":
                self.outputs.append(cursor.take("value").number)
                cursor.skip(",")
        else:
            self.nodes.append(self._node())

    def _value(self, role: Role) -> int:
        """A declaration; returns the id."""
        cursor = self.cursor
        word = cursor.take("value")
        if word.number in self.values:
            raise TextError(f"line {word.line}: {word.text} is declared twice")
        cursor.take("mark", ":")
        meta = self._meta()
        storage, offset = word.number, 0
        if named := cursor.next.kind == "storage":
            storage = cursor.take("storage").number
            offset = cursor.integer() if cursor.skip("+") else 0
        elif storage in self.storages:
            raise TextError(
                f"line {word.line}: s{storage} exists already; say on which storage {word.text} is"
            )
        value = Value(word.number, meta, storage, offset)
        self._define(value, role, named)
        self.values[word.number] = value
        self.highest = max(self.highest, word.number)
        return word.number

    def _define(self, value: Value, role: Role, named: bool) -> None:
        """The storage of a value, if this is the first value on it."""
        cursor = self.cursor
        size = cursor.take("size") if cursor.next.kind == "size" else None
        line = cursor.next.line
        stated = cursor.next.kind == "name"
        role = self._role(role)
        if named and value.storage in self.storages:
            if size or stated:
                raise TextError(f"line {line}: s{value.storage} has its size and role already")
            return
        nbytes = size.number if size else default_bytes(value, role)
        self.storages[value.storage] = Storage(value.storage, nbytes, role)

    def _role(self, default: Role) -> Role:
        if self.cursor.next.kind != "name":
            return default
        if self.cursor.next.text not in _ROLES:
            raise self.cursor.error(f"expected a role ({', '.join(_ROLES)})")
        return _ROLES[self.cursor.take("name").text]

    def _meta(self) -> TensorMeta:
        cursor = self.cursor
        device = cursor.take("device").text.rstrip("/") if cursor.next.kind == "device" else "cpu"
        if cursor.next.text not in DTYPES:
            raise cursor.error("expected an element type such as f32")
        dtype = DTYPES[cursor.take("name").text]
        shape = cursor.integers("[", "]")
        stride = cursor.integers("(", ")") if cursor.next.text == "(" else contiguous_stride(shape)
        if len(stride) != len(shape):
            raise cursor.error(f"{len(shape)} sizes but {len(stride)} strides")
        return TensorMeta(shape, stride, dtype, device)

    def _node(self) -> Node:
        cursor = self.cursor
        number = None
        if re.fullmatch(r"n\d+", cursor.next.text):
            number = cursor.take("name").number
            cursor.take("mark", ":")
        outputs: list[int] = []
        while cursor.next.kind == "value":
            outputs.append(self._value(Role.TEMP))
            if not cursor.skip(","):
                cursor.take("mark", "=")
                break
        if number is None:
            number = outputs[0] if outputs else self.highest + 1
        self.highest = max(self.highest, number)
        operands = _Operands()
        build = self._operation(operands)
        writes = self._writes(operands)
        op, origin = build()
        return Node(number, op, tuple(operands.inputs), tuple(outputs), writes, origin)

    def _writes(self, operands: _Operands) -> tuple[int, ...]:
        if not self.cursor.skip("writes"):
            return tuple(operands.marked)
        found: list[int] = []
        self.cursor.several(lambda: found.append(self.cursor.take("value").number), "(", ")")
        return tuple(found)

    def _operation(self, operands: _Operands) -> Callable[[], tuple[Op, Origin]]:
        """Read up to the inputs; what it returns reads the rest of the node."""
        cursor = self.cursor
        name = cursor.take("name").text
        if name in _WITH_TEXT:
            make = _WITH_TEXT[name]
            cursor.take("mark", "(")
            text = cursor.string()
            while cursor.skip(","):
                operands.read(cursor)
            cursor.take("mark", ")")
            return lambda: (make(text), self._origin())
        if name in ("fused", "fission"):
            kind = cursor.string() if name == "fused" else ""
            cursor.several(lambda: operands.read(cursor), "(", ")")
            return (lambda: self._fused(kind)) if name == "fused" else self._fission
        if "." not in name:
            raise TextError(
                f"line {cursor.next.line}: {name!r} is no operation; ATen calls read aten.relu.default"
            )
        op = self._aten(name, operands)
        return lambda: (op, self._origin())

    def _aten(self, overload: str, operands: _Operands) -> Aten:
        cursor = self.cursor
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []

        def read() -> None:
            if cursor.next.kind == "name" and cursor.words[cursor.at + 1].text == "=":
                key = cursor.take("name").text
                cursor.take("mark", "=")
                kwargs.append((key, self._arg(operands)))
            else:
                args.append(self._arg(operands))

        cursor.several(read, "(", ")")
        if cursor.skip("<-"):
            cursor.several(lambda: operands.read(cursor), "(", ")")
        return Aten(overload, tuple(args), tuple(kwargs))

    def _arg(self, operands: _Operands) -> Arg:
        cursor = self.cursor
        word = cursor.next
        if word.kind == "value":
            return operands.read_once(cursor)
        if word.kind == "ref":
            return Ref(cursor.take("ref").number)
        if word.kind == "string":
            return cursor.string()
        if word.text in NAMED:
            cursor.at += 1
            return NAMED[word.text]
        if word.kind == "number":
            text = cursor.take("number").text
            return int(text) if _INTEGER.fullmatch(text) else float(text)
        if word.text == "[":
            items: list[Arg] = []
            cursor.several(lambda: items.append(self._arg(operands)), "[", "]")
            return tuple(items)
        if word.text in ("device", "complex"):
            return self._applied(cursor.take("name").text)
        raise cursor.error("expected an argument")

    def _applied(self, name: str) -> torch.device | complex:
        """``device("cpu")`` or ``complex(0.0, 1.0)``."""
        cursor = self.cursor
        if name == "device":
            cursor.take("mark", "(")
            text = cursor.string()
            try:
                device = torch.device(text)
            except RuntimeError as error:
                raise cursor.error(f"{text!r} is no device") from error
            cursor.take("mark", ")")
            return device
        parts: list[float] = []
        cursor.several(lambda: parts.append(self._float()), "(", ")")
        if len(parts) != 2:
            raise cursor.error("a complex number has two parts")
        return complex(*parts)

    def _float(self) -> float:
        return float(self.cursor.take("number").text)

    def _fused(self, kind: str) -> tuple[Fused, Origin]:
        self.cursor.take("mark", "{")
        origin = self._origin()
        return Fused(_GraphReader(self.cursor).read("}"), kind), origin

    def _fission(self) -> tuple[Fission, Origin]:
        cursor = self.cursor
        cursor.take("name", "merge")
        merges: list[Merge] = []
        cursor.several(lambda: merges.append(self._merge()), "[", "]")
        cursor.take("mark", "{")
        origin = self._origin()
        bodies: list[Graph] = []
        parts: list[Part] = []
        cursor.skip_lines()
        while not cursor.skip("}"):
            if cursor.skip("body", "{"):
                bodies.append(_GraphReader(cursor).read("}"))
            else:
                parts.append(self._part())
            cursor.take("newline")
        return Fission(tuple(bodies), tuple(parts), tuple(merges)), origin

    def _merge(self) -> Merge:
        if self.cursor.next.text not in _MERGES:
            raise self.cursor.error(f"expected a merge ({', '.join(_MERGES)})")
        return _MERGES[self.cursor.take("name").text]

    def _part(self) -> Part:
        cursor = self.cursor
        cursor.take("name", "part")
        body = cursor.integer()
        inputs: list[Slice] = []
        outputs: list[Slice] = []
        cursor.several(lambda: inputs.append(self._slice()), "[", "]")
        cursor.take("mark", "->")
        cursor.several(lambda: outputs.append(self._slice()), "[", "]")
        return Part(body, tuple(inputs), tuple(outputs))

    def _slice(self) -> Slice:
        cursor = self.cursor
        axis = None if cursor.skip("*") else cursor.integer()
        if axis is None and cursor.next.text != ":":
            return Slice(None)
        cursor.take("mark", ":")
        start = cursor.integer()
        cursor.take("mark", ":")
        return Slice(axis, start, cursor.integer())

    def _origin(self) -> Origin:
        if self.cursor.next.kind != "comment":
            return Origin()
        words = _ORIGIN_WORD.findall(self.cursor.take("comment").text[1:])
        spelled = ["" if w == "-" else str(json.loads(w)) if w.startswith('"') else w for w in words]
        if not 1 <= len(spelled) <= 3:
            raise self.cursor.error("expected a comment '# module file.py:line phase' after a node")
        return Origin(*spelled)


_WITH_TEXT: dict[str, Callable[[str], Op]] = {"scalar": Scalar, "store": Store, "load": Load}
