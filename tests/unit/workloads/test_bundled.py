"""The bundled models: tiny variants train and infer, are the same every time, and honour their options."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.workload import Workload
from lowtide.workloads import BUNDLED, TINY, load_workload, options_of, summary_of

NAMES = tuple(BUNDLED)


def loss_of(workload: Workload) -> torch.Tensor:
    """Forward and loss of one step, under a fixed seed."""
    torch.manual_seed(7)
    output = workload.model(*workload.args, **workload.kwargs)
    loss = output.loss if workload.loss is None else workload.loss(output, *workload.targets)
    assert isinstance(loss, torch.Tensor)
    return loss


def logits_of(workload: Workload) -> torch.Tensor:
    with torch.no_grad():
        output = workload.model(*workload.args, **workload.kwargs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_a_step_lowers_the_loss(name: str) -> None:
    workload = load_workload(f"{TINY[name]},mode=train")
    assert workload.training
    assert workload.model.training
    assert isinstance(workload.optimizer, torch.optim.AdamW)
    first = loss_of(workload)
    for _ in range(5):
        loss_of(workload).backward()  # type: ignore[no-untyped-call]
        workload.optimizer.step()
        workload.optimizer.zero_grad()
    assert torch.isfinite(first)
    assert loss_of(workload) < first


@pytest.mark.parametrize("name", NAMES)
def test_inference_is_deterministic_from_the_fixed_seed(name: str) -> None:
    text = f"{TINY[name]},mode=infer"
    before = torch.random.get_rng_state()
    first, second = load_workload(text), load_workload(text)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not first.training
    assert not first.model.training
    assert torch.equal(logits_of(first), logits_of(second))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "resnet50"])
def test_dropout_is_off_unless_asked_for(name: str) -> None:
    def drops(text: str) -> bool:
        workload = load_workload(text)
        torch.manual_seed(1)
        first = logits_of(workload)
        torch.manual_seed(2)
        return not torch.equal(first, logits_of(workload))

    assert not drops(TINY[name])
    assert drops(f"{TINY[name]},dropout=0.5")


@pytest.mark.parametrize("name", NAMES)
def test_options_have_mode_batch_and_dropout(name: str) -> None:
    options = {option.name: option for option in options_of(BUNDLED[name])}
    assert options["mode"].choices == ("train", "infer")
    assert options["batch"].kind is int
    assert options["dropout"].default == 0
    assert summary_of(BUNDLED[name]).endswith(".")


def test_gpt2_attentions_agree_and_are_causal() -> None:
    sdpa, explicit = (
        load_workload(f"{TINY['gpt2']},mode=infer,attention={kind}") for kind in ("sdpa", "explicit")
    )
    torch.testing.assert_close(logits_of(sdpa), logits_of(explicit))
    ids = sdpa.args[0].clone()
    before = logits_of(sdpa)
    ids[:, 8] = (ids[:, 8] + 1) % 32
    with torch.no_grad():
        after = sdpa.model(ids)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert not torch.equal(after[:, 8:], before[:, 8:])


def test_gpt2_head_is_tied() -> None:
    model = load_workload(TINY["gpt2"]).model
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")


@pytest.mark.parametrize("name", ["unet", "unetpp"])
def test_segmentation_shapes(name: str) -> None:
    workload = load_workload(f"{name}:batch=1,size=24,width=4,depth=3,classes=5,mode=infer")
    assert logits_of(workload).shape == (1, 5, 24, 24)


def test_unet_has_the_pinned_parts() -> None:
    model = load_workload("unet:batch=1,size=16,mode=infer").model
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.Conv2d) == 2 * (3 + 1 + 3) + 1
    assert kinds.count(nn.BatchNorm2d) == 2 * (3 + 1 + 3)
    assert kinds.count(nn.ConvTranspose2d) == 3


def test_unetpp_has_a_node_for_each_pair() -> None:
    model = load_workload("unetpp:batch=1,size=16,width=4,mode=infer").model
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.BatchNorm2d) == 2 * (4 + 3 + 2 + 1)


def test_gptneo_alternates_attention_and_allows_odd_layers() -> None:
    model = load_workload(f"{TINY['gptneo-1.3b']},layers=3".replace("layers=2,", "")).model
    assert list(model.config.attention_layers) == ["global", "local", "global"]  # type: ignore[union-attr, arg-type]
