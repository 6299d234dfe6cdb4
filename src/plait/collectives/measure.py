"""Measure: algorithms timed against each other in one run, and their bytes counted by the host.

    measure(["native", "ring", "two_shot"], 64 << 20, group)

Samples of all algorithms take turns, so that what else the machine does falls on all of them. The
time of a call is that of its slowest rank, after a barrier. Bytes are those that the host's
loopback interface received in one call, headers and acknowledgements included: right only when all
ranks are on this host, gloo is on `lo`, and nothing else talks over it (`private_loopback`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from plait.collectives import calls
from plait.collectives.ledger import least, ledger
from plait.collectives.request import request
from plait.collectives.schedule import Collective, Schedule

COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True)
class Measured:
    """One algorithm at one size. Bandwidths as nccl-tests defines them, in bytes a second."""

    algorithm: str
    collective: Collective
    ranks: int
    size: int
    samples: tuple[float, ...]  # seconds
    schedule: Schedule | None  # None: the backend's own
    wire: int | None  # bytes on the loopback in one call, of all ranks together

    @property
    def seconds(self) -> float:
        return median(self.samples)

    @property
    def algorithm_bandwidth(self) -> float:
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return self.algorithm_bandwidth * least(self.collective, self.ranks).busiest

    @property
    def counted(self) -> int | None:
        """The ledger's bytes of all ranks together."""
        return ledger(self.schedule, self.size, 4).total if self.schedule else None


def measure(
    algorithms: Sequence[str],
    size: int,
    group: dist.ProcessGroup | None = None,
    rounds: int = 9,
    warm: int = 2,
    collective: Collective = "all_reduce",
    extra: Callable[[torch.Tensor], object] | None = None,
) -> tuple[Measured, ...]:
    """Called on all ranks; every rank gets the same answer. Sizes are in bytes of float32, rounded
    up to whole elements (of all_gather, on every rank).

    `extra`: one more thing to time, under the name "extra".
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    own = ceil(size / 4 / (ranks if collective == "all_gather" else 1))  # of this rank's input
    size = 4 * own * (ranks if collective == "all_gather" else 1)
    tensor = torch.zeros(own)
    runs: dict[str, Callable[[], object]] = {
        name: _caller(collective, tensor, group, name) for name in algorithms
    }
    if extra is not None:
        runs["extra"] = lambda: extra(tensor)
    taken = torch.zeros(len(runs), warm + rounds, dtype=torch.float64)
    for turn in range(warm + rounds):
        for i, run in enumerate(runs.values()):
            taken[i, turn] = _timed(run, group)
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    wires = [_counted(run, group) for run in runs.values()]
    return tuple(
        Measured(
            name,
            collective,
            ranks,
            size,
            tuple(taken[i, warm:].tolist()),
            _schedule(collective, tensor, name, rank, ranks),
            wires[i],
        )
        for i, name in enumerate(runs)
    )


def _caller(
    collective: Collective, tensor: torch.Tensor, group: dist.ProcessGroup | None, name: str
) -> Callable[[], object]:
    call = getattr(calls, collective)
    if collective == "all_reduce":
        return lambda: call(tensor, group, name)
    return lambda: call(tensor, group=group, algorithm=name)


def _schedule(
    collective: Collective, tensor: torch.Tensor, name: str, rank: int, ranks: int
) -> Schedule | None:
    if name == "extra":
        return None
    op = "sum" if collective in ("all_reduce", "reduce_scatter", "reduce") else None
    root = 0 if collective in ("broadcast", "reduce") else None
    return request(collective, tensor, (rank, ranks), (name, None), op, root).schedule


def _timed(run: Callable[[], object], group: dist.ProcessGroup | None) -> float:
    dist.barrier(group)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _counted(run: Callable[[], object], group: dist.ProcessGroup | None) -> int | None:
    """Bytes on the loopback in one call: the middle of three, as TCP sends again what was acknowledged late."""
    found = sorted(n for _ in range(3) if (n := _count(run, group)) is not None)
    return found[len(found) // 2] if found else None


def _count(run: Callable[[], object], group: dist.ProcessGroup | None) -> int | None:
    """Bytes in this call, less those of the barriers; rank 0's counters, for all."""
    first, second = _still(group), _still(group)
    run()
    counters = torch.tensor([first, second, _still(group)])
    dist.broadcast(counters, group=group, group_src=0)
    before, between, after = counters.tolist()
    if -1 in (before, between, after):
        return None
    return int(max(0, (after - between) - (between - before)))  # a retransmission may tip the balance


def _still(group: dist.ProcessGroup | None) -> int:
    """The loopback's counter while no rank sends: none goes on before all have read."""
    dist.barrier(group)
    count = loopback_bytes()
    dist.barrier(group)
    return -1 if count is None else count


# --- the loopback interface -------------------------------------------------------------------------


def loopback_bytes() -> int | None:
    """Bytes that `lo` has received; None where there are no such counters."""
    if not COUNTERS.exists():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return None


def private_loopback() -> bool:
    """Move this process, and the ones that it starts, to a network of their own with nothing but a
    loopback; False where the system does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_network = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET: linux/sched.h
    flags = new_network if os.geteuid() == 0 else new_user | new_network
    if not hasattr(libc, "unshare") or libc.unshare(flags) != 0:
        return False
    get_flags, set_flags, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sh14s", b"lo", 0, b"")
        flags = struct.unpack("16sh14s", fcntl.ioctl(any_socket, get_flags, asked))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14s", b"lo", flags | up, b""))
    return True
