"""Random order problems, and how far from the exact optimum schedulers end.

Run ``python -m benchmarks.order``.
"""

from __future__ import annotations

import random

from lowtide.schedule.tables import Tables, tables_of


def random_tables(count: int, seed: int, operands: int = 3, span: int = 0) -> Tables:
    """A random DAG of `count` tasks with one result each, sizes log-uniform in 1..1024.

    A task reads 1 to `operands` results among the last `span` tasks (0: all earlier ones); about a
    tenth of the tasks read nothing.  Results that nobody reads are kept: they are the graph's outputs.
    """
    rng = random.Random(seed)
    reads: list[list[int]] = []
    for task in range(count):
        low = max(0, task - span) if span else 0
        wanted = 0 if task == 0 or rng.random() < 0.1 else rng.randint(1, operands)
        reads.append(sorted(rng.sample(range(low, task), min(wanted, task - low))))
    read = {storage for row in reads for storage in row}
    return tables_of(
        before=reads,
        reads=reads,
        makes=[[task] for task in range(count)],
        nbytes=[int(2 ** rng.uniform(0, 10)) for _ in range(count)],
        kept=[task not in read for task in range(count)],
    )
