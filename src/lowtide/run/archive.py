"""The file of a saved plan: a zip of JSON and the printed form of graphs.

Problem.  A plan has to survive its process, and reading a file must not run code, whoever wrote it.

Method.  No pickle: JSON for numbers and names, `lowtide.ir.text` for graphs, raw bytes for constants.
`plan.json` says which format the rest has.  Equal facts are written once.

    plan.json      format, versions, workload, mode       captured.txt   the graph as captured
    recipe.json    order, layout, facts, moves            graph.txt      the graph as it runs
    program.json   names, metas, result                   constants/7    bytes of value 7
    derived.txt    the graph that makes derived weights, if there is one

Errors.  PlanFileError, which says whether a file is damaged, foreign, or of a newer version.

Not done.  Compression of anything but text; reading older formats (there are none yet).
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowtide.analysis.lifetime import Buffer
from lowtide.errors import PlanFileError, UsageError
from lowtide.ir.graph import Graph, TensorMeta
from lowtide.ir.text import parse_graph, print_graph
from lowtide.run.derived import Derivation
from lowtide.run.layout import Layout, Piece
from lowtide.run.plan import Recipe
from lowtide.run.probe import FactsTree, parse_facts, print_facts
from lowtide.run.temps import Group

__all__ = [
    "FORMAT",
    "decode_constant",
    "decode_meta",
    "encode_constant",
    "encode_meta",
    "encode_recipe",
    "read_archive",
    "reading",
    "recipe_of",
    "write_archive",
]

FORMAT = 3

_SIGN = "lowtide plan"


def write_archive(path: Path, about: Mapping[str, Any], parts: Mapping[str, str | bytes]) -> None:
    """Write the file whole or not at all.  Raises UsageError if it cannot be written."""
    head = json.dumps({"sign": _SIGN, "format": FORMAT, **about}, indent=1)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("plan.json", head)
            for part, content in parts.items():
                archive.writestr(part, content)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What `plan.json` says, and the other parts.  Raises PlanFileError."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    except FileNotFoundError:
        raise PlanFileError(f"there is no plan {path}") from None
    except OSError as error:
        raise PlanFileError(f"{path} cannot be read: {error.strerror}") from error
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise PlanFileError(
            f"{path} is no plan of Lowtide, or cut off", remedy="save the plan again"
        ) from error
    with reading(path):
        about = json.loads(parts.pop("plan.json"))
        if about["sign"] != _SIGN:
            raise PlanFileError(f"{path} is no plan of Lowtide")
        found = about["format"]
    if found != FORMAT:
        raise PlanFileError(
            f"{path} has format {found!r}, this version reads {FORMAT}",
            remedy="update Lowtide, or make the plan again",
        )
    return about, parts


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with the contents inside is a PlanFileError."""
    try:
        yield
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise PlanFileError(
            f"{path} is damaged or no plan of Lowtide ({type(error).__name__}: {error})",
            remedy="save the plan again",
        ) from error


# -- recipes -----------------------------------------------------------------------------------------------


def encode_recipe(recipe: Recipe) -> dict[str, str | bytes]:
    """The parts `graph.txt` and `recipe.json`."""
    content = {
        "order": recipe.order,
        **_encode_layout(recipe.layout),
        "unplaced_bytes": recipe.unplaced_bytes,
        "bookkeeping_bytes": recipe.bookkeeping_bytes,
        "moves": recipe.moves,
        "rules": recipe.rules,
        **_encode_facts(recipe.facts),
    }
    parts: dict[str, str | bytes] = {"graph.txt": print_graph(recipe.graph)}
    if recipe.derivation is not None:
        derivation = recipe.derivation
        parts["derived.txt"] = print_graph(derivation.graph)
        content["derived"] = {
            "packed": derivation.packed,
            "sequence": derivation.sequence,
            **_encode_layout(derivation.layout),
            **_encode_facts(derivation.facts),
        }
    return {**parts, "recipe.json": json.dumps(content)}


def _encode_layout(layout: Layout) -> dict[str, Any]:
    return {
        "buffers": [
            [b.id, b.storages, b.nbytes, b.start, b.stop, b.kind, layout.offsets.get(b.id)]
            for b in layout.buffers
        ],
        "pieces": [
            [p.id, p.step, p.group.temps, p.group.offsets, p.group.nbytes, p.group.start, p.group.stop]
            for p in layout.pieces
        ],
        "piece_offsets": [[p.id, layout.offsets[p.id]] for p in layout.pieces if p.id in layout.offsets],
        "guests": [[buffer, *place] for buffer, place in layout.guests.items()],
        "arena_bytes": layout.nbytes,
    }


def _encode_facts(tree: FactsTree) -> dict[str, Any]:
    number: dict[str, int] = {}
    scopes = [
        [path, [[node, number.setdefault(print_facts(one), len(number))] for node, one in facts.items()]]
        for path, facts in tree.items()
    ]
    return {"facts": list(number), "scopes": scopes}


def recipe_of(parts: Mapping[str, bytes]) -> Recipe:
    """The recipe again; raises KeyError, ValueError or TypeError for damaged parts."""
    content = json.loads(parts["recipe.json"])
    graph = graph_of(parts["graph.txt"])
    return Recipe(
        graph=graph,
        order=tuple(content["order"]),
        facts=_decode_facts(content),
        layout=_decode_layout(content),
        unplaced_bytes=content["unplaced_bytes"],
        bookkeeping_bytes=content["bookkeeping_bytes"],
        moves=_counts(content["moves"]),
        derivation=_derivation_of(parts, content["derived"]) if "derived" in content else None,
        rules=_counts(content["rules"]),
    )


def _derivation_of(parts: Mapping[str, bytes], content: Mapping[str, Any]) -> Derivation:
    return Derivation(
        graph_of(parts["derived.txt"]),
        _decode_facts(content),
        _decode_layout(content),
        _counts(content["packed"]),
        tuple(content["sequence"]),
    )


def _counts(content: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
    return tuple((key, count) for key, count in content)


def _decode_facts(content: Mapping[str, Any]) -> FactsTree:
    known = [parse_facts(text) for text in content["facts"]]
    return {tuple(path): {node: known[k] for node, k in facts} for path, facts in content["scopes"]}


def _decode_layout(content: Mapping[str, Any]) -> Layout:
    buffers = [entry[:6] for entry in content["buffers"]]
    return Layout(
        buffers=tuple(Buffer(i, tuple(s), n, start, stop, kind) for i, s, n, start, stop, kind in buffers),
        offsets={
            **{entry[0]: entry[6] for entry in content["buffers"] if entry[6] is not None},
            **dict(content["piece_offsets"]),
        },
        nbytes=content["arena_bytes"],
        guests={buffer: (slot, offset) for buffer, slot, offset in content["guests"]},
        pieces=tuple(
            Piece(number, step, Group(tuple(temps), tuple(offsets), *rest))
            for number, step, temps, offsets, *rest in content["pieces"]
        ),
    )


def graph_of(text: bytes) -> Graph:
    """A graph from its printed form."""
    return parse_graph(text.decode())


# -- small things --------------------------------------------------------------------------------------------


def encode_meta(meta: TensorMeta) -> list[Any]:
    """A meta as JSON."""
    return [meta.shape, meta.stride, str(meta.dtype), meta.device]


def decode_meta(content: list[Any]) -> TensorMeta:
    """The inverse of `encode_meta`."""
    shape, stride, dtype, device = content
    return TensorMeta(tuple(shape), tuple(stride), _torch_object(dtype, torch.dtype), device)


def encode_constant(content: Any) -> Any:
    """A leaf of arguments or results as JSON.  Raises UsageError for what has no such form."""
    if content is None or isinstance(content, bool | int | str):
        return content
    if isinstance(content, float):
        return {"float": content.hex()}
    if isinstance(content, complex):
        return {"complex": [content.real.hex(), content.imag.hex()]}
    if isinstance(content, bytes):
        return {"bytes": content.hex()}
    if isinstance(content, torch.dtype):
        return {"dtype": str(content)}
    if isinstance(content, torch.device):
        return {"device": str(content)}
    raise UsageError(f"a plan with a {type(content).__name__} in its arguments or results cannot be saved")


def decode_constant(content: Any) -> Any:
    """The inverse of `encode_constant`."""
    if not isinstance(content, dict):
        return content
    ((kind, value),) = content.items()
    decoders: dict[str, Callable[[Any], Any]] = {
        "float": float.fromhex,
        "complex": lambda pair: complex(*map(float.fromhex, pair)),
        "bytes": bytes.fromhex,
        "dtype": lambda name: _torch_object(name, torch.dtype),
        "device": torch.device,
    }
    return decoders[kind](value)


def _torch_object(name: str, kind: type) -> Any:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, kind):
        raise ValueError(f"{name!r} is no {kind.__name__}")
    return found
