"""How many kernels an inference launches, ours and Inductor's (frozen), and DNNFusion's fusion rates.

    python bench/counts.py [--models NAME,...] [--no-inductor] [--json OUT.json]

`operators` are ATen operators that compute (views left out), `ours` kernels and operators after rewriting and
fusion, `inductor` the calls in the code that Inductor generates.  `onnx` counts operators of the ONNX graph
as the model zoo of the paper's time has it (opset 12: norms and GELU taken apart; sizes of batch and
sequence left open, hence their arithmetic in the graph; nothing folded; constants left out), and
`rate` is onnx / ours, to be compared with the paper's Table 5 (`paper`).
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "src"),
]

MODELS: dict[str, tuple[str, float | None]] = {
    "mlp": ("mlp:batch=256,mode=infer", None),
    "unet": ("unet:batch=1,size=64,width=16,mode=infer", 3.6),
    "unetpp": ("unetpp:batch=1,size=64,width=16,mode=infer", None),
    "gpt2": ("gpt2:layers=12,dim=256,heads=4,seq=64,batch=1,vocab=512,attention=explicit,mode=infer", 10.0),
    "resnet50": ("resnet50:batch=1,size=64,mode=infer", None),
    "mobilenetv2": ("mobilenetv2:batch=1,size=96,mode=infer", 2.8),
    "vit-base": ("vit-base:batch=1,size=64,layers=12,dim=256,heads=4,mode=infer", None),
    "bert-base": (
        "bert-base:batch=1,seq=64,layers=12,dim=256,heads=4,vocab=512,attention=eager,mode=infer",
        4.5,
    ),
    "gptneo-1.3b": ("gptneo-1.3b:batch=1,seq=64,layers=4,dim=256,heads=4,vocab=512,mode=infer", None),
}
"""Name -> (workload, the paper's fusion rate of the model nearest to it)."""

_CALL = re.compile(
    r"^\s+(?:\w+ = )?(?:cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.(?!inductor)[\w.]+|kernels?\.\w+)\("
)


@dataclass(frozen=True)
class Count:
    """One model; None where something was not counted."""

    model: str
    operators: int
    rewritten: int
    ours: int
    inductor: int | None
    onnx: int | None
    rate: float | None
    paper: float | None


def count_ours(text: str) -> tuple[int, int, int]:
    """(operators captured, after rewriting, kernels and operators launched)."""
    from bench.steps import prepared_graph
    from lowtide.capture.door import capture
    from lowtide.workloads.parse import load_workload

    program = capture(load_workload(text))
    before, plain, fused = prepared_graph(program.graph)
    return tuple(sum(not g.is_view(n) for n in g.nodes) for g in (before, plain, fused))  # type: ignore[return-value]


def count_inductor(text: str) -> int:
    """Calls of kernels and library functions in Inductor's generated code."""
    from torch._inductor.utils import run_and_get_code

    from lowtide.workloads.parse import load_workload

    workload = load_workload(text)
    torch._dynamo.reset()
    compiled = torch.compile(workload.model, options={"freezing": True})
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, *workload.args, **workload.kwargs)
    return sum(bool(_CALL.match(line)) for code in codes for line in code.split("def call(")[-1].splitlines())


def count_onnx(text: str) -> int | None:
    """Operators of the ONNX graph at opset 12, constants left out; None if the exporter is not there."""
    try:
        import onnx
    except ImportError:
        return None
    from lowtide.workloads.parse import load_workload

    workload = load_workload(text)
    given = (*workload.args, *workload.kwargs.values())
    names = [f"given{k}" for k in range(len(given))]
    tokens = any(not each.dtype.is_floating_point for each in given)
    whole = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Plain(workload.model, tuple(workload.kwargs)),
            given,
            whole,
            opset_version=12,
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            input_names=names,
            dynamic_axes=dict.fromkeys(names, {0: "batch", 1: "length"} if tokens else {0: "batch"}),
        )
    model = onnx.load_model_from_string(whole.getvalue())
    return sum(node.op_type not in ("Constant", "Identity") for node in model.graph.node)


class _Plain(torch.nn.Module):
    """A model whose keyword arguments are positional and whose result is one tensor."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        split = len(given) - len(self.names)
        found = self.model(*given[:split], **dict(zip(self.names, given[split:], strict=True)))
        return found if isinstance(found, torch.Tensor) else found[0]


def count(model: str, inductor: bool) -> Count:
    """One model, in this process."""
    text, paper = MODELS[model]
    operators, rewritten, ours = count_ours(text)
    try:
        onnx = count_onnx(text) if paper else None
    except (RuntimeError, ValueError, torch.onnx.errors.OnnxExporterError) as error:
        print(f"# {model}: no ONNX graph: {str(error).splitlines()[0]}", file=sys.stderr)
        onnx = None
    theirs = count_inductor(text) if inductor else None
    return Count(model, operators, rewritten, ours, theirs, onnx, onnx / ours if onnx else None, paper)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asdict(count(chosen.one, not chosen.no_inductor))))
        return
    results = []
    heads = ("operators", "rewritten", "ours", "inductor", "onnx", "rate", "paper")
    print(f"{'model':14}" + "".join(f"{head:>10}" for head in heads))
    for model in chosen.models.split(","):
        command = [
            sys.executable,
            __file__,
            "--one",
            model,
            *(["--no-inductor"] if chosen.no_inductor else []),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{model:14} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        results.append(found)
        cells = (found[head] for head in heads)
        print(f"{model:14}" + "".join(f"{_cell(cell):>10}" for cell in cells), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
