"""Matmuls of a program's shapes are timed once each, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from plait.cluster import Cluster
from plait.runtime.stopwatch import Stopwatch
from tests.gpu.ranks import CUDA

here = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@here
def test_every_shape_is_timed_once_and_the_users_generator_is_not_touched() -> None:
    device = torch.device("cuda", 0)
    watch = Stopwatch(device)
    before = torch.cuda.get_rng_state(device)
    found = {m: watch(m, 512, 256, "torch.bfloat16") for m in (1, 64, 4096)}
    assert all(seconds is not None and 0 < seconds < 1e-2 for seconds in found.values()), found
    assert found == {m: watch(m, 512, 256, "bfloat16") for m in found}
    assert torch.equal(before, torch.cuda.get_rng_state(device))
    assert watch(64, 512, 256, "float8_e4m3fn") is None and watch(64, 512, 256, "int8") is None


@here
def test_what_does_not_fit_the_memory_has_no_seconds() -> None:
    assert Stopwatch(torch.device("cuda", 0))(2**20, 64, 2**20, "bfloat16") is None  # 2 TB


def test_only_the_device_at_hand_is_timed() -> None:
    described = Cluster.of("dgx-a100").device
    assert Stopwatch.of(described, torch.device("cpu")) is None
    if CUDA:
        device = torch.device("cuda", 0)
        assert Stopwatch.of(described, device) is None
        assert Stopwatch.of(Cluster.of(None).device, device) is not None
