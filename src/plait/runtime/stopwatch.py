"""Stopwatch: what matmuls of a program's own shapes take on the CUDA device at hand.

Libraries choose among kernels by the shape, and pieces of a matmul get other ones than the whole, which no clock of
waves of tiles foresees: of 97 shapes on H200 it was 37 % too slow to 31 % too fast (bench/results/kernels.md). Where
a plan is made for the ranks that make it, the routes of moves and the packs of matmuls go by these seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from statistics import median

import torch
from torch import Tensor

from plait.cluster.device import Device
from plait.runtime.graphs import capturing

CACHES = 128 << 20  # bytes that no cache of a device holds: operands of a program come from memory
LENGTH = 1e-3  # seconds of matmuls in a sample, 2 at least
SAMPLES = 5


@dataclass
class Stopwatch:
    """x [m, k] times the transpose of w [n, k], one of many in a CUDA graph; each shape is timed once."""

    device: torch.device
    _seen: dict[tuple[int, int, int, str], float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, planned: Device, here: torch.device) -> Stopwatch | None:
        """None where plans are made for another kind of device than the one `here`."""
        if here.type != "cuda" or planned.name != torch.cuda.get_device_name(here):
            return None
        return cls(here)

    def __call__(self, m: int, n: int, k: int, dtype: str) -> float | None:
        """Seconds; None for a dtype that is no torch's, and where there is no memory for it."""
        shape = m, n, k, dtype.removeprefix("torch.")
        if shape not in self._seen:
            self._seen[shape] = self._time(*shape)
        return self._seen[shape]

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all: cuBLAS keeps a workspace for every stream it has run on."""
        return torch.cuda.Stream(self.device)

    def _time(self, m: int, n: int, k: int, dtype: str) -> float | None:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize == 1:
            return None
        try:
            with torch.cuda.device(self.device), torch.no_grad(), torch.autocast("cuda", enabled=False):
                return self._sample(*self._operands(m, n, k, kind))
        except torch.OutOfMemoryError:
            return None

    def _operands(self, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Random: zeros draw less power, and are multiplied faster."""
        sets = min(8, ceil(CACHES / ((m * k + n * k) * dtype.itemsize)))
        x, w = ([torch.empty(r, k, device=self.device, dtype=dtype) for _ in range(sets)] for r in (m, n))
        drawn = torch.Generator(self.device).manual_seed(0)  # the user's generator is not touched
        for each in (*x, *w):
            each.normal_(generator=drawn)
        return x, w, torch.empty(m, n, device=self.device, dtype=dtype)

    def _sample(self, x: list[Tensor], w: list[Tensor], out: Tensor) -> float:
        def run(times: int) -> None:
            for i in range(times):
                torch.mm(x[i % len(x)], w[i % len(w)].t(), out=out)

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run(2)
            once = between(lambda: run(1))
            count = max(2, min(32, int(LENGTH / once)))
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._stream):
                run(count)
            graph.replay()
            return median(between(graph.replay) for _ in range(SAMPLES)) / count


def between(run: Callable[[], object]) -> float:
    """Seconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


