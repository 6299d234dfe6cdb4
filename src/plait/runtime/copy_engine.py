"""Collectives by the copy engines: rows pulled from the peers' memory, no multiprocessor involved.

    gather    every rank pulls the rows it does not own            ready: the owner's rows are written
    collect   every rank pulls the others' terms of its own rows   ready: the terms are written

Both run on a `Lane` beside the compute and return an event for each peer, in the order of arrival:
peer rank + 1 first, so that no two ranks pull from the same one. A reduce-scatter is `collect` and
`sum_norm` of `terms`; an all-reduce is that and a `gather`. Sums are in rank order, so their bits
depend neither on chunks nor on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.runtime.symmetric import Channel, Rows, Signals

Range = tuple[int, int]  # rows first to last, exclusive
Run = tuple[int, int]  # a rank, and which of its runs of rows
Events = dict[Run, Any]  # torch.cuda.Event, or None where there are no streams


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
    staged: Tensor  # [ranks - 1, own rows, d]: the other ranks' terms of the own rows

    @classmethod
    def of(cls, partials: Rows) -> Terms:
        ranks = len(partials.buffer.on)
        return cls(partials, partials.own.new_zeros(max(1, ranks - 1), *partials.own.shape))

    def slot(self, rank: int) -> Tensor:
        """Where `rank`'s terms of the own rows are."""
        me = self.partials.rank
        return self.partials.own if rank == me else self.staged[rank - (rank > me)]

    def sources(self) -> list[Tensor]:
        """All terms of the own rows, in rank order."""
        return [self.slot(rank) for rank in range(len(self.partials.buffer.on))]


@dataclass(frozen=True)
class Pulled:
    """What a pull is waited for by, for each run of rows that it copies."""

    events: Events
    flags: dict[Run, Tensor]  # filled as the rows land; each must be drained once. Or none: events

    def wait(self, compute: Lane, near: Signals, run: Run) -> None:
        if run in self.flags:
            near.drain([self.flags[run]])
        else:
            compute.after(self.events.get(run))


def gather(
    rows: Rows,
    ready: Channel,
    lane: Lane,
    runs: Callable[[int], Sequence[Range]] | None = None,
    landed: Tensor | None = None,
) -> Pulled:
    """Pull every other rank's rows, or the `runs` of them that it names, into this rank's copy.

    `landed`: local flags [ranks, runs]. A kernel that drains one starts at once after the kernel before
    it; one that waits for an event of another lane starts 5 us later in a graph.
    """

    def copies(rank: int) -> list[tuple[Tensor, Tensor]]:
        ranges = runs(rank) if runs else [(rows.bounds[rank], rows.bounds[rank + 1])]
        return [(rows.between(a, b), rows.between(a, b, on=rank)) for a, b in ranges]

    return _pull(rows.others, [ready], lane, copies, landed)


def collect(
    terms: Terms,
    ready: Sequence[Channel],
    lane: Lane,
    runs: Sequence[Range] | None = None,
    landed: Tensor | None = None,
) -> Pulled:
    """Pull every other rank's terms of this rank's rows, or of `runs` of them, each when it is `ready`."""
    partials = terms.partials
    begin, end = partials.bounds[partials.rank], partials.bounds[partials.rank + 1]
    ranges = [(begin, end)] if runs is None else runs

    def copies(rank: int) -> list[tuple[Tensor, Tensor]]:
        into = terms.slot(rank)
        return [(into[a - begin : b - begin], partials.between(a, b, on=rank)) for a, b in ranges]

    return _pull(partials.others, ready, lane, copies, landed)


def _pull(
    ranks: Sequence[int],
    ready: Sequence[Channel],
    lane: Lane,
    copies: Callable[[int], list[tuple[Tensor, Tensor]]],
    landed: Tensor | None,
) -> Pulled:
    """Copy i of a rank when `ready[i]` says so, or with the one before where there is no such channel.

    The first runs of all ranks come before the second ones. A copy of no rows has no signal either: its
    owner does not put.
    """
    pulled = Pulled({}, {})
    found = [(rank, i, *copy) for rank in ready[0].reached(ranks) for i, copy in enumerate(copies(rank))]
    with lane():
        for rank, i, into, source in sorted(found, key=lambda f: f[1]):
            if not into.shape[0]:
                continue
            if i < len(ready):
                ready[i].wait([rank])
            into.copy_(source, non_blocking=True)
            if landed is not None:
                pulled.flags[rank, i] = landed[rank, i]
                ready[0].signals.fill([landed[rank, i]])
            pulled.events[rank, i] = lane.mark()
    return pulled


def all_gather(rows: Rows, ready: Channel, done: Channel) -> None:
    """On the current stream; when it is over, own rows may be written again."""
    lane = Lane.current(rows.own.device)
    ready.put()
    gather(rows, ready, lane)
    done.put()
    done.wait()


def all_reduce(
    terms: Terms, out: Rows, collected: Channel, gathered: Channel, lane: Lane | None = None
) -> None:
    """Sum the terms of all ranks into `out` on all of them, on the current stream.

    `out` is read by the peers until the next sum of the same terms has been collected.
    """
    from plait.runtime.kernels.norm import sum_norm

    lane = lane or Lane.current(out.own.device)
    collected.put()
    collect(terms, [collected], lane)
    sum_norm(terms.sources(), None, None, eps=0.0, kind="none", residual_out=None, rows_out=out.own)
    gathered.put()
    gather(out, gathered, lane)


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"
