"""Matmuls in pieces of rows, each beside the transfer of other rows: the cycle of a sharded block.

    gather_matmul     own rows first; each other rank's rows as they arrive
    matmul_scatter    the other ranks' rows first, each told to its owner as it is done; own rows last
    finish            sum of the terms + residual + norm on own rows, told to all

The residual stream is cut by rows among the ranks (`Ring`); with N ranks a matmul has N pieces.
Two routes lead to another rank, and a move's `Route` (passes/rings.py) divides the rows between them:

    copied    by the copy engine, beside the matmul on other rows; costs no multiprocessor, but some
              7 us of engine changes and signals before the rows can be used. In several runs, so that
              the first is under way, or used, before the last is there
    direct    read or stored by the kernel that sums and norms; nothing hides it but the other rows of
              that kernel, and its signals take 3 us

All copied is best where the matmul is longer than the copy. Where it is shorter, the part that
does not fit beside the matmul goes directly, meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plait.passes.rings import RUNS, Route
from plait.rules.split import merged
from plait.runtime.copy_engine import Lane, Range, Run, Terms, push, staged_shape
from plait.runtime.handshake import Handshake, Reach
from plait.runtime.symmetric import Channel, KernelSignals, Rows, Signals, Workspace, bytes_for

if TYPE_CHECKING:
    from plait.runtime.kernels.norm import Kind

GRAIN = 64  # rows; a cut between copied and direct rows, or runs, is a multiple of it where rows allow
COPIED = Route()

Coming = dict[Run, Tensor]  # a flag for every run of rows on its way here; each must be drained once


@dataclass(frozen=True)
class Ring:
    """What one sharded residual stream needs of a workspace; one for each part in flight."""

    rows: Rows  # normalised rows, whole after a gather
    terms: Terms
    gathered: tuple[Channel, ...]  # of every run: the owner's copied rows are here
    pushed: Channel  # the owner's direct rows are here
    collected: tuple[Channel, ...]  # of every run: the copied terms are here
    readable: Channel  # the direct terms are written
    released: Channel  # the rows have been read for the last time; full at the start
    arrivals: Tensor
    near: Signals  # for the compute lane, where nothing hides a signal
    copies: Lane

    @classmethod
    def of(
        cls, workspace: Workspace, bounds: Sequence[int], width: int, dtype: torch.dtype
    ) -> Ring:
        shape, cuts = (bounds[-1], width), tuple(bounds)
        rows = Rows(workspace.buffer(shape, dtype, fill=0), cuts)
        terms = Terms.of(Rows(workspace.buffer(shape, dtype, fill=0), cuts), workspace)
        workspace.brought(rows.buffer.local)
        workspace.brought(terms.staged.local)
        device = rows.own.device
        return cls(
            rows,
            terms,
            gathered=tuple(workspace.channel() for _ in range(max(RUNS))),
            pushed=workspace.channel(),
            collected=tuple(workspace.channel() for _ in range(max(RUNS))),
            readable=workspace.channel(),
            released=workspace.channel(full=True),
            arrivals=workspace.local_flags(),
            near=KernelSignals() if device.type == "cuda" else workspace.signals,
            copies=Lane.beside(device),
        )

    def again(self, workspace: Workspace) -> Ring:
        """The same for rows that are gathered between two moves of this one; terms and signals are shared."""
        local = self.rows.buffer.local
        rows = Rows(workspace.buffer(local.shape, local.dtype, fill=0), self.rows.bounds)
        workspace.brought(rows.buffer.local)
        return replace(self, rows=rows, gathered=tuple(workspace.channel() for _ in self.gathered))

    @staticmethod
    def nbytes(bounds: tuple[int, ...], width: int, dtype: torch.dtype, again: int = 0) -> int:
        whole, staged = ((bounds[-1], width), dtype), (staged_shape(bounds, width), dtype)
        buffers = [whole, whole, staged, *[whole] * again]
        return bytes_for(*buffers, channels=3 + (2 + again) * max(RUNS), ranks=len(bounds) - 1)

    def direct(self, owner: int, route: Route) -> Range:
        """The owner's direct rows: next to its neighbour's, so that both can be one matmul's rows."""
        begin, end = self.rows.bounds[owner], self.rows.bounds[owner + 1]
        count = min(end - begin, _even((end - begin) * route.direct, end - begin))
        return (begin, begin + count) if owner % 2 else (end - count, end)

    def copied(self, owner: int, route: Route) -> list[Range]:
        """The runs of the owner's other rows."""
        begin, end = self.rows.bounds[owner], self.rows.bounds[owner + 1]
        first, last = self.direct(owner, route)
        begin, end = (last, end) if owner % 2 else (begin, first)
        cuts = [begin + _even((end - begin) * i / route.runs, end - begin) for i in range(route.runs)]
        return [r for r in pairwise([*cuts, end]) if r[0] < r[1]]

    def open(self, compute: Lane) -> None:
        """Before the first write of a step: the peers have read what was pushed a step ago."""
        self.copies.after(compute.mark())
        with compute():
            self.released.wait()

    def close(self, compute: Lane) -> None:
        """After the last use in a step: the peers may push here again."""
        self.copies.after(compute.mark())
        with self.copies():
            self.released.put()
        compute.after(self.copies.mark())

    def hand_on(self, compute: Lane, route: Route, own: Tensor | None = None) -> Coming:
        """The own rows to all others, as soon as `compute` has come here; what they hand on, in turn.

        `own`: where these rows are, if they do not lie in the ring.
        """
        me, own = self.rows.rank, self.rows.own if own is None else own
        begin = self.rows.bounds[me]
        self.copies.after(compute.mark())
        for (first, last), landed in zip(self.copied(me, route), self.gathered, strict=False):
            for rank in landed.reached(self.rows.others):
                into = self.rows.between(first, last, on=rank)
                push(self.copies, into, own[first - begin : last - begin], landed, rank)
        return self._coming(self.gathered, {rank: self.copied(rank, route) for rank in self.rows.others})

    def send(self, compute: Lane, owner: int, run: int, rows: Range) -> None:
        """Terms of a run of the owner's rows to the owner, as soon as `compute` has come here."""
        landed, begin = self.collected[run], self.rows.bounds[owner]
        self.copies.after(compute.mark())
        for rank in landed.reached([owner]):
            into = self.terms.slot(self.rows.rank, owner)[rows[0] - begin : rows[1] - begin]
            push(self.copies, into, self.terms.partials.between(*rows), landed, rank)

    def collect(self, route: Route) -> Coming:
        """The others' terms of the own rows."""
        mine = self.copied(self.rows.rank, route)
        return self._coming(self.collected, dict.fromkeys(self.rows.others, mine))

    def _coming(self, channels: Sequence[Channel], runs: Mapping[int, Sequence[Range]]) -> Coming:
        """In the order in which they come: the first runs of all ranks before the second ones."""
        return {
            (rank, i): flag
            for i, channel in enumerate(channels)
            for rank in channel.reached(list(runs))
            if i < len(runs[rank])
            for flag in channel.incoming([rank])
        }


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
    ring: Ring,
    linears: Sequence[Linear],
    compute: Lane,
    coming: Coming,
    route: Route = COPIED,
    own: Tensor | None = None,
) -> None:
    """Every one of `linears` of all rows in pieces; `coming` is that of `ring.hand_on(route, own)`."""
    rows = ring.rows

    def run(first: int, last: int) -> None:
        for linear in linears:
            linear(rows.between(first, last), first, last)

    here = (rows.bounds[rows.rank], rows.bounds[rows.rank + 1])
    if own is not None:
        for linear in linears:
            linear(own, *here)
    else:
        for first, last in merged(sorted([here] + [ring.direct(rank, route) for rank in rows.others])):
            run(first, last)
    for i in range(route.runs):
        for rank in rows.others:
            for first, last in ring.copied(rank, route)[i : i + 1]:
                if (rank, i) in coming:
                    ring.near.drain([coming[rank, i]])
                run(first, last)


def gathered(ring: Ring, coming: Coming) -> Tensor:
    """All rows, as soon as they are here, for readers that take them whole."""
    for flag in coming.values():
        ring.near.drain([flag])
    return ring.rows.buffer.local


def matmul_scatter(
    ring: Ring,
    x: Tensor,
    weight: Tensor,
    compute: Lane,
    route: Route = COPIED,
    *,
    bias: Tensor | None = None,
) -> Coming:
    """terms = x @ weight.T in pieces, each sent to the owner of its rows; the own rows' terms come."""
    partials = ring.terms.partials
    linear = Linear(weight, partials.buffer.local, bias)
    for i in range(route.runs):
        for rank in partials.others:
            for first, last in ring.copied(rank, route)[i : i + 1]:
                linear(x[first:last], first, last)
                ring.send(compute, rank, i, (first, last))
    own = [(partials.bounds[partials.rank], partials.bounds[partials.rank + 1])]
    for first, last in merged(sorted(own + [ring.direct(rank, route) for rank in partials.others])):
        linear(x[first:last], first, last)
    return ring.collect(route)


def scattered(ring: Ring, terms: Tensor, compute: Lane) -> Coming:
    """As `matmul_scatter`, of terms that are there whole."""
    ring.terms.partials.buffer.local.copy_(terms)
    return sent(ring, compute)


def sent(ring: Ring, compute: Lane) -> Coming:
    """As `matmul_scatter`, of terms that `compute` has written to the ring."""
    for rank in ring.rows.others:
        for rows in ring.copied(rank, COPIED):
            ring.send(compute, rank, 0, rows)
    return ring.collect(COPIED)


def finish(
    ring: Ring,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    compute: Lane,
    coming: Coming,
    *,
    eps: float,
    kind: Kind,
    residual_out: Tensor | None = None,
    term: Tensor | None = None,
    rows_out: Tensor | None = None,
    read: Route = COPIED,
    push: Route = COPIED,
) -> Coming:
    """Sum the terms, add `residual`, norm into the own rows, hand them on.

    The sum stays in `residual_out`, or in place. `term`: summed instead of the ring's terms.
    `rows_out`: written instead of the ring's rows, and then nothing is handed on. `read`: the route of the
    scatter before; `push`: that of the gather that follows, which is returned.
    """
    from plait.runtime.kernels.norm import sum_norm

    rows, partials, me = ring.rows, ring.terms.partials, ring.rows.rank
    begin, everyone = rows.bounds[me], range(len(rows.buffer.on))

    def reach(tensors: list[Tensor], route: Route) -> Reach | None:
        first, last = ring.direct(me, route)
        return Reach(tensors, first - begin, last - begin) if route.direct else None

    shake = Handshake(
        ring.arrivals,
        enter_fills=ring.readable.outgoing() if read.direct else [],
        enter_drains=[*coming.values(), *(ring.readable.incoming() if read.direct else [])],
        leave_fills=ring.pushed.outgoing() if push.direct else [],
        leave_drains=ring.pushed.incoming() if push.direct else [],
    )
    shaken = read.direct or push.direct or coming
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
    return {} if rows_out is not None else ring.hand_on(compute, push)


def published(ring: Ring, rows: Tensor, compute: Lane) -> Coming:
    """Hand on rows that are made by other operators."""
    ring.rows.own.copy_(rows)
    return ring.hand_on(compute, COPIED)


def _even(rows: float, of: int) -> int:
    """About so many rows, in whole grains where there are enough."""
    grain = GRAIN if of >= 2 * GRAIN else 1
    return round(rows / grain) * grain
