"""Predicted results are what the CPU gives."""

from __future__ import annotations

import pytest
import torch

from lowtide.ir.aten import call, tensors_of
from lowtide.ir.graph import TensorMeta
from lowtide.ir.ops import Aten, Ref
from lowtide.transforms.prediction import predict

LAYER_NORM = Aten("aten.native_layer_norm.default", (Ref(0), (6,), Ref(1), Ref(1), 1e-5))
GROUP_NORM = Aten("aten.native_group_norm.default", (Ref(0), Ref(1), Ref(1), 4, 6, 1, 2, 1e-5))


@pytest.mark.parametrize("op", [LAYER_NORM, GROUP_NORM])
def test_statistics_in_mixed_precision(op: Aten) -> None:
    metas = (TensorMeta((4, 6), (6, 1), torch.bfloat16), TensorMeta((6,), (1,), torch.float32))
    real = tensors_of(call(op, [torch.ones(meta.shape, dtype=meta.dtype) for meta in metas]))
    found = predict(op, metas)
    assert [one.meta.dtype for one in found] == [one.dtype for one in real]
    assert [one.meta.shape for one in found] == [tuple(one.shape) for one in real]
    assert found[1].meta.dtype is torch.float32 and found[0].meta.dtype is torch.bfloat16
