"""Capture, replay and time, on every rank of a group in step.

A sample is `replays` replays of one graph between two events, behind a collective that brings the
ranks together on the device. What is reported is the median over the samples of the slowest rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

QUIET = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def start() -> tuple[int, int, torch.device]:
    """One process a device under torchrun, or several on one device (gloo) if there are too few."""
    os.environ.update(QUIET)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = torch.cuda.device_count() < ranks
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if shared:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return rank, ranks, device


def capture(build: Callable[[], Any], warm: int = 2) -> torch.cuda.CUDAGraph:
    """`build` run `warm` times on a side stream, then captured there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            build()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        build()
    torch.cuda.synchronize()
    return graph


def interleaved(
    graphs: dict[str, torch.cuda.CUDAGraph], samples: int, replays: int = 1
) -> dict[str, list[float]]:
    """Milliseconds a replay, of the slowest rank, `samples` of each graph in turn."""
    token = torch.zeros(1, device="cuda")
    shared = dist.get_backend() == "gloo"
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    for _ in range(samples):
        for name, graph in graphs.items():
            if shared:
                dist.barrier()
            else:
                dist.all_reduce(token)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    times = torch.tensor([[b.elapsed_time(e) / replays for b, e in v] for v in events.values()])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return dict(zip(graphs, times.tolist(), strict=True))


def chain(build: Callable[[int], Any], length: int, samples: int = 15, replays: int = 3) -> float:
    """Microseconds of one of `length` calls in a row inside one graph."""
    graph = capture(lambda: [build(i) for i in range(length)], warm=1)
    graph.replay()
    torch.cuda.synchronize()
    return median(interleaved({"": graph}, samples, replays)[""]) * 1000 / length


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and ninth decile."""
    tenths = quantiles(times, n=10)
    return median(times), tenths[0], tenths[-1]
