"""Packing: which of the matmuls that share an input are cheaper as one (passes/pack.py), by the device's clock.

What is saved are launches, and the last waves of tiles, which are seldom full. What is paid: the widest would
have taken another tile alone, gradients are joined first, and a host that launches kernels makes views too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from plait.cluster.device import Device
from plait.passes.overlap.flow import Flow
from plait.passes.pack import Names, Pack, find
from plait.plan.direct import PIECE, Matmul
from plait.rules.equation import Factor

GAIN = 1.02  # less is within what libraries' choices of kernels differ by
VIEW = 0.5  # of a launch: what the host takes for a view of a product


@dataclass(frozen=True)
class Clock:
    """`pieces`: in how many the rows come of a matmul that is long enough; `graphed`: its seconds where no host
    launches."""

    device: Device
    pieces: int = 1
    graphed: Matmul | None = None

    def apart(self, rows: int, inner: int, columns: list[int], dtype: torch.dtype, grad: bool) -> float:
        return sum(self._matmul(rows, inner, c, dtype, grad) for c in columns)

    def together(self, rows: int, inner: int, columns: list[int], dtype: torch.dtype, grad: bool) -> float:
        device, every = self.device, sum(columns)
        seconds = self._matmul(rows, inner, every, dtype, grad)
        if grad:
            seconds += device.launch + device.memory_seconds(2 * dtype.itemsize * rows * every)
        return seconds + (0.0 if self.graphed else VIEW * len(columns) * device.launch)

    def _matmul(self, rows: int, inner: int, columns: int, dtype: torch.dtype, grad: bool) -> float:
        pieces = self.pieces if rows >= self.pieces * PIECE else 1
        seconds = pieces * self._one(-(-rows // pieces), columns, inner, dtype)
        if grad:  # of the input, and of the weight
            seconds += self._one(rows, inner, columns, dtype) + self._one(columns, inner, rows, dtype)
        return seconds

    def _one(self, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
        if self.graphed is not None:
            return self.graphed(rows, columns, inner, str(dtype))
        return self.device.launch + self.device.matmul_seconds(rows, columns, inner, str(dtype))


@dataclass(frozen=True)
class Packed:
    """Weights whose matmuls are one, and the part of their time that it saves: the clock's seconds are not the
    plan's, which may be fewer than those that the clock saves."""

    weights: Names
    matmuls: tuple[str, ...]
    gain: float  # seconds, by the clock
    part: float


def decide(flow: Flow, clock: Clock) -> Iterator[Packed]:
    """Every pack that gains, all of it or all but the widest matmul, once for every value that is read."""
    for pack in find(flow):
        best = max((_weighed(flow, clock, p) for p in _parts(flow, pack)), key=lambda p: p.gain)
        if best.gain > 0:
            yield best


def _parts(flow: Flow, pack: Pack) -> Iterator[Pack]:
    yield pack
    if len(pack.matmuls) > 2:
        columns = _facts(flow, pack)[2]
        widest = columns.index(max(columns))
        rest = [i for i in range(len(columns)) if i != widest]
        matmuls, weights = (tuple(of[i] for i in rest) for of in (pack.matmuls, pack.weights))
        yield Pack(pack.x, matmuls, weights)  # type: ignore[arg-type]


def _weighed(flow: Flow, clock: Clock, pack: Pack) -> Packed:
    facts = _facts(flow, pack)
    apart, together = clock.apart(*facts), clock.together(*facts)
    gain = apart - together if apart > GAIN * together else 0.0
    return Packed(pack.weights, tuple(m.name for m in pack.matmuls), gain, gain / max(apart, 1e-12))


def _facts(flow: Flow, pack: Pack) -> tuple[int, int, list[int], torch.dtype, bool]:
    """(rows, summed, columns of each, dtype, whether gradients flow) on the busiest rank."""

    def size(at: int, f: Factor) -> int:
        split = flow.strategies[pack.matmuls[at]].split
        return max(split.sizes(f)) if split is not None and split.touches(f) else f.extent

    accesses = [flow.description.accesses[m] for m in pack.matmuls]
    *lead, summed = accesses[0].operands[0].dims
    columns = [size(i, access.result[-1]) for i, access in enumerate(accesses)]
    dtype = pack.matmuls[0].meta["val"].dtype
    return prod(size(0, f) for f in lead), size(0, summed), columns, dtype, pack.x in flow.grads


__all__ = ["Clock", "Packed", "decide"]
