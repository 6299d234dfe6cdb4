"""What the host's loopback counted, beside the ledger: every algorithm, in a network of its own."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plait.collectives import Collective, names
from plait.collectives.measure import measure, private_loopback
from plait.runtime.processes import launch, world

HEADERS = 0.02  # of TCP, IP and acknowledgements: packets of 64 KiB take less than a hundredth
SIZE = 4 << 20


def alone(collective: Collective, nproc: int, out: str) -> None:
    """In a process of its own, for a network once left is not entered again."""
    if private_loopback():
        launch(count, nproc, collective, out)


def count(collective: Collective, out: str) -> None:
    torch.set_num_threads(1)
    world("gloo")
    found = measure(names(collective), SIZE, rounds=1, warm=1, collective=collective)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([(m.algorithm, m.wire, m.counted) for m in found]))
    dist.barrier()


@pytest.mark.parametrize(
    ("collective", "nproc"),
    [("all_reduce", 3), ("all_reduce", 4), ("all_gather", 3), ("reduce_scatter", 4)],
)
def test_bytes_on_the_wire_are_the_ledgers(
    collective: Collective, nproc: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out = tmp_path / "rows.json"
    child = multiprocessing.get_context("spawn").Process(
        target=alone, args=(collective, nproc, str(out))
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    if not out.exists():
        pytest.skip("this system lets nobody have a network of their own")
    for algorithm, wire, ledger in json.loads(out.read_text()):
        assert ledger <= wire <= ledger * (1 + HEADERS), (algorithm, wire, ledger)
