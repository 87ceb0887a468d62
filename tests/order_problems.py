"""Random order problems, and their optimum by trying every order."""

from __future__ import annotations

from hypothesis import strategies as st

from lowtide.schedule.tables import BEFORE, DONOR, KEPT, MADE, NBYTES, READ, WORKSPACE, Tables, tables_of

__all__ = ["best_peak_of_all", "order_tables"]


@st.composite
def order_tables(draw: st.DrawFn, max_tasks: int) -> Tables:
    """Small problems with everything in them: several results, workspace, reuse, extra edges, kept ones."""
    count = draw(st.integers(1, max_tasks))
    sizes = st.sampled_from((0, 1, 2, 2, 3, 5, 8, 13))
    given_at_start = draw(st.integers(0, 2))
    nbytes = [draw(sizes) for _ in range(given_at_start)]
    reads: list[list[int]] = [[] for _ in range(count)]
    makes, before, donors = list[list[int]](), list[list[int]](), list[list[int]]()
    maker: dict[int, int] = {}
    for task in range(count):
        known = sorted(maker)
        row = draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
        extra = draw(st.lists(st.integers(0, task - 1), unique=True, max_size=1)) if task else []
        made = list(range(len(nbytes), len(nbytes) + draw(st.sampled_from((0, 1, 1, 1, 2)))))
        nbytes += [draw(sizes) for _ in made]
        reads[task] += row
        before.append(sorted({*(maker[s] for s in row), *extra}))
        makes.append(made)
        donors.append(row if len(made) == 1 and draw(st.booleans()) else [])
        maker.update(dict.fromkeys(made, task))
    for storage in range(given_at_start):
        reads[draw(st.integers(0, count - 1))].append(storage)
    kept = [s in maker and draw(st.booleans()) and draw(st.booleans()) for s in range(len(nbytes))]
    return tables_of(
        before=before,
        reads=reads,
        makes=makes,
        nbytes=nbytes,
        kept=kept,
        workspace=[draw(st.sampled_from((0, 0, 0, 4))) for _ in range(count)],
        donors=[[s for s in row if not kept[s]] for row in donors],
        base_bytes=draw(st.sampled_from((0, 7))),
    )


def best_peak_of_all(tables: Tables) -> int:
    """The least peak of all orders: depth-first over every order, counting live storages as sets."""
    count, total = tables.task.shape[1] - 1, tables.storage.shape[1] - 1

    def row(relation: int, task: int) -> list[int]:
        begin, end = tables.task[relation, task : task + 2]
        return [int(entry) for entry in tables.entries[begin:end]]

    nbytes = [int(n) for n in tables.storage[NBYTES, :total]]
    kept = {s for s in range(total) if tables.storage[KEPT, s]}
    reads = [set(row(READ, task)) for task in range(count)]
    makes = [row(MADE, task) for task in range(count)]
    made_by_someone = {s for made in makes for s in made}
    waits = [set(row(BEFORE, task)) for task in range(count)]
    best = 1 << 60

    def live(ran: frozenset[int], running: int) -> int:
        exists = {s for task in ran | {running} for s in makes[task]} | (set(range(total)) - made_by_someone)
        coming = {s for task in range(count) if task not in ran for s in (*reads[task], *makes[task])}
        return int(tables.base_bytes) + sum(nbytes[s] for s in exists if s in coming or s in kept)

    def usage(ran: frozenset[int], task: int) -> int:
        later = {s for other in range(count) if other not in ran and other != task for s in reads[other]}
        fresh = sum(nbytes[s] for s in makes[task])
        takes = any(nbytes[s] == fresh and s not in later | kept for s in row(DONOR, task))
        return live(ran, task) + int(tables.task[WORKSPACE, task]) - (fresh if takes else 0)

    def visit(ran: frozenset[int], peak: int) -> None:
        nonlocal best
        if peak >= best:
            return
        if len(ran) == count:
            best = peak
            return
        for task in range(count):
            if task not in ran and waits[task] <= ran:
                visit(ran | {task}, max(peak, usage(ran, task)))

    visit(frozenset(), 0)
    return best
