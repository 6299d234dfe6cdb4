"""Channel: messages between the stages of a pipeline, rank i of a group to rank i of another.

Sends never wait: their handles, and the memory they read, are kept. So a receive can wait for a
rank whose own sends are on their way, and no order of sends can lock. Receives are posted before
they are waited for. Every message of a call has a tag of its own: what, which, and which
micro-batch.

What has been sent is let go as soon as the other side is known to have read it. Nobody acknowledges
anything: both sides run actions in an order that both know, so a message from action 7 over there
says that all messages for its actions up to 7 have arrived.

NCCL knows no tags, and has one line between two ranks of a group, in which what was begun first holds up the
rest: two ends that both begin with a receive wait for ever. So receives from a place are posted in the order in
which it sends (actions.py), messages to later places and to earlier ones go by groups of their own, and
lines are opened, at which both ends wait for each other, before the first action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.passes.microbatch import MOST
from plait.passes.trace import Spec

VALUE, GRADIENT, OUTPUT, SUM, TOTAL, BUFFER, WHOLE = range(7)
_WHICH, _PIECE = 2**16, MOST  # values of a kind, and micro-batches, that a 32-bit tag can number
NEVER = 2**62  # later than every action


@dataclass(frozen=True)
class _Sent:
    handle: Any
    memory: Tensor
    reader: int  # position of the action that reads it


@dataclass(frozen=True)
class Ways:
    """The groups by which messages go to later places and to earlier ones; one for both where tags tell them
    apart. `host`: they go through the host's memory, for these groups do not carry a device's."""

    up: dist.ProcessGroup | None
    down: dist.ProcessGroup | None
    host: bool = False

    @property
    def apart(self) -> bool:
        return self.up is not self.down

    def between(self, source: int, target: int) -> dist.ProcessGroup | None:
        """For messages from place to place."""
        return self.up if target > source else self.down


class Channel:
    """One rank's end. `line`: its own rank and those it sends to, by place; stage s runs at s % pp."""

    def __init__(self, ways: Ways, line: Sequence[int], place: int) -> None:
        self.ways, self.line, self.place = ways, tuple(line), place
        self._opened: set[tuple[int, int]] = set()
        self.most = 0  # messages that were kept at once, so far
        self._sent: dict[int, list[_Sent]] = defaultdict(list)  # by place
        self._mine: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def pp(self) -> int:
        return len(self.line)

    @staticmethod
    def tag(kind: int, which: int, piece: int = 0) -> int:
        assert which < _WHICH and piece < _PIECE, (which, piece)
        return (kind * _WHICH + which) * _PIECE + piece

    def send(self, x: Tensor, place: int, tag: int, reader: int = NEVER) -> None:
        """To the rank at `place`, whose action `reader` reads it.

        `x`: `packed` by the spec that the reader expects.
        """
        x = _plain(x.detach())
        if place == self.place:
            self._mine[tag].append(x)
        elif x.numel():
            x = x.cpu() if self.ways.host else x
            way = self.ways.between(self.place, place)
            handle = dist.isend(x, group=way, group_dst=self.line[place], tag=tag)
            self._sent[place].append(_Sent(handle, x, reader))
            self.most = max(self.most, sum(map(len, self._sent.values())))

    def expect(self, spec: Spec, place: int, tag: int, device: torch.device) -> Incoming:
        """Post a receive."""
        if place == self.place:
            return Incoming(self, spec, tag, device)
        where = torch.device("cpu") if self.ways.host else device
        x = torch.empty([spec.shape[i] for i in spec.order] or spec.shape, dtype=spec.dtype, device=where)
        plain, handle = _plain(x), None
        if plain.numel():
            way = self.ways.between(place, self.place)
            handle = dist.irecv(plain, group=way, group_src=self.line[place], tag=tag)
        return Incoming(self, spec, tag, device, plain, handle)

    def receive(self, spec: Spec, place: int, tag: int, device: torch.device) -> Tensor:
        return self.expect(spec, place, tag, device).wait()

    def open(self, pairs: Set[tuple[int, int]], device: torch.device) -> None:
        """The lines from one place to another that actions send by: on every rank in one order."""
        if not self.ways.apart:
            return
        for source, target in sorted(pairs - self._opened):
            if self.place == source:
                self.send(torch.zeros(1, device=device), target, 0)
            elif self.place == target:
                self.receive(Spec((1,), torch.float32, False), source, 0, device)
        self._opened |= pairs
        self.flush()

    def settle(self, place: int, action: int) -> None:
        """A message from `action` at `place` is here: what its actions so far read is let go."""
        kept = []
        for sent in self._sent[place]:
            if sent.reader > action:
                kept.append(sent)
            elif sent.handle is not None:
                sent.handle.wait()
        self._sent[place] = kept

    def flush(self) -> None:
        """Until every send has been read."""
        for place in list(self._sent):
            self.settle(place, NEVER)


@dataclass(frozen=True)
class Incoming:
    """A message on its way; from the own place, it is there when its sender has run."""

    channel: Channel
    spec: Spec
    tag: int
    device: torch.device
    memory: Tensor | None = None
    handle: Any = None

    def wait(self) -> Tensor:
        if self.memory is None:
            return _typed(self.channel._mine[self.tag].pop(0), self.spec)
        if self.handle is not None:
            self.handle.wait()
        return _typed(self.memory.to(self.device), self.spec)


def _plain(x: Tensor) -> Tensor:
    x = x.contiguous()
    return torch.view_as_real(x) if x.is_complex() else x


def _typed(x: Tensor, spec: Spec) -> Tensor:
    return spec.unpacked(torch.view_as_complex(x) if spec.dtype.is_complex else x)
