"""A report made by hand: a small encoder-decoder's training step, kept whole and with its encoder recomputed.

The numbers come from a toy simulation (a storage lives from its step to its last reader), so that curves,
blocks and holders agree with one another as they do in a real report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.report.data import (
    Block,
    Curve,
    Figures,
    Floor,
    Holder,
    Iteration,
    Limit,
    Move,
    Point,
    ReportData,
    Resident,
    SearchRecord,
    Step,
    Verdict,
)

MIB = 2**20
RESIDENT = (
    Resident("parameters", 6 * MIB + 4096),
    Resident("optimizer state", 12 * MIB + 8192),
    Resident("arguments", 2 * MIB),
)
RESIDENT_BYTES = sum(entry.nbytes for entry in RESIDENT)


@dataclass
class Op:
    """One operator of the toy: what it makes, which earlier results it reads."""

    operator: str
    module: str
    source: str
    phase: str
    nbytes: int
    reads: tuple[int, ...] = ()
    workspace: int = 0
    recomputed: bool = False


def level_bytes(depth: int, levels: int) -> int:
    scale = min(depth, 2 * levels - depth)
    return max(64 * 1024, (8 * MIB) >> scale)


def forward(levels: int, layers: int) -> list[Op]:
    ops: list[Op] = []
    for depth in range(2 * levels + 1):
        side = "enc" if depth < levels else ("mid" if depth == levels else "dec")
        for layer in range(layers):
            module = f"{side}.{depth % (levels + 1)}.block{layer}"
            size = level_bytes(depth, levels)
            for name, line, workspace in (
                ("convolution", 31, size // 2),
                ("native_batch_norm", 32, 0),
                ("relu", 33, 0),
            ):
                reads = (len(ops) - 1,) if ops else ()
                source = f"unet.py:{line + 10 * depth}"
                ops.append(Op(f"aten.{name}.default", module, source, "forward", size, reads, workspace))
    ops.append(Op("aten.nll_loss2d_forward.default", "", "train.py:12", "loss", 64, (len(ops) - 1,)))
    return ops


def training(levels: int, layers: int, recompute: bool) -> list[Op]:
    ops = forward(levels, layers)
    count = len(ops)
    grad = count - 1
    home = dict(enumerate(range(count)))
    for index in reversed(range(count - 1)):
        source = ops[index]
        block = 3 * layers
        if recompute and index % block == block - 1 and index // block < 2 * levels:
            for again in range(index - block + 2, index):
                made = replace(ops[again], phase="forward", recomputed=True, reads=(home.get(again - 1, 0),))
                home[again] = len(ops)
                ops.append(made)
        reads = tuple(r for r in (grad, home[max(index - 1, 0)], home[index]) if r >= 0)
        name = source.operator.replace(".default", "_backward.default").replace("relu", "threshold")
        ops.append(Op(name, source.module, source.source, "backward", source.nbytes, reads, source.workspace))
        grad = len(ops) - 1
        if "convolution" in source.operator:
            ops.append(Op("aten._fused_adamw_.default", source.module, "train.py:15", "update", 0, (grad,)))
    return ops


def simulate(ops: list[Op]) -> tuple[Curve, tuple[Block, ...], tuple[Holder, ...]]:
    stop = {i: i + 1 for i in range(len(ops))}
    for index, op in enumerate(ops):
        for read in op.reads:
            stop[read] = index + 1
    alive: list[Block] = []
    blocks: list[Block] = []
    steps = []
    for index, op in enumerate(ops):
        alive = [block for block in alive if block.stop > index]
        for nbytes, end, kind in (
            (op.nbytes, stop[index], kind_of(op, ops[stop[index] - 1])),
            (op.workspace, index + 1, "workspace"),
        ):
            if nbytes:
                block = Block(
                    index, end, place(alive, nbytes), nbytes, op.operator, op.module, op.source, kind
                )
                alive.append(block)
                blocks.append(block)
        above = sum(block.nbytes for block in alive)
        steps.append(
            Step(above, op.operator, op.module, op.source, op.phase, 1e-4 + 2e-9 * (op.nbytes + op.workspace))
        )
    curve = Curve(tuple(steps), RESIDENT_BYTES)
    peak = [block for block in blocks if block.start <= curve.peak_step < block.stop]
    return curve, tuple(blocks), tuple(Holder(b.nbytes, b.label, b.module, b.source, b.kind) for b in peak)


def kind_of(op: Op, last_reader: Op) -> str:
    if op.recomputed:
        return "recomputed"
    if op.phase == "forward" and last_reader.phase != "forward":
        return "saved"
    return op.phase if op.phase == "forward" else "backward"


def place(alive: list[Block], nbytes: int) -> int:
    offset = 0
    for block in sorted(alive, key=lambda block: block.offset_bytes):
        if block.offset_bytes - offset >= nbytes:
            break
        offset = max(offset, block.offset_bytes + block.nbytes)
    return -(-offset // 64) * 64


def make(levels: int = 3, layers: int = 2, **changes: object) -> ReportData:
    """The whole report; larger `levels` and `layers` make a longer step."""
    before, _, eager_holders = simulate(training(levels, layers, recompute=False))
    after, blocks, plan_holders = simulate(training(levels, layers, recompute=True))
    arena = max(block.offset_bytes + block.nbytes for block in blocks)
    eager_s, plan_s = before.edges(True)[-1], after.edges(True)[-1]
    data = ReportData(
        workload="unet:batch=8,size=128,width=16,mode=train",
        device="cpu · Intel Xeon Platinum, 2 threads",
        limit=Limit(memory_bytes=RESIDENT_BYTES + arena + 700_000, asked="60%"),
        verdict=Verdict(True, "eager", 0.0, True),
        eager=Figures(
            before.peak_bytes, RESIDENT_BYTES, None, before.peak_bytes - RESIDENT_BYTES + 9_000_000, eager_s
        ),
        plan=Figures(RESIDENT_BYTES + arena, RESIDENT_BYTES, arena, arena + 8_000_000, plan_s),
        eager_predicted=Figures(before.peak_bytes, RESIDENT_BYTES, None, None, 0.98 * eager_s),
        plan_predicted=Figures(RESIDENT_BYTES + arena, RESIDENT_BYTES, arena, None, 0.99 * plan_s),
        eager_curve=before,
        plan_curve=after,
        blocks=blocks,
        resident=RESIDENT,
        eager_holders=eager_holders,
        plan_holders=plan_holders,
        moves=tuple(
            Move(
                "remat",
                f"enc.{i}.block0",
                f"unet.py:{31 + 10 * i}",
                (9 - 2 * i) * MIB,
                0.002 / (i + 1),
                "5 nodes",
            )
            for i in range(3)
        ),
        floor=Floor(
            RESIDENT_BYTES + 20 * MIB,
            "aten.convolution_backward.default",
            "dec.3.block1",
            "unet.py:91",
            (("gradient of the result", 8 * MIB), ("input", 8 * MIB), ("workspace", 4 * MIB)),
        ),
        search=SearchRecord(
            1_284,
            9.4,
            "limit met and no better state in 400 expansions",
            tuple(
                Iteration(0.4 * i, 90 * i, before.peak_bytes - i * 4 * MIB, eager_s * (1 + 0.02 * i), "remat")
                for i in range(6)
            ),
        ),
        points=frontier(before.peak_bytes, eager_s, RESIDENT_BYTES + arena, plan_s),
        opaque=("mylib.fancy_attention.default",),
        command="lowtide optimize unet:batch=8,size=128,width=16,mode=train --memory 60% --seed 0",
        settings=(("seconds", "30"), ("seed", "0"), ("threads", "2"), ("rng", "eager")),
        versions=(("lowtide", "0.1.0"), ("torch", "2.13.0"), ("python", "3.11.2")),
    )
    return replace(data, **changes)  # type: ignore[arg-type]


def frontier(eager_bytes: int, eager_s: float, plan_bytes: int, plan_s: float) -> tuple[Point, ...]:
    between = [
        Point(
            round(eager_bytes + (plan_bytes - eager_bytes) * share), eager_s + (plan_s - eager_s) * share**2
        )
        for share in (0.15, 0.3, 0.45, 0.6, 0.8)
    ]
    tighter = [
        Point(round(plan_bytes * share), plan_s * (1 + 0.3 * (1 - share))) for share in (0.9, 0.84, 0.8)
    ]
    known = [
        Point(eager_bytes, eager_s, True, name="eager"),
        Point(plan_bytes, plan_s, True, True, "this plan"),
    ]
    return tuple(known + between + tighter)
