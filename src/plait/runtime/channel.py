"""Channel: messages between the stages of a pipeline, rank i of a group to rank i of another.

Sends never wait: their handles, and the memory they read, are kept until `flush`. So a receive can
wait for a rank whose own sends are on their way, and no order of sends can lock. Every message of a
call has a tag of its own: what, which, and which micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.passes.trace import Spec

VALUE, GRADIENT, OUTPUT, SUM, TOTAL, BUFFER, WHOLE = range(7)
_WHICH, _PIECE = 2**16, 2**10  # values of a kind, and micro-batches, that a 32-bit tag can number


class Channel:
    """One rank's end. `pp` groups of `tp` ranks; stage s is run by group s % pp."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, tp: int, pp: int) -> None:
        self.group, self.tp, self.pp = group, tp, pp
        self.place, self.tp_rank = divmod(rank, tp)
        self._handles: list[tuple[Any, Tensor]] = []
        self._mine: dict[int, list[Tensor]] = defaultdict(list)

    @staticmethod
    def tag(kind: int, which: int, piece: int = 0) -> int:
        assert which < _WHICH and piece < _PIECE, (which, piece)
        return (kind * _WHICH + which) * _PIECE + piece

    def send(self, x: Tensor, place: int, tag: int) -> None:
        """To the rank of the same number in group `place`."""
        x = _plain(x.detach())
        if place == self.place:
            self._mine[tag].append(x)
        elif x.numel():
            handle = dist.isend(x, group=self.group, group_dst=self._rank(place), tag=tag)
            self._handles.append((handle, x))

    def receive(self, spec: Spec, place: int, tag: int, device: torch.device) -> Tensor:
        if place == self.place:
            return _typed(self._mine[tag].pop(0), spec)
        x = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        plain = _plain(x)
        if plain.numel():
            handle = dist.irecv(plain, group=self.group, group_src=self._rank(place), tag=tag)
            assert handle is not None
            handle.wait()
        return _typed(plain, spec)

    def flush(self) -> None:
        """Until every send has been read."""
        for handle, _ in self._handles:
            if handle is not None:
                handle.wait()
        self._handles.clear()

    def _rank(self, place: int) -> int:
        return place * self.tp + self.tp_rank


def _plain(x: Tensor) -> Tensor:
    x = x.contiguous()
    return torch.view_as_real(x) if x.is_complex() else x


def _typed(x: Tensor, spec: Spec) -> Tensor:
    return torch.view_as_complex(x) if spec.dtype.is_complex else x
