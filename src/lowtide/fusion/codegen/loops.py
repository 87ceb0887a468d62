"""What all loops share: lines of C++, scopes of known values, and the emission of expressions.

Problem.  An expression should be computed once, in the outermost loop in which everything it needs is known.

Method.  A scope per open loop maps expressions to the names that hold them.  `hoist` emits, on entering a
loop, whatever is computable there; what is left is forced in the innermost body.  Values that an earlier
pass left in scratch memory are read back instead of recomputed.

Invariants.  A name is visible exactly as long as its C block.  Not done here: the loops themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.fusion.codegen.ctext import compute_type, index_text, load_text, operation_text, store_text
from lowtide.fusion.codegen.expr import Expr, walk
from lowtide.fusion.codegen.index import Var
from lowtide.fusion.codegen.stage import Placed, Stage

__all__ = ["Loops", "Scope", "Writer", "declare", "size"]


@dataclass
class Writer:
    """Lines of C++ with indentation, and the scratch layout.

    `setup` collects the lines that run once, whenever `constants` changed; what they make lies in a buffer of
    `prepared_bytes`.
    """

    lines: list[str] = field(default_factory=list)
    depth: int = 1
    shared_bytes: int = 0
    thread_bytes: int = 0
    counter: int = 0
    uses_torch: bool = False
    uses_brgemm: bool = False
    uses_windows: bool = False
    constants: frozenset[str] = frozenset()
    prepared_bytes: int = 0
    setup: Writer | None = None

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str) -> None:
        self.line(text + " {")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")

    def fresh(self, letter: str = "t") -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def share(self, nbytes: int) -> int:
        """Reserve shared scratch; returns its offset."""
        offset = self.shared_bytes
        self.shared_bytes += (nbytes + 63) // 64 * 64
        return offset

    def prepare(self, name: str, nbytes: int) -> Writer:
        """Reserve an array of floats that is made once, `name` in both texts; returns the setup's."""
        assert self.setup is not None
        offset = self.prepared_bytes
        self.prepared_bytes += (nbytes + 63) // 64 * 64
        self.line(f"const float* const {name} = (const float*)(prepared + {offset});")
        self.setup.line(f"float* const {name} = (float*)(prepared + {offset});")
        return self.setup

    def own(self, nbytes: int) -> int:
        """Reserve per-thread scratch; returns its offset."""
        offset = self.thread_bytes
        self.thread_bytes += (nbytes + 63) // 64 * 64
        return offset


def size(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def declare(writer: Writer, variables: Sequence[Var], flat: str) -> None:
    """Define row-major `variables` from their flat position."""
    step = 1
    lines = []
    for place, var in enumerate(reversed(variables)):
        outermost = place == len(variables) - 1
        text = f"{flat} / {step}" if step > 1 else flat
        lines.append(
            f"const int64_t {var.name} = {text if outermost else f'{text} % {var.size}'}; (void){var.name};"
        )
        step *= var.size
    for text in reversed(lines):
        writer.line(text)


@dataclass
class Scope:
    """Names of expressions known in one open loop."""

    variables: frozenset[Var]
    names: dict[Expr, str] = field(default_factory=dict)


class Loops:
    """What the three kinds of stage share: scopes and the emission of expressions."""

    def __init__(self, stage: Stage, writer: Writer, spilled: Mapping[str, str]) -> None:
        self.stage, self.writer, self.spilled = stage, writer, spilled
        self.scopes: list[Scope] = []
        self.kept: dict[Expr, str] = {}  # expression -> scratch array holding it for the current row

    def enter(self, variables: Iterable[Var]) -> None:
        known = self.scopes[-1].variables if self.scopes else frozenset()
        self.scopes.append(Scope(known | frozenset(variables)))

    def name_of(self, node: Expr) -> str | None:
        return next((s.names[node] for s in reversed(self.scopes) if node in s.names), None)

    def ready(self, node: Expr) -> bool:
        """Whether every variable and reduction that `node` needs is known in the open scopes."""
        return node.variables <= self.scopes[-1].variables and all(
            self.available(leaf) for leaf in self._reduced(node)
        )

    def _reduced(self, node: Expr) -> list[Expr]:
        return [n for n in walk(node) if n.leaf is not None and n.leaf.kind == "reduced"]

    def available(self, node: Expr) -> bool:
        """Whether a reduction's result can be read here."""
        return True

    def needed(self, roots: Sequence[Expr]) -> list[Expr]:
        """Nodes to emit for `roots`, arguments first, stopping at what is known or kept."""
        order: list[Expr] = []
        seen: set[int] = set()
        stack = [(root, False) for root in reversed(roots)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif id(node) not in seen and self.name_of(node) is None:
                seen.add(id(node))
                stack.append((node, True))
                if node not in self.kept:
                    stack.extend((arg, False) for arg in reversed(node.args))
        return order

    def hoist(self, roots: Sequence[Expr], force: bool = False) -> None:
        """Emit what is ready in the innermost open scope; `force`: everything must be."""
        for node in self.needed(roots):
            if force or (self.hoistable(node) and all(map(self.name_of, node.args))):
                self.define(node)

    def hoistable(self, node: Expr) -> bool:
        return self.ready(node) and node not in self.kept

    def define(self, node: Expr) -> None:
        """One line that names the value of `node`."""
        if self.name_of(node) is not None:
            return
        args = [self.name_of(arg) or self._missing(arg) for arg in node.args] if node not in self.kept else []
        if node.op == "const":
            self.scopes[-1].names[node] = operation_text(node, [])
            return
        name = self.writer.fresh()
        self.writer.line(f"const {compute_type(node.dtype)} {name} = {self.text(node, args)};")
        self.scopes[-1].names[node] = name

    def _missing(self, node: Expr) -> str:
        raise AssertionError(f"{node.op} is used before it is defined")

    def text(self, node: Expr, args: list[str]) -> str:
        if node in self.kept:
            return f"{self.kept[node]}[{self.kept_place()}]"
        if node.op == "load":
            return load_text(node, args[0] if args else "")
        if node.op == "reduced":
            return self.reduced_text(node)
        return operation_text(node, args)

    def kept_place(self) -> str:
        raise NotImplementedError

    def reduced_text(self, node: Expr) -> str:
        assert node.leaf is not None
        return f"{node.leaf.source}_all[{index_text(node.leaf.index)}]"

    def store(self, placed: Placed) -> None:
        store = placed.item.store
        assert store is not None
        value = store_text(self.name_of(placed.value) or "", store.dtype)
        self.writer.line(f"{store.buffer}[{index_text(placed.place)}] = {value};")
