"""The format's accounting once more, as it is published: two clocks, bytes by events in time."""

from __future__ import annotations

from typing import Any

Record = dict[str, Any]


def account(graph: Record) -> tuple[float, int]:
    """(milliseconds, peak bytes) of a GRAPH record."""
    lives: list[tuple[float, float, int]] = []
    total, _ = _run(graph, 0.0, lives)
    change: dict[float, int] = {}
    for start, stop, nbytes in lives:
        change[start] = change.get(start, 0) + nbytes
        change[stop] = change.get(stop, 0) - nbytes
    live = peak = 0
    for moment in sorted(change):
        live += change[moment]
        peak = max(peak, live)
    return total, peak


def _run(graph: Record, began: float, lives: list[tuple[float, float, int]]) -> tuple[float, float]:
    nodes = {node["id"]: node for node in graph["nodes"]}
    clocks = [began, began]
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    last = began
    for number in graph["schedule"]:
        node = nodes[number]
        engine = int(node["op"] in ("store", "load"))
        if engine or node["op"] == "fission":
            clocks = [max(clocks)] * 2
        begin = max([clocks[engine], *(end[value] for value in node["inputs"])])
        spent = node["lat_ms"]
        if node["op"] == "fission":
            inside, stop = _run(node["sub"], begin, lives)
            spent, last = inside * node["n_iter"], max(last, stop)
        start[number], end[number] = begin, begin + spent
        clocks[engine] = end[number]
        if node["op"] == "fission":
            clocks[1] = clocks[0]
    finish = max([*end.values(), last])
    for number, node in nodes.items():
        ends = [end[reader["id"]] for reader in graph["nodes"] if number in reader["inputs"]]
        if node["in_mem"]:
            lives.append((start[number], max(ends, default=finish), node["out_bytes"]))
    return finish - began, finish
