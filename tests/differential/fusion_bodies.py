"""Bodies for tests: trace a Python function into the graph that a Fused node would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.ir.graph import Graph, Node, Role, Storage, TensorMeta, Value
from lowtide.ir.ops import Aten, Ref


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, "cpu")


class Tracer:
    """Runs an fx graph with real tensors and writes down what it did, with true storages."""

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self.storages: dict[int, Storage] = {}
        self.nodes: list[Node] = []
        self.by_pointer: dict[int, int] = {}
        self.keep: list[Any] = []

    def value(self, tensor: torch.Tensor, role: Role) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.keep.append(tensor)
        if key not in self.by_pointer:
            self.by_pointer[key] = len(self.storages)
            self.storages[len(self.storages)] = Storage(len(self.storages), storage.nbytes(), role)
        number = len(self.values)
        self.values[number] = Value(number, meta_of(tensor), self.by_pointer[key], tensor.storage_offset())
        return number

    def scalar(self) -> int:
        place = len(self.storages)
        self.storages[place] = Storage(place, 0, Role.HOST)
        number = len(self.values)
        self.values[number] = Value(number, TensorMeta((), (), torch.float64, "host"), place)
        return number


def trace(function: Callable[..., Any], inputs: Sequence[Any], scalars: Sequence[float] = ()) -> Graph:
    """The body of `function(*inputs)`; numbers equal to one of `scalars` become host scalars."""
    fx = make_fx(lambda *args: function(*args), tracing_mode="real")(*[_copy(t) for t in inputs])
    work = Tracer()
    env: dict[Any, tuple[int, torch.Tensor]] = {}
    ids: list[int] = []
    numbers = {}
    results: list[int] = []
    holders = iter([_copy(t) for t in inputs])
    for node in fx.graph.nodes:
        if node.op == "placeholder":
            tensor = next(holders)
            env[node] = (work.value(tensor, Role.INPUT), tensor)
            ids.append(env[node][0])
        elif node.op == "get_attr":
            tensor = getattr(fx, node.target)
            env[node] = (work.value(tensor, Role.CONST), tensor)
            ids.append(env[node][0])
        elif node.op == "output":
            outs = node.args[0] if isinstance(node.args[0], list | tuple) else (node.args[0],)
            results = [env[out][0] for out in outs if out is not None]
        elif node.target.__name__ == "getitem":
            source, index = node.args
            if index in env[source]:
                env[node] = env[source][index]
        else:
            for number in scalars:
                if number not in numbers and number in _numbers([node.args, node.kwargs]):
                    numbers[number] = work.scalar()
            record(work, env, node, numbers)
    for value in results:
        home = work.storages[work.values[value].storage]
        if home.role is Role.TEMP:
            work.storages[home.id] = Storage(home.id, home.nbytes, Role.OUTPUT)
    inputs_all = tuple(ids) + tuple(numbers[s] for s in scalars)
    return Graph(tuple(work.nodes), work.values, work.storages, inputs_all, tuple(results))


def _numbers(args: Any) -> list[float]:
    if isinstance(args, list | tuple):
        return [n for a in args for n in _numbers(a)]
    if isinstance(args, dict):
        return [n for a in args.values() for n in _numbers(a)]
    return [args] if isinstance(args, float) else []


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same layout, overlaps included, on memory of its own that starts at the first element."""
    span = meta_of(tensor).span_bytes // tensor.element_size()
    flat = torch.as_strided(tensor.detach(), (span,), (1,)).clone()
    return torch.as_strided(flat, tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def record(work: Tracer, env: dict[Any, Any], node: torch.fx.Node, numbers: dict[float, int]) -> None:
    refs: list[int] = []

    def spell(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            refs.append(env[arg][0])
            return Ref(len(refs) - 1)
        if isinstance(arg, list | tuple):
            return tuple(spell(a) for a in arg)
        if isinstance(arg, float) and arg in numbers:
            refs.append(numbers[arg])
            return Ref(len(refs) - 1)
        return arg

    def real(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return env[arg][1]
        return [real(a) for a in arg] if isinstance(arg, list | tuple) else arg

    args = tuple(spell(a) for a in node.args)
    kwargs = tuple(sorted((k, spell(v)) for k, v in node.kwargs.items()))
    result = node.target(*[real(a) for a in node.args], **{k: real(v) for k, v in node.kwargs.items()})
    op = Aten(str(node.target), args, kwargs)
    if node.target._schema.name.endswith("_"):
        work.nodes.append(Node(len(work.nodes), op, tuple(refs), (), (refs[0],)))
        env[node] = (refs[0], result)
        return
    outs = result if isinstance(result, list | tuple) else (result,)
    made = {k: (work.value(t, Role.TEMP), t) for k, t in enumerate(outs) if isinstance(t, torch.Tensor)}
    work.nodes.append(Node(len(work.nodes), op, tuple(refs), tuple(v for v, _ in made.values())))
    env[node] = made if isinstance(result, list | tuple) else made[0]
