"""What the watch over a group costs: seconds to set up, per meeting, per guarded block, and per
all-reduce without and with it (interleaved, the best of five).

    python bench/watch.py
"""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist

from plait.runtime.processes import launch
from plait.runtime.watch import Watch

MEETINGS, GUARDS, ROUNDS = 200, 10_000, 10


def main() -> None:
    start = time.perf_counter()
    with Watch() as watch:
        print_time("set-up", time.perf_counter() - start)
        start = time.perf_counter()
        for i in range(MEETINGS):
            watch.exchange("meeting", i)
        print_time("exchange", (time.perf_counter() - start) / MEETINGS)
        start = time.perf_counter()
        for _ in range(GUARDS):
            with watch.guard("nothing"):
                pass
        print_time("guard", (time.perf_counter() - start) / GUARDS)
        for size, turns in ((64, 200), (2**20, 10)):
            plain, guarded = all_reduces(watch, size, turns)
            print_time(f"all_reduce of {4 * size} bytes, plain", plain)
            print_time(f"all_reduce of {4 * size} bytes, watched", guarded)
            print_line(f"  ratio {guarded / plain:.3f}")


def all_reduces(watch: Watch, size: int, turns: int) -> tuple[float, float]:
    x = torch.ones(size)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(ROUNDS):
        watched = bool(turn % 2)
        with watch.guard("turn") if watched else contextlib.nullcontext():
            start = time.perf_counter()
            for _ in range(turns):
                dist.all_reduce(x)
            times[watched].append((time.perf_counter() - start) / turns)
    return min(times[False]), min(times[True])


def print_time(what: str, seconds: float) -> None:
    print_line(f"{what}: {seconds * 1e6:.1f} us")


def print_line(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    for nproc in (2, 4):
        print(f"{nproc} processes")
        launch(main, nproc)
