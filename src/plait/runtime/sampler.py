"""Sampler: several programs in turn, so that a disturbance meets them alike; a sample is the slowest rank's.

    wall clock     behind a barrier of the group; the caller's time, checks of the call included
    device clock   events on the device. In front of them a kernel that sleeps, as long as the host
                   takes to launch the step, then an all-reduce that brings the devices together: so
                   what is timed is the devices' work, for a captured graph and for loose kernels
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

Step = Callable[[], object]
LONGEST = 0.1  # seconds that a device sleeps at most before a sample
CYCLES = 1.9e9  # a second, of the device's sleep


@runtime_checkable
class Elsewhere(Protocol):
    """A step that runs in another process, and is timed there, as a sample here is."""

    def __call__(self) -> object: ...

    def seconds(self) -> float: ...


class Clock(Protocol):
    def seconds(self, step: Step) -> float: ...

    def prepare(self, steps: Sequence[Step]) -> None: ...

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of every number the largest of all ranks."""
        ...


class Wall:
    """Of a CPU rank."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group = device, group

    def prepare(self, steps: Sequence[Step]) -> None:
        pass

    def seconds(self, step: Step) -> float:
        dist.barrier(self.group)
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return [float(x) for x in found]


class Device(Wall):
    """Of a CUDA rank."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(device, group)
        self.token = torch.zeros(1, device=device)
        self.asleep = 0.0

    def prepare(self, steps: Sequence[Step]) -> None:
        """Sleep as long as the slowest host takes to launch the longest of the steps."""
        longest = 0.0
        for step in steps:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            step()
            longest = max(longest, time.perf_counter() - begin)
        torch.cuda.synchronize()
        self.asleep = min(LONGEST, 1.5 * self.slowest([longest])[0])

    def seconds(self, step: Step) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(CYCLES * self.asleep))
        dist.all_reduce(self.token, group=self.group)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def clock(device: torch.device, group: dist.ProcessGroup | None = None) -> Clock:
    return CLOCKS[device.type](device, group)


@dataclass(frozen=True)
class Sampler:
    """`warmup` rounds that are not counted, then `samples` of each row."""

    clock: Clock
    warmup: int
    samples: int

    def run(self, steps: Sequence[Step], clear: Callable[[], object]) -> list[list[float]]:
        """Seconds of every sample of every step; `clear` runs before each, untimed."""
        for step in [*steps] * self.warmup:
            clear()
            step()
        clear()
        self.clock.prepare([step for step in steps if not isinstance(step, Elsewhere)])
        count = len(steps)
        times = [[0.0] * self.samples for _ in steps]
        for turn in range(self.samples):
            for k in range(count):
                which = (turn + k) % count  # no row always follows the same one
                clear()
                times[which][turn] = self._sample(steps[which])
        flat = self.clock.slowest([t for row in times for t in row])
        return [flat[i * self.samples : (i + 1) * self.samples] for i in range(count)]

    def _sample(self, step: Step) -> float:
        return step.seconds() if isinstance(step, Elsewhere) else self.clock.seconds(step)


CLOCKS: dict[str, Callable[[torch.device, dist.ProcessGroup | None], Clock]] = {
    "cpu": Wall,
    "cuda": Device,
}
