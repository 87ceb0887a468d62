"""The bundled workloads by name, their options read from the builders' signatures, and tiny variants.

A builder is a function of keyword-only options with defaults; its annotations (int, float, a Literal
of strings) say what the command line accepts, and its docstring's first line is what
`lowtide workloads` prints.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lowtide.workload import Workload
from lowtide.workloads.gpt2 import gpt2
from lowtide.workloads.huggingface import bert_base, gptneo, mobilenetv2, resnet50, vit_base
from lowtide.workloads.mlp import mlp
from lowtide.workloads.unet import unet, unetpp

__all__ = ["BUNDLED", "TINY", "Option", "options_of", "summary_of"]

Builder = Callable[..., Workload]

BUNDLED: Mapping[str, Builder] = MappingProxyType(
    {
        "mlp": mlp,
        "unet": unet,
        "unetpp": unetpp,
        "gpt2": gpt2,
        "resnet50": resnet50,
        "mobilenetv2": mobilenetv2,
        "vit-base": vit_base,
        "bert-base": bert_base,
        "gptneo-1.3b": gptneo,
    }
)

# The same networks, small enough for a test to run in well under a second.
TINY: Mapping[str, str] = MappingProxyType(
    {
        "mlp": "mlp:batch=16,dim=16,layers=2",
        "unet": "unet:batch=2,size=16,width=4,depth=2",
        "unetpp": "unetpp:batch=2,size=16,width=4,depth=2",
        "gpt2": "gpt2:layers=2,dim=16,heads=2,seq=16,batch=2,vocab=32",
        "resnet50": "resnet50:batch=2,size=32,width=8,stages=2,classes=10",
        "mobilenetv2": "mobilenetv2:batch=2,size=32,width=0.1,classes=10",
        "vit-base": "vit-base:batch=2,size=32,layers=2,dim=16,heads=2,classes=10",
        "bert-base": "bert-base:batch=2,seq=16,layers=2,dim=16,heads=2,vocab=32",
        "gptneo-1.3b": "gptneo-1.3b:batch=2,seq=16,layers=2,dim=16,heads=2,vocab=32",
    }
)


@dataclass(frozen=True)
class Option:
    """One option of a bundled workload; `choices` is empty for numbers."""

    name: str
    kind: type
    default: int | float | str
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(self.choices) or self.default}"


def options_of(builder: Builder) -> tuple[Option, ...]:
    """The options that a builder takes, in the order of its signature."""
    annotations = typing.get_type_hints(builder)
    parameters = inspect.signature(builder).parameters.values()
    return tuple(
        _option(parameter.name, annotations[parameter.name], parameter.default) for parameter in parameters
    )


def _option(name: str, annotation: Any, default: int | float | str) -> Option:
    if typing.get_origin(annotation) is typing.Literal:
        return Option(name, str, default, typing.get_args(annotation))
    return Option(name, annotation, default)


def summary_of(builder: Builder) -> str:
    """The first line of a builder's docstring."""
    return (inspect.getdoc(builder) or "").partition("\n")[0]
