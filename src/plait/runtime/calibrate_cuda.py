"""Measure this machine's CUDA devices, and NCCL between them, and make of it a Cluster of their own rates.

    calibration = measure(2, 4, 8)    a process for each device, NCCL: about a minute
    calibration.cluster               detect() finds it again

Collectives run as a step runs them, many in a CUDA graph, so that nothing is launched by a host: a sample is the
slowest rank's, a figure the lower quartile of turns that all sizes take. Of the device come the rates of long matmuls
and of long streams; levels, latencies and Plait's own transfers between devices stay those of the preset, which
plans by what copies over the same links take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from plait.cluster import Device
from plait.cluster.presets import detect
from plait.cluster.stored import Calibration, Measured
from plait.collectives.schedule import Spec
from plait.errors import InputError
from plait.runtime.calibrate import (
    Say,
    call_of,
    collectives,
    elements,
    in_turns,
    keep,
    natives,
    own,
)
from plait.runtime.graphs import capturing
from plait.runtime.processes import world
from plait.runtime.stopwatch import Stopwatch, between

METHOD = "NCCL between devices of one host, in CUDA graphs, lower quartile over rounds of the slowest rank"
SIZES = tuple(4**k for k in range(5, 15))  # 1 KiB to 256 MiB
SQUARE = {"bfloat16": 8192, "float32": 4096}  # rows and columns of the matmuls by which a device is rated
STREAM = 1 << 30  # bytes that a pass over memory reads
IN_A_GRAPH = 8


def measure(*nprocs: int, say: Say = print, seconds: float = 80.0) -> Calibration:
    """With each number of devices (2, 4, ... and all of them if none is given), in so many seconds."""
    host = detect(measured=False)
    counts = nprocs or tuple(sorted({2**k for k in range(1, host.size.bit_length())} | {host.size}))
    wrong = [str(n) for n in nprocs if n > host.size]
    if wrong:
        raise InputError(f"{', '.join(wrong)} processes: this machine has {host.size} devices, one for each process")
    say(f"calibrate: {host.device.name}, matmuls and memory")
    host = replace(host, device=rated(host.device, torch.device("cuda", 0)))
    rows: list[Measured] = []
    several = [n for n in counts if n > 1]
    for done, n in enumerate(several):
        say(f"calibrate: {n} devices ({done + 1} of {len(several)})")
        rows += collectives(worker, n, seconds / len(several))
    return own(rows, host, "nccl", METHOD)


# --- the device ----------------------------------------------------------------------------------


def rated(preset: Device, here: torch.device) -> Device:
    """The preset at the rates that long matmuls and long streams reach on the device."""
    watch = Stopwatch(here)
    flops = dict(preset.flops)
    for dtype, side in SQUARE.items():
        took = watch(side, side, side, dtype)
        if took is not None and dtype in flops:
            flops[dtype] *= preset.matmul_seconds(side, side, side, dtype) / took
    bandwidth = 2 * STREAM / _streamed(here) / preset.memory_share
    return replace(preset, flops=tuple(flops.items()), bandwidth=bandwidth)


def _streamed(here: torch.device) -> float:
    """Seconds in which `STREAM` bytes are read and as many written."""
    x = torch.zeros(STREAM // 4, device=here)
    out = torch.empty_like(x)
    torch.add(x, 1.0, out=out)
    return min(between(lambda: torch.add(x, 1.0, out=out)) for _ in range(7))


# --- the collectives -----------------------------------------------------------------------------


def worker(out: str, seconds: float) -> None:
    world()
    jobs = [(name, size) for size in SIZES for name in natives(dist.get_world_size())]
    bench = Graphs(torch.device("cuda", torch.cuda.current_device()))
    keep(in_turns(jobs, bench.once, seconds), out)


@dataclass
class Graphs:
    """A graph of calls for each spelling and size, captured when it is first asked for."""

    device: torch.device
    made: dict[tuple[str, int], torch.cuda.CUDAGraph] = field(default_factory=dict)
    wholes: dict[int, Tensor] = field(default_factory=dict)

    def once(self, spelling: str, nbytes: int) -> float:
        """Seconds of one call of those in the graph."""
        if (spelling, nbytes) not in self.made:
            self.made[spelling, nbytes] = self._captured(self._call(spelling, nbytes))
        replay = self.made[spelling, nbytes].replay
        replay()  # until here ranks wait for each other's hosts
        return between(replay) / IN_A_GRAPH

    def _captured(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize(self.device)
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            for _ in range(IN_A_GRAPH):
                call()
        return graph

    def _call(self, spelling: str, nbytes: int) -> Callable[[], object]:
        spec = Spec.parse(spelling)
        if nbytes not in self.wholes:  # zeros: what is sent does not change how long it takes
            self.wholes[nbytes] = torch.zeros(elements(spec, nbytes), device=self.device)
        return call_of(spec, self.wholes[nbytes])
