"""Overlap between processes of this host: chunked programs against whole ones, interleaved.

    python bench/overlap.py [--nproc 2] [--rows 1024] [--width 512] [--link 0]

A block of two matmuls and a sum, per form the median over rounds of the slower rank. `--link us`
adds so many microseconds per MiB to every transfer, spent asleep: a stand-in for a network, on which
the cores are free while bytes travel. What the plan predicted is printed beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import plait
from plait.runtime.transport import Transport


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def link(us: float) -> None:
    """Every transfer sleeps for its bytes."""
    run = Transport.run

    def slow(self: Transport, step: Any, x: torch.Tensor, cut: Any, algorithm: str) -> torch.Tensor:
        if step.collective is not None:
            time.sleep(us * 1e-6 * x.numel() * x.element_size() / 2**20)
        return run(self, step, x, cut, algorithm)

    Transport.run = slow  # type: ignore[method-assign]


def work(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.store, rank=rank, world_size=options.nproc)
    group = dist.group.WORLD
    if options.link:
        link(options.link)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
    x = torch.randn(options.rows, options.width)
    forms: dict[str, Any] = {"off": "off", "auto": "auto", "2": 2, "4": 4, "8": 8}
    made = {name: plait.compile(model, (x,), group=group, overlap=o) for name, o in forms.items()}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(options.rounds + 2):
        for name, compiled in made.items():
            dist.barrier(group)
            begin = time.perf_counter()
            with torch.no_grad():
                compiled(x)
            slower = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            if turn >= 2:
                times[name].append(float(slower))
    if rank == 0:
        base = statistics.median(times["off"])
        for name, seconds in times.items():
            low, middle, high = statistics.quantiles(seconds, n=4)
            plan = made[name].plan
            forms_used = ", ".join(dict.fromkeys(o.form for o in plan.overlaps)) or "whole"
            print(
                f"overlap={name:>4}: {middle * 1e3:8.2f} ms ({low * 1e3:.2f} to {high * 1e3:.2f}), "
                f"{base / middle:.2f}x; predicted {plan.seconds * 1e3:.2f} ms; {forms_used}"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("nproc", 2), ("rows", 1024), ("width", 512), ("layers", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--link", type=float, default=0.0)
    options = parser.parse_args()
    options.store = f"file:///tmp/plait-overlap-{time.time_ns()}"
    mp.spawn(work, (options,), nprocs=options.nproc)


if __name__ == "__main__":
    main()
