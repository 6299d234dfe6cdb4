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
SIZE = 1 << 20
ASKED: tuple[tuple[Collective, int], ...] = (
    ("all_reduce", 3),
    ("all_reduce", 4),
    ("all_gather", 3),
    ("reduce_scatter", 4),
)


def alone(out: str) -> None:
    """In a process of its own, for a network once left is not entered again."""
    if private_loopback():
        launch(count, 4, out)


def count(out: str) -> None:
    torch.set_num_threads(1)
    world("gloo")
    groups = {3: dist.new_group([0, 1, 2]), 4: dist.group.WORLD}
    rows = []
    for collective, n in ASKED:
        if dist.get_rank() < n:
            found = measure(names(collective), SIZE, groups[n], 1, 0, collective)
            rows += [(collective, n, m.algorithm, m.wire, m.counted) for m in found]
            (odd,) = measure(["ring"], 7, groups[n], 1, 0, collective)
            assert odd.size == (4 * n if collective == "all_gather" else 8)  # whole elements
        dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def test_bytes_on_the_wire_are_the_ledgers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out = tmp_path / "rows.json"
    child = multiprocessing.get_context("spawn").Process(target=alone, args=(str(out),))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    if not out.exists():
        pytest.skip("this system lets nobody have a network of their own")
    rows = json.loads(out.read_text())
    assert len(rows) == sum(len(names(collective)) for collective, _ in ASKED)
    for collective, n, algorithm, wire, ledger in rows:
        assert ledger <= wire <= ledger * (1 + HEADERS), (collective, n, algorithm, wire, ledger)
