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
Events = dict[int, Any]  # rank -> torch.cuda.Event, or None where there are no streams


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
    """What a pull is waited for by, for each rank whose rows it copies."""

    events: Events
    flags: dict[int, Tensor]  # filled as the rows land; each must be drained once. Or none: events

    def wait(self, compute: Lane, near: Signals, rank: int) -> None:
        if rank in self.flags:
            near.drain([self.flags[rank]])
        else:
            compute.after(self.events.get(rank))


def gather(
    rows: Rows,
    ready: Channel,
    lane: Lane,
    part: Callable[[int], Range] | None = None,
    landed: Tensor | None = None,
) -> Pulled:
    """Pull every other rank's rows, or the `part` of them that it names, into this rank's copy.

    `landed`: local flags, one a rank. A kernel that drains one starts at once after the kernel before
    it; one that waits for an event of another lane starts 5 us later in a graph.
    """

    def copy(rank: int) -> tuple[Tensor, Tensor]:
        first, last = part(rank) if part else (rows.bounds[rank], rows.bounds[rank + 1])
        return rows.between(first, last), rows.between(first, last, on=rank)

    return _pull(rows.others, ready, lane, copy, landed)


def collect(
    terms: Terms,
    ready: Channel,
    lane: Lane,
    part: Range | None = None,
    landed: Tensor | None = None,
) -> Pulled:
    """Pull every other rank's terms of this rank's rows, or of the `part` first to last of them."""
    partials = terms.partials
    begin, end = partials.bounds[partials.rank], partials.bounds[partials.rank + 1]
    first, last = part or (begin, end)

    def copy(rank: int) -> tuple[Tensor, Tensor]:
        into = terms.slot(rank)[first - begin : last - begin]
        return into, partials.between(first, last, on=rank)

    return _pull(partials.others, ready, lane, copy, landed)


def _pull(
    ranks: Sequence[int],
    ready: Channel,
    lane: Lane,
    copy: Callable[[int], tuple[Tensor, Tensor]],
    landed: Tensor | None,
) -> Pulled:
    """A copy of no rows has no signal either: its owner does not put."""
    pulled = Pulled({}, {})
    with lane():
        for rank in ready.reached(ranks):
            into, source = copy(rank)
            if not into.shape[0]:
                continue
            ready.wait([rank])
            into.copy_(source, non_blocking=True)
            if landed is not None:
                pulled.flags[rank] = landed[rank]
                ready.signals.fill([landed[rank]])
            pulled.events[rank] = lane.mark()
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
    collect(terms, collected, lane)
    sum_norm(terms.sources(), None, None, eps=0.0, kind="none", residual_out=None, rows_out=out.own)
    gathered.put()
    gather(out, gathered, lane)


def _cuda(device: torch.device) -> bool:
    return device.type == "cuda"
