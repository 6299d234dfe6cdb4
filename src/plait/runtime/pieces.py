"""Matmuls in pieces of rows, each beside the transfer of other rows: the cycle of a sharded block.

    gather_matmul     own rows first; each other rank's rows as they arrive
    matmul_scatter    the other ranks' rows first, each told to its owner as it is done; own rows last
    finish            sum of the terms + residual + norm on own rows, told to all

The residual stream is cut by rows among the ranks (`Ring`); with N ranks a matmul has N pieces.
Two ways lead to another rank, and a move's `Way` (passes/rings.py) divides the rows between them:

    copied    by the copy engine, beside the matmul on other rows; costs no multiprocessor, but some
              15 us of signals and engine changes before the rows can be used. In several runs, so that
              the first is under way, or used, before the last is there
    direct    read or stored by the kernel that sums and norms; nothing hides it but the other rows of
              that kernel, and its signals take 3 us

All copied is best where the matmul is longer than the copy. Where it is shorter, the part that
does not fit beside the matmul goes directly, meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.passes.rings import Way
from plait.runtime.copy_engine import Lane, Pulled, Range, Terms, collect, gather
from plait.runtime.handshake import Handshake, Reach
from plait.runtime.symmetric import Channel, KernelSignals, Rows, Signals, Workspace, bytes_for

if TYPE_CHECKING:
    from plait.runtime.kernels.norm import Kind

GRAIN = 64  # rows; a cut between copied and direct rows, or runs, is a multiple of it where rows allow
RUNS = 4  # of one rank's rows, at most
COPIED = Way()


@dataclass(frozen=True)
class Ring:
    """What one sharded residual stream needs of a workspace; one for each part in flight."""

    rows: Rows  # normalised rows, whole after a gather
    terms: Terms
    gathered: Channel  # the owner's copied rows are written
    pushed: Channel  # the owner's direct rows are here
    collected: tuple[Channel, ...]  # of every run: the copied terms are written
    readable: Channel  # the direct terms are written
    released: Channel  # the rows have been read for the last time; full at the start
    arrivals: Tensor
    landed: Tensor  # local flags [rows or terms, rank, run]
    near: Signals  # for the compute lane, where nothing hides a signal
    pulls: Lane
    puts: Lane

    @classmethod
    def of(
        cls, workspace: Workspace, bounds: Sequence[int], width: int, dtype: torch.dtype
    ) -> Ring:
        shape, cuts = (bounds[-1], width), tuple(bounds)
        rows = Rows(workspace.buffer(shape, dtype, fill=0), cuts)
        terms = Terms.of(Rows(workspace.buffer(shape, dtype, fill=0), cuts))
        workspace.brought(rows.buffer.local)
        workspace.brought(terms.staged)
        device = rows.own.device
        near = KernelSignals() if device.type == "cuda" else workspace.signals
        return cls(
            rows,
            terms,
            workspace.channel(),
            workspace.channel(),
            tuple(workspace.channel() for _ in range(RUNS)),
            workspace.channel(),
            workspace.channel(full=True),
            workspace.local_flags(),
            workspace.local_flags(2, workspace.ranks, RUNS),
            near,
            Lane.beside(device),
            Lane.beside(device),
        )

    @staticmethod
    def nbytes(rows: int, width: int, dtype: torch.dtype, ranks: int) -> int:
        return bytes_for(((rows, width), dtype), ((rows, width), dtype), channels=4 + RUNS, ranks=ranks)

    def lanes(self) -> tuple[Lane, Lane]:
        return self.pulls, self.puts

    def direct(self, owner: int, way: Way) -> Range:
        """The owner's direct rows: next to its neighbour's, so that both can be one matmul's rows."""
        begin, end = self.rows.bounds[owner], self.rows.bounds[owner + 1]
        count = min(end - begin, _even((end - begin) * way.direct, end - begin))
        return (begin, begin + count) if owner % 2 else (end - count, end)

    def copied(self, owner: int, way: Way) -> list[Range]:
        """The runs of the owner's other rows."""
        begin, end = self.rows.bounds[owner], self.rows.bounds[owner + 1]
        first, last = self.direct(owner, way)
        begin, end = (last, end) if owner % 2 else (begin, first)
        cuts = [begin + _even((end - begin) * i / way.runs, end - begin) for i in range(way.runs)]
        return [r for r in pairwise([*cuts, end]) if r[0] < r[1]]

    def open(self, compute: Lane) -> None:
        """Before the first write into `rows` of a step; the peers' last reads were a step ago."""
        with compute():
            self.released.wait()

    def close(self, compute: Lane) -> None:
        """After the last use in a step: the peers may write here, and into what was pulled, again."""
        self.pulls.after(compute.mark())
        with self.pulls():
            self.released.put()

    def put(self, compute: Lane, channel: Channel, ranks: Sequence[int] | None = None) -> None:
        """Tell `ranks` that what `compute` wrote so far is there, without holding `compute` up."""
        self.puts.after(compute.mark())
        with self.puts():
            channel.put(ranks)

    def gather(self, way: Way = COPIED, *, by_flag: bool = True) -> Pulled:
        landed = self.landed[0] if by_flag else None
        return gather(self.rows, self.gathered, self.pulls, partial(self.copied, way=way), landed)

    def collect(self, way: Way = COPIED, *, by_flag: bool = True) -> Pulled:
        landed = self.landed[1] if by_flag else None
        return collect(self.terms, self.collected, self.pulls, self.copied(self.rows.rank, way), landed)


@dataclass(frozen=True)
class Linear:
    """out = rows @ weight.T + bias, of any run of rows."""

    weight: Tensor  # [o, i]
    out: Tensor  # [t, o]
    bias: Tensor | None = None

    def __call__(self, rows: Tensor, first: int, last: int) -> None:
        out = self.out[first:last]
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=out)


def gather_matmul(
    ring: Ring, linears: Sequence[Linear], compute: Lane, pulled: Pulled, way: Way = COPIED
) -> None:
    """Every one of `linears` of all rows in pieces; `pulled` is that of `ring.gather(way)`."""
    rows = ring.rows

    def run(first: int, last: int) -> None:
        for linear in linears:
            linear(rows.between(first, last), first, last)

    here = [(rows.bounds[rows.rank], rows.bounds[rows.rank + 1])]
    for first, last in merged(here + [ring.direct(rank, way) for rank in rows.others]):
        run(first, last)
    for i in range(way.runs):
        for rank in rows.others:
            for first, last in ring.copied(rank, way)[i : i + 1]:
                pulled.wait(compute, ring.near, (rank, i))
                run(first, last)


def gathered(ring: Ring, compute: Lane, pulled: Pulled) -> Tensor:
    """All rows, as soon as they are here, for readers that take them whole."""
    for run in pulled.events:
        pulled.wait(compute, ring.near, run)
    return ring.rows.buffer.local


def matmul_scatter(
    ring: Ring,
    x: Tensor,
    weight: Tensor,
    compute: Lane,
    way: Way = COPIED,
    *,
    bias: Tensor | None = None,
    by_flag: bool = True,
) -> Pulled:
    """terms = x @ weight.T in pieces, each told to the owner of its rows; pulls the own rows' terms."""
    partials = ring.terms.partials
    linear = Linear(weight, partials.buffer.local, bias)
    for i in range(way.runs):
        for rank in partials.others:
            for first, last in ring.copied(rank, way)[i : i + 1]:
                linear(x[first:last], first, last)
                ring.put(compute, ring.collected[i], [rank])
    own = [(partials.bounds[partials.rank], partials.bounds[partials.rank + 1])]
    for first, last in merged(own + [ring.direct(rank, way) for rank in partials.others]):
        linear(x[first:last], first, last)
    return ring.collect(way, by_flag=by_flag)


def scattered(ring: Ring, terms: Tensor, compute: Lane) -> Pulled:
    """As `matmul_scatter`, of terms that are there whole."""
    ring.terms.partials.buffer.local.copy_(terms)
    ring.put(compute, ring.collected[0])
    return ring.collect()


def finish(
    ring: Ring,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    compute: Lane,
    pulled: Pulled,
    *,
    eps: float,
    kind: Kind,
    residual_out: Tensor | None = None,
    term: Tensor | None = None,
    rows_out: Tensor | None = None,
    read: Way = COPIED,
    push: Way = COPIED,
    by_flag: bool = True,
) -> Pulled:
    """Sum the terms, add `residual`, norm into the own rows, hand them on.

    The sum stays in `residual_out`, or in place. `term`: summed instead of the ring's terms.
    `rows_out`: written instead of the ring's rows, and then nothing is handed on. `read`: the way of the
    scatter before; `push`: that of the gather that follows, which is returned and waited for `by_flag`
    or by event.
    """
    from plait.runtime.kernels.norm import sum_norm

    rows, partials, me = ring.rows, ring.terms.partials, ring.rows.rank
    begin, everyone = rows.bounds[me], range(len(rows.buffer.on))

    def reach(tensors: list[Tensor], way: Way) -> Reach | None:
        first, last = ring.direct(me, way)
        return Reach(tensors, first - begin, last - begin) if way.direct else None

    if not pulled.flags:
        compute.after(*pulled.events.values())
    copies = ring.gathered.outgoing() if push.direct < 1 else []
    shake = Handshake(
        ring.arrivals,
        enter_fills=ring.readable.outgoing() if read.direct else [],
        enter_drains=[*pulled.flags.values(), *(ring.readable.incoming() if read.direct else [])],
        leave_fills=[*copies, *ring.pushed.outgoing()] if push.direct else [],
        leave_drains=ring.pushed.incoming() if push.direct else [],
    )
    shaken = read.direct or push.direct or pulled.flags
    sum_norm(
        ring.terms.sources() if term is None else [term],
        residual,
        weight,
        bias,
        eps=eps,
        kind=kind,
        residual_out=residual if residual_out is None else residual_out,
        rows_out=rows.own if rows_out is None else rows_out,
        shake=shake if shaken else None,
        far=reach([partials.of(me, on=rank) for rank in everyone], read),
        push=reach([rows.of(me, on=rank) for rank in rows.others], push),
    )
    if rows_out is not None:
        return Pulled({}, {})
    if not push.direct:
        ring.put(compute, ring.gathered)
    return ring.gather(push, by_flag=by_flag)


def published(ring: Ring, rows: Tensor, compute: Lane) -> Pulled:
    """Hand on rows that are made by other operators."""
    ring.rows.own.copy_(rows)
    ring.put(compute, ring.gathered)
    return ring.gather()


def _even(rows: float, of: int) -> int:
    """About so many rows, in whole grains where there are enough."""
    grain = GRAIN if of >= 2 * GRAIN else 1
    return round(rows / grain) * grain


def merged(ranges: list[Range]) -> list[Range]:
    """Sorted, without the empty ones, neighbours joined."""
    joined: list[Range] = []
    for first, last in sorted(r for r in ranges if r[0] < r[1]):
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined
