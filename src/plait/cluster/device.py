"""One device and its clock: how long a matmul or a pass over memory takes, by roofline and waves.

A matmul is cut into tiles, one a multiprocessor at a time, so its time comes in waves:

    tiles 8 x 33 = 264 on 132 units   ##########|##########      2 waves
    one row of tiles more             ##########|##########|#    3 waves, the last almost empty

The clock takes the fastest of the device's tile shapes and of splitting the summed dim, and never
less than reading and writing the operands takes. A CPU is one unit with no tiles, and a core that fetches
a matrix does not multiply meanwhile: there the two add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from plait.errors import ClusterError


@dataclass(frozen=True)
class Tile:
    """A tile of the output; the share of peak that a long matmul of full waves of it reaches."""

    rows: int
    columns: int
    share: float


@dataclass(frozen=True)
class Device:
    name: str
    kind: Literal["cuda", "cpu"]
    flops: tuple[tuple[str, float], ...]  # dtype -> dense flop/s, as the vendor states them
    bandwidth: float  # bytes/s of the device's memory, line rate
    memory: int  # bytes
    launch: float  # seconds from one kernel's start to the next one's, when both are short
    units: int = 1  # multiprocessors
    tiles: tuple[Tile, ...] = (Tile(1, 1, 0.7),)
    memory_share: float = 0.8  # of the line rate, reached by long streams
    fill: int = 0  # elements of the summed dim that a tile's prologue and epilogue cost

    def busy(self, compute: float, moved: float) -> float:
        """Seconds of a kernel, of those that it computes and those in which its operands move."""
        return busy(compute, moved, self.kind == "cpu")

    def peak(self, dtype: str) -> float:
        """Flop/s for `float32`, `bfloat16`, ... (also spelled as `torch.bfloat16`)."""
        name = str(dtype).removeprefix("torch.")
        for known, flops in self.flops:
            if known == name:
                return flops
        if name in _STANDS_FOR:
            return self.peak(_STANDS_FOR[name])
        known_names = ", ".join(name for name, _ in self.flops)
        raise ClusterError(f"{self.name} has no rate for {name}; it has {known_names}")

    def memory_seconds(self, nbytes: float) -> float:
        """Reading or writing `nbytes` of device memory in long streams, launch not included."""
        return nbytes / (self.bandwidth * self.memory_share)

    def matmul_seconds(
        self, m: float, n: float, k: float, dtype: str = "bfloat16", batch: float = 1
    ) -> float:
        """[batch, m, k] x [batch, k, n] -> [batch, m, n], launch not included. Zero if empty."""
        if min(m, n, k, batch) <= 0:
            return 0.0
        name = str(dtype).removeprefix("torch.")
        if name in _OF_TWO:  # as a product of real numbers
            return self.matmul_seconds(2 * m, n, 2 * k, _OF_TWO[name], batch)
        width = _WIDTH[name]
        moved = self.memory_seconds(width * batch * (m * k + k * n + m * n))
        splits = (1, 2, 4, 8) if self.units > 1 else (1,)
        times = (self._tiled(t, m, n, k, dtype, batch, s) for t in self.tiles for s in splits)
        return self.busy(min(times), moved)

    def graphed_matmul(self, m: float, n: float, k: float, dtype: str) -> float:
        """In a CUDA graph, where the launch is hidden by the kernel before. Zero if empty."""
        seconds = self.matmul_seconds(m, n, k, dtype)
        return max(self.launch, seconds) if seconds else 0.0

    def _tiled(
        self, tile: Tile, m: float, n: float, k: float, dtype: str, batch: float, split: int
    ) -> float:
        """Waves of tiles; `split` units share a tile's summed dim and add their parts in fp32."""
        unit_rate = self.peak(dtype) * tile.share / self.units
        if self.units == 1:
            return 2 * m * n * k * batch / unit_rate
        tiles = ceil(m / tile.rows) * ceil(n / tile.columns) * batch * split
        one = 2 * tile.rows * tile.columns * (k / split + self.fill) / unit_rate
        joined = self.memory_seconds(8 * batch * m * n * split) if split > 1 else 0.0
        return ceil(tiles / self.units) * one + joined


# A linear of 1024 x 1024 in float32 on one thread, by rows: 16 0.69 ms, 32 1.12, 64 1.82, 128 3.20, 512 12.0; so
# 22.8 us a row, and 0.33 ms however few there are: its 4.2 MB at the rate of long streams, 19 GB/s and less.
# (Thread's CPU seconds, torch 2.13.0, AMD EPYC, 2026-11-30.)
def busy(compute: float, moved: float, in_turn: bool) -> float:
    return compute + moved if in_turn else max(compute, moved)


_WIDTH: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
_OF_TWO: dict[str, str] = {"complex64": "float32", "complex128": "float64"}
_STANDS_FOR: dict[str, str] = {
    "float16": "bfloat16",
    "float8_e5m2": "float8_e4m3fn",
    "int8": "float8_e4m3fn",
    "float64": "float32",
    "uint8": "int8",
    "int16": "float32",
    "int32": "float32",
    "int64": "float32",
}
