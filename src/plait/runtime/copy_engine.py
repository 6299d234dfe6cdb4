"""Rows pushed into the peers' memory by the copy engines, which takes no multiprocessor.

A push goes on a `Lane` beside the compute, when the compute has come so far; a flag behind it tells the
peer, which waits for that alone. Pulled instead, rows need a signal to begin with: 5 to 10 us more.

The peer's memory must be free. Who pushes there again has heard, since its last push, from the peer's own
move of the other kind, which comes after the peer's last read (pieces.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.runtime.symmetric import Buffer, Channel, Rows, Workspace

Range = tuple[int, int]  # rows first to last, exclusive
Run = tuple[int, int]  # a rank, and which of its runs of rows


class Lane:
    """A stream, or the host's own order where there is none."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    @classmethod
    def beside(cls, device: torch.device, *, first: bool = True) -> Lane:
        """A new stream of `device`; `first`: its kernels are placed before those of other streams."""
        return (
            cls(torch.cuda.Stream(device, priority=-1 if first else 0)) if _cuda(device) else cls()
        )

    @classmethod
    def current(cls, device: torch.device) -> Lane:
        return cls(torch.cuda.current_stream(device)) if _cuda(device) else cls()

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """The point that the lane has reached."""
        return None if self.stream is None else self.stream.record_event()

    def after(self, *events: Any) -> None:
        for event in events:
            if event is not None and self.stream is not None:
                self.stream.wait_event(event)


@dataclass(frozen=True)
class Terms:
    """The terms of a sum whose rows are cut among the ranks, and room for those of the others."""

    partials: Rows  # this rank's terms of all rows
    staged: Buffer  # [ranks, most rows of a rank, d]: every rank's terms of the own rows

    @classmethod
    def of(cls, partials: Rows, workspace: Workspace) -> Terms:
        local = partials.buffer.local
        shape = staged_shape(partials.bounds, local.shape[1])
        return cls(partials, workspace.buffer(shape, local.dtype, fill=0))

    def slot(self, source: int, owner: int) -> Tensor:
        """Where `source`'s terms of the rows of `owner` go, on `owner`."""
        begin, end = self.partials.bounds[owner], self.partials.bounds[owner + 1]
        return self.staged.on[owner][source][: end - begin]

    def sources(self) -> list[Tensor]:
        """All terms of the own rows, in rank order."""
        me, own = self.partials.rank, self.partials.own
        return [own if rank == me else self.slot(rank, me) for rank in range(len(self.staged.on))]


def staged_shape(bounds: tuple[int, ...], width: int) -> tuple[int, int, int]:
    return len(bounds) - 1, max(b - a for a, b in pairwise(bounds)), width


def push(lane: Lane, into: Tensor, rows: Tensor, landed: Channel, rank: int) -> None:
    """`rows` into memory of `rank`, which may read them when it has heard on `landed`."""
    with lane():
        into.copy_(rows, non_blocking=True)
        landed.put([rank])


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"
