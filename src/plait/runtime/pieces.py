"""Matmuls in as many pieces as there are owners of rows, each beside the transfer of another piece.

    gather_matmul     own rows first; each other rank's rows as they arrive
    matmul_scatter    the other ranks' rows first, each told to its owner as it is done; own rows last
    finish            sum of the terms + residual + norm on own rows, told to all

The three are the cycle of a transformer block whose residual stream is cut by rows. With N ranks every
matmul has N pieces. A schedule with several parts in flight uses them with rows of one part, or calls
gather and collect (copy_engine.py) around whole matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.runtime.copy_engine import Events, Lane, Terms, collect, gather
from plait.runtime.symmetric import Channel, Rows, Workspace

if TYPE_CHECKING:
    from plait.runtime.kernels.norm import Kind


@dataclass(frozen=True)
class Ring:
    """What one sharded residual stream needs of a workspace; one for each part in flight."""

    rows: Rows  # normalised rows, whole after a gather
    terms: Terms
    gathered: Channel  # the owner's rows are written
    collected: Channel  # the terms are written
    released: Channel  # the rows have been read for the last time; full at the start
    arrivals: Tensor
    pulls: Lane
    puts: Lane

    @classmethod
    def of(cls, workspace: Workspace, bounds: Sequence[int], width: int, dtype: torch.dtype) -> Ring:
        shape, bounds = (bounds[-1], width), tuple(bounds)
        rows = Rows(workspace.buffer(shape, dtype, fill=0), bounds)
        terms = Terms.of(Rows(workspace.buffer(shape, dtype, fill=0), bounds))
        device = rows.own.device
        return cls(
            rows, terms, workspace.channel(), workspace.channel(),
            workspace.channel(full=True), workspace.arrivals(), Lane.beside(device), Lane.beside(device),
        )

    @staticmethod
    def nbytes(rows: int, width: int, dtype: torch.dtype, ranks: int) -> int:
        from plait.runtime.symmetric import bytes_for

        return bytes_for(((rows, width), dtype), ((rows, width), dtype), channels=3, ranks=ranks)

    def lanes(self) -> tuple[Lane, Lane]:
        return self.pulls, self.puts

    def open(self, compute: Lane) -> None:
        """Before the first write into `rows` of a step: the peers' last reads were in the step before."""
        with compute():
            self.released.wait()

    def close(self, events: Events) -> None:
        """After the last gather of a step."""
        self.pulls.after(*events.values())
        with self.pulls():
            self.released.put()

    def put(self, compute: Lane, channel: Channel, ranks: Sequence[int] | None = None) -> None:
        """Tell `ranks` that what `compute` wrote so far is there, without holding `compute` up."""
        self.puts.after(compute.mark())
        with self.puts():
            channel.put(ranks)

    def gather(self) -> Events:
        return gather(self.rows, self.gathered, self.pulls)

    def collect(self) -> Events:
        return collect(self.terms, self.collected, self.pulls)


def gather_matmul(ring: Ring, weight: Tensor, out: Tensor, compute: Lane, events: Events) -> None:
    """out = rows @ weight.T in pieces; `events` are those of `ring.gather()`."""
    rows = ring.rows
    for rank in (rows.rank, *rows.others):
        compute.after(events.get(rank))
        part = slice(rows.bounds[rank], rows.bounds[rank + 1])
        torch.mm(rows.of(rank), weight.t(), out=out[part])


def matmul_scatter(ring: Ring, x: Tensor, weight: Tensor, compute: Lane) -> Events:
    """terms = x @ weight.T in pieces, each told to the owner of its rows; pulls the own rows' terms."""
    partials = ring.terms.partials
    for rank in (*partials.others, partials.rank):
        part = slice(partials.bounds[rank], partials.bounds[rank + 1])
        torch.mm(x[part], weight.t(), out=partials.of(rank))
        if rank != partials.rank:
            ring.put(compute, ring.collected, [rank])
    return ring.collect()


def finish(
    ring: Ring,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    compute: Lane,
    events: Events,
    *,
    eps: float,
    kind: Kind,
    from_kernel: bool = False,
) -> None:
    """Sum the collected terms, add to `residual` in place, norm into the own rows, tell all others.

    `from_kernel`: the kernel signals itself, else the stream does after it.
    """
    from plait.runtime.kernels.norm import sum_norm

    compute.after(*events.values())
    sum_norm(
        ring.terms.sources(), residual, weight, bias, eps=eps, kind=kind,
        residual_out=residual, rows_out=ring.rows.own,
        publish=(ring.arrivals, ring.gathered.outgoing()) if from_kernel else None,
    )
    if not from_kernel:
        ring.put(compute, ring.gathered)
