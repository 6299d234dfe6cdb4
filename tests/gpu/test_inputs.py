"""A model and its inputs on different devices: the program runs on the rank's, and takes inputs from any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import plait
from tests.gpu.ranks import CUDA

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.mark.parametrize("model_on", ["cpu", "cuda"])
@pytest.mark.parametrize("input_on", ["cpu", "cuda"])
@pytest.mark.parametrize("training", [False, True])
def test_model_and_inputs_may_stand_on_different_devices(model_on: str, input_on: str, training: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(model_on).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    compiled = plait.compile(model, (x.to(input_on),), tp=1, training=training)
    here = next(compiled.parameters()).device
    want = model(x.to(model_on)).cpu()
    for where in ("cpu", "cuda"):
        out = compiled(x.to(where))
        assert out.device == here
        torch.testing.assert_close(out.cpu(), want)
