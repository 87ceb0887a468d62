"""What users would pick instead, as calls on the same module and inputs: Inductor, ONNX Runtime, OpenVINO.

Every rival computes in float32 with one thread and returns what the module returns.  Those that are not
installed (``pip install lowtide[peers]``) are left out, and the table says so.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["RIVALS", "available"]

Inputs = tuple[Tensor, ...]
Call = Callable[[], object]


def inductor(module: nn.Module, inputs: Inputs) -> Call:
    """torch.compile with its defaults."""
    torch._dynamo.reset()
    compiled = torch.compile(module)
    compiled(*inputs)
    return lambda: compiled(*inputs)


def frozen(module: nn.Module, inputs: Inputs) -> Call:
    """torch.compile with weights as constants, packed."""
    torch._dynamo.reset()
    compiled = torch.compile(module, options={"freezing": True})
    compiled(*inputs)
    return lambda: compiled(*inputs)


def exported(module: nn.Module, inputs: Inputs, folder: Path) -> Path:
    """The module as an ONNX file."""
    path = folder / "model.onnx"
    torch.onnx.export(module, inputs, path, dynamo=True, verbose=False, external_data=False)
    return path


def onnxruntime(module: nn.Module, inputs: Inputs) -> Call:
    """ONNX Runtime, all graph optimisations, one thread."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = exported(module, inputs, Path(folder))
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: session.run(None, given)


def openvino(module: nn.Module, inputs: Inputs) -> Call:
    """OpenVINO in float32 (its default here would be bfloat16), one thread."""
    import openvino as runtime

    core = runtime.Core()
    with tempfile.TemporaryDirectory() as folder:
        model = core.read_model(str(exported(module, inputs, Path(folder))))
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "1"}
        compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    given = [value.numpy() for value in inputs]
    return lambda: request.infer(given, share_inputs=True)


RIVALS: dict[str, tuple[str, Callable[[nn.Module, Inputs], Call]]] = {
    "inductor": ("torch", inductor),
    "frozen": ("torch", frozen),
    "onnxruntime": ("onnxruntime", onnxruntime),
    "openvino": ("openvino", openvino),
}
"""Name -> (the package that it needs, how to make the call)."""


def available(names: str) -> list[str]:
    """The rivals of a comma-separated list (``all``: every one) whose packages are installed."""
    wanted = list(RIVALS) if names == "all" else [name for name in names.split(",") if name]
    return [name for name in wanted if importlib.util.find_spec(RIVALS[name][0]) is not None]
