"""Where the frozen instances come from: a seeded generator, and the files beside this module.

A rectangle of time x bytes is cut again and again, straight across, by time or by bytes; the pieces are
the blocks, so they fit without waste and the optimum is known: it is the rectangle's height.  *tiles* keep
every piece.  *loose* ones lose an eighth of those that do not cross one step in the middle, so that the
lower bound, and with it the optimum, stays the height, but there are gaps.

Kept are those of several hundred blocks on which the greedy placer wastes more than a tenth.
``python -m benchmarks.placement --generate`` writes the files again, byte for byte.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.place import Block, PlacementProblem, place_greedy

__all__ = ["Instance", "frozen", "generate", "read", "write"]

HERE = Path(__file__).parent
ALIGNMENT = 64
LEAST_WASTE = 0.10
SIZES = ((160, 160, 1200), (220, 200, 2000), (300, 240, 3000), (400, 300, 4000))  # blocks, steps, units


@dataclass(frozen=True)
class Instance:
    """A problem and the bytes of its smallest arena."""

    name: str
    optimum_bytes: int
    problem: PlacementProblem


def cut(rng: random.Random, count: int, steps: int, units: int) -> list[tuple[int, int, int, int]]:
    """`count` rectangles (start, stop, low, high) that tile ``steps x units``."""
    pieces = [(0, steps, 0, units)]
    while len(pieces) < count:
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * (piece[3] - piece[2]))
        start, stop, low, high = pieces.pop()
        if (rng.random() < 0.5 and stop - start > 1) or high - low == 1:
            at = rng.randrange(start + 1, stop)
            pieces += [(start, at, low, high), (at, stop, low, high)]
        else:
            at = rng.randrange(low + 1, high)
            pieces += [(start, stop, low, at), (start, stop, at, high)]
    return pieces


def make(kind: str, seed: int, count: int, steps: int, units: int) -> Instance:
    """One instance; the same arguments give the same blocks."""
    rng = random.Random(f"{kind} {count} {seed}")
    pieces = cut(rng, count, steps, units)
    if kind == "loose":
        middle = steps // 2
        pieces = [p for p in pieces if p[0] <= middle < p[1] or rng.random() >= 1 / 8]
    rng.shuffle(pieces)
    blocks = tuple(
        Block(k, (high - low) * ALIGNMENT, start, stop) for k, (start, stop, low, high) in enumerate(pieces)
    )
    return Instance(f"{kind}-{count}-{seed}", units * ALIGNMENT, PlacementProblem(blocks, ALIGNMENT))


def generate(each: int = 2) -> Iterator[Instance]:
    """The first `each` seeds of every kind and size that are hard for greedy placement."""
    for kind in ("tiles", "loose"):
        for size in SIZES:
            found = 0
            for seed in range(100):
                instance = make(kind, seed, *size)
                waste = place_greedy(instance.problem).arena_bytes / instance.optimum_bytes - 1
                if waste > LEAST_WASTE:
                    yield instance
                    found += 1
                if found == each:
                    break


def write(instance: Instance) -> None:
    """Freeze an instance beside this module."""
    rows = ",\n".join(f"    [{b.nbytes}, {b.start}, {b.stop}]" for b in instance.problem.blocks)
    text = (
        f'{{\n  "name": "{instance.name}",\n  "alignment": {instance.problem.alignment},\n'
        f'  "optimum_bytes": {instance.optimum_bytes},\n  "blocks": [\n{rows}\n  ]\n}}\n'
    )
    (HERE / f"{instance.name}.json").write_text(text, encoding="utf-8")


def read(path: Path) -> Instance:
    """An instance from its file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    blocks = tuple(Block(k, *row) for k, row in enumerate(data["blocks"]))
    return Instance(data["name"], data["optimum_bytes"], PlacementProblem(blocks, data["alignment"]))


def frozen() -> list[Instance]:
    """All instances in files, by name."""
    return [read(path) for path in sorted(HERE.glob("*.json"))]
