"""This machine's device and NCCL measured as `plait calibrate` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from plait.cluster import detect, stored
from plait.collectives.schedule import Spec
from plait.runtime import calibrate_cuda
from plait.runtime.processes import launch
from tests.gpu.ranks import CUDA

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def test_the_device_is_rated_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    preset = detect()
    found = calibrate_cuda.measure(seconds=20.0)
    stored.store(found)
    here = detect()
    assert here == found.cluster
    for (dtype, now), (_, then) in zip(here.device.flops, preset.device.flops, strict=True):
        assert then / 2 < now < 2 * then, dtype
    assert preset.device.bandwidth / 2 < here.device.bandwidth < 2 * preset.device.bandwidth
    print(found)
    if torch.cuda.device_count() == 1:
        assert not found.rows and "one device: no collectives" in str(found)
    else:
        assert found.error < 0.2, str(found)


def test_collectives_are_timed_in_graphs(tmp_path: Path) -> None:
    """On as many devices as there are: every collective at every size has seconds of its own."""
    n, out = torch.cuda.device_count(), tmp_path / "rows.json"
    launch(calibrate_cuda.worker, n, str(out), 5.0)
    rows = json.loads(out.read_text())
    assert len(rows) == 4 * len(calibrate_cuda.SIZES)
    assert {Spec.parse(row["spelling"]).n for row in rows} == {n}
    assert all(0 < row["seconds"] < 1 for row in rows), rows
