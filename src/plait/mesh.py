"""Mesh: how many ranks each axis gets, where each of them sits, and what does not fit.

    rank = (stage * dp + replica) * tp + index      order "pp dp tp", outermost first
    rank = (replica * pp + stage) * tp + index      order "dp pp tp"

Neighbours talk most, so tensor parallelism is innermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.errors import MeshError

ORDERS = ("pp dp tp", "dp pp tp")


@dataclass(frozen=True)
class Mesh:
    tp: int
    pp: int = 1
    dp: int = 1

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} dp={self.dp}"

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    @classmethod
    def fitting(
        cls, tp: int | str, pp: int | str, dp: int | str, ranks: int, whose: str = "the group"
    ) -> tuple[Mesh, ...]:
        """Every mesh of exactly `ranks` ranks with these numbers; `auto` is any number.

        Fewer stages come first. MeshError, with what fits, where there is none; `whose` ranks.
        """
        asked = {"tp": tp, "pp": pp, "dp": dp}
        for name, value in asked.items():
            if value != "auto" and (type(value) is not int or value < 1):
                raise MeshError(f"{name}={value!r}: it takes a number of ranks from 1, or 'auto'")
        found = tuple(
            cls(t, p, d)
            for p in _numbers(pp, ranks)
            for d in _numbers(dp, ranks)
            for t in _numbers(tp, ranks)
            if t * p * d == ranks
        )
        if not found:
            words = " x ".join(f"{name}={value}" for name, value in asked.items())
            is_size = ""
            if isinstance(tp, int) and isinstance(pp, int) and isinstance(dp, int):
                is_size = f" is {tp * pp * dp} ranks"
            raise MeshError(
                f"{words}{is_size}, {whose} has {ranks}; with {ranks} ranks these fit: "
                + ", ".join(f"tp={t} pp={ranks // t}" for t in _numbers("auto", ranks))
            )
        return found


@dataclass(frozen=True)
class Seats:
    """Where the ranks of a mesh sit. Each group of an axis is a line through `grid`."""

    mesh: Mesh
    order: str = ORDERS[0]

    @cached_property
    def grid(self) -> NDArray[np.int64]:
        """[pp, dp, tp]: the rank of each seat."""
        ranks, m = np.arange(self.mesh.size), self.mesh
        if self.order == ORDERS[0]:
            return ranks.reshape(m.pp, m.dp, m.tp)
        return ranks.reshape(m.dp, m.pp, m.tp).transpose(1, 0, 2)

    def of(self, rank: int) -> tuple[int, int, int]:
        """(place, replica, index) of a rank."""
        place, replica, index = np.argwhere(self.grid == rank)[0].tolist()
        return place, replica, index

    def replicas(self) -> list[list[int]]:
        """The ranks of every replica, that of its first place and index first."""
        return [self.grid[:, r].ravel().tolist() for r in range(self.mesh.dp)]


def _numbers(value: int | str, ranks: int) -> Iterator[int]:
    """The divisors of `ranks` that an axis may have."""
    wanted = range(1, ranks + 1) if value == "auto" else (int(value),)
    return (n for n in wanted if ranks % n == 0)
