"""Files of the format ``training-graph-v1``: parsing and writing.

Invariants.  What is written has the bytes, prices and order of the format's accounting; ids of weights and
inputs are kept.  `read` of what `write` wrote gives the same graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model import SCALAR_TIME, Graph, Node, Split
from .prices import node_bytes, node_time

__all__ = ["graph_of", "read", "record_of", "write"]

FORMAT = "training-graph-v1"


def read(path: Path) -> dict[str, Any]:
    """The file's record.  Raises ValueError if it is not of the format."""
    record: dict[str, Any] = json.loads(path.read_text())
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {record.get('format')!r}, not {FORMAT!r}")
    return record


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as one line of JSON."""
    path.write_text(json.dumps(record, separators=(",", ":")))


def graph_of(record: Mapping[str, Any]) -> Graph:
    """The graph of a GRAPH record, nodes in its schedule's order."""
    by_id = {entry["id"]: entry for entry in record["nodes"]}
    nodes = tuple(_node_of(by_id[number]) for number in record["schedule"])
    return Graph(nodes, tuple(record.get("fs_inputs", ())), tuple(record.get("fs_outputs", ())))


def _node_of(entry: Mapping[str, Any]) -> Node:
    split = None
    if entry["op"] == "fission":
        split = Split(
            parts=entry["n_iter"],
            length=entry["fs_length"],
            in_dims=tuple(dims[0] if dims else None for dims in entry["in_dims"]),
            out_dims=tuple(entry["out_dims"]),
            body=graph_of(entry["sub"]),
        )
    links = tuple(tuple((a, b) for a, b in pairs) for pairs in entry["dim_links"])
    links += links[:1] * (
        len(entry["inputs"]) - len(links)
    )  # a pool's gradient tells only its first operand's
    return Node(
        id=entry["id"],
        op=entry["op"],
        kind=entry["kind"],
        inputs=tuple(entry["inputs"]),
        shape=tuple(entry["shape"]),
        attrs=entry["attrs"],
        links=links,
        split=split,
        again=bool(entry.get("remat", False)),
        free=entry["out_bytes"] == 0 and entry["op"] in ("placeholder", "fission_out"),
    )


def record_of(graph: Graph, hw: Mapping[str, Any]) -> dict[str, Any]:
    """The GRAPH record of a graph, without `sim`."""
    record: dict[str, Any] = {
        "nodes": [_entry_of(graph, node, hw) for node in graph.nodes],
        "schedule": [node.id for node in graph.nodes],
        "outputs": [node.id for node in graph.nodes if not graph.readers[node.id]],
    }
    if graph.inputs:
        record |= {"fs_inputs": list(graph.inputs), "fs_outputs": list(graph.outputs)}
    return record


def _entry_of(graph: Graph, node: Node, hw: Mapping[str, Any]) -> dict[str, Any]:
    known = node.op not in ("fission", "fission_out")
    entry: dict[str, Any] = {
        "id": node.id,
        "op": node.op,
        "kind": node.kind,
        "inputs": list(node.inputs),
        "in_shapes": [list(shape) for shape in graph.in_shapes(node)] if known else [],
        "shape": list(node.shape),
        "attrs": dict(node.attrs),
        "out_bytes": node_bytes(graph, node, hw["dsize"]),
        "extra_bytes": 0,
        "in_mem": node.op != "store",
        "remat": node.again,
        "lat_ms": node_time(graph, node, hw) if node.op != "placeholder" else SCALAR_TIME,
        "key": "",
        "dim_links": [[list(pair) for pair in pairs] for pairs in node.links],
    }
    if node.split is not None:
        entry |= {
            "fs_length": node.split.length,
            "fs_chunk": node.split.length // node.split.parts,
            "n_iter": node.split.parts,
            "in_dims": [[] if dim is None else [dim] for dim in node.split.in_dims],
            "out_dims": list(node.split.out_dims),
            "sub": record_of(node.split.body, hw),
        }
    return entry
