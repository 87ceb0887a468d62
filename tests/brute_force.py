"""A second simulator of a program's memory, event by event, that shares no code with Lowtide's.

It walks the order, takes and gives back blocks with reference counts as an allocator would see it, and
decides about reuse in place by comparing the byte address of every single element.  It is slow and
obvious, and it reads the graph's plain fields only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.ir import Graph, Node, Ref

OWNED_BY_CALLER = {"param", "buffer", "state", "input", "const", "host"}


@dataclass
class Block:
    """A storage while it is allocated; `uses` counts the nodes that will still touch it."""

    nbytes: int
    uses: int
    is_output: bool


@dataclass
class Machine:
    """An allocator: `output_bytes` per node and output, `transient_bytes` per node, arguments that a name
    may write over (None: all)."""

    graph: Graph
    output_bytes: Mapping[int, Sequence[int]]
    transient_bytes: Mapping[int, int]
    inplace: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)

    def run(self, order: Sequence[int]) -> list[int]:
        """The most bytes alive while each step runs."""
        nodes = {node.id: node for node in self.graph.nodes}
        to_come = [storage for number in order for storage in self.touched(nodes[number])]
        live, curve = 0, []
        for number in order:
            node = nodes[number]
            fresh = self.allocate(node, to_come)
            donors = {storage: self.donor(node, storage) for storage in fresh}
            asked = sum(self.blocks[storage].nbytes for storage in fresh)
            live += sum(self.blocks[storage].nbytes for storage in fresh if donors[storage] is None)
            curve.append(live + max(0, self.transient_bytes[number] - asked))
            for storage in self.release(node):
                nbytes = self.blocks.pop(storage).nbytes
                live -= 0 if storage in donors.values() else nbytes
        return curve

    def storage(self, value: int) -> int:
        return self.graph.values[value].storage

    def touched(self, node: Node) -> set[int]:
        return {self.storage(value) for value in (*node.inputs, *node.outputs)}

    def allocate(self, node: Node, to_come: list[int]) -> list[int]:
        """Blocks for the storages that appear at this node."""
        known = {*self.blocks, *(self.storage(value) for value in self.graph.inputs)}
        results = {self.storage(value) for value in self.graph.outputs}
        fresh: list[int] = []
        for value, nbytes in zip(node.outputs, self.output_bytes[node.id], strict=True):
            storage = self.storage(value)
            role = self.graph.storages[storage].role.value
            if storage in known or role in OWNED_BY_CALLER:
                continue
            if storage in fresh:
                self.blocks[storage].nbytes = max(self.blocks[storage].nbytes, nbytes)
                continue
            is_output = storage in results or role == "output"
            self.blocks[storage] = Block(nbytes, to_come.count(storage), is_output)
            fresh.append(storage)
        return fresh

    def release(self, node: Node) -> list[int]:
        """Count the uses of this node; the storages that have none left and are nobody's result."""
        found = []
        for storage in self.touched(node) & self.blocks.keys():
            self.blocks[storage].uses -= 1
            if self.blocks[storage].uses == 0 and not self.blocks[storage].is_output:
                found.append(storage)
        return found

    def donor(self, node: Node, fresh: int) -> int | None:
        """The dying storage that the output on `fresh` is written over, the first in input order."""
        name = getattr(node.op, "overload", "..").split(".")[1]
        if name not in self.inplace or len(node.outputs) != 1:
            return None
        target = self.bytes_of(node.outputs[0])
        if sorted(target) != list(range(self.graph.storages[fresh].nbytes)) or not target:
            return None
        positions = self.inplace[name]
        for number, value in enumerate(node.inputs):
            if positions is not None and Ref(number) not in [node.op.args[k] for k in positions]:
                continue
            block = self.blocks.get(self.storage(value))
            if (
                block is None
                or block.is_output
                or block.uses != 1
                or block.nbytes != self.blocks[fresh].nbytes
            ):
                continue
            nbytes = self.graph.storages[self.storage(value)].nbytes
            windows = [other for other in node.inputs if self.storage(other) == self.storage(value)]
            if nbytes == len(target) and all(self.coincide(window, node.outputs[0]) for window in windows):
                return self.storage(value)
        return None

    def coincide(self, left: int, right: int) -> bool:
        """Whether equal positions of two tensors are equal addresses, of equal type, as PyTorch sees it.

        It takes tensors for overlapping whose strides differ, if only those of an axis of one element.
        """
        a, b = self.graph.values[left].meta, self.graph.values[right].meta
        same = (a.shape, a.stride, a.dtype, a.device) == (b.shape, b.stride, b.dtype, b.device)
        return same and self.bytes_of(left) == self.bytes_of(right)

    def bytes_of(self, value: int) -> list[int]:
        """The address in its storage of every byte of a tensor, elements in row-major order."""
        meta = self.graph.values[value].meta
        found = [self.graph.values[value].offset]
        for size, step in zip(meta.shape, meta.stride, strict=True):
            found = [start + index * step for start in found for index in range(size)]
        width = meta.dtype.itemsize
        return [element * width + byte for element in found for byte in range(width)]
