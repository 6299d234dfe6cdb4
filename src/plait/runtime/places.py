"""Places: which groups of a pipeline hold which weights, and what they tell each other of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.passes.trace import Spec
from plait.program import Weight
from plait.runtime import channel
from plait.runtime.channel import Channel


@dataclass(frozen=True)
class Places:
    """`holders` of every weight, by its first name, in order; a weight counts at the first."""

    channel: Channel
    holders: Mapping[str, tuple[int, ...]]
    device: torch.device

    @property
    def place(self) -> int:
        return self.channel.place

    def holds(self, name: str) -> bool:
        return self.place in self.holders[name]

    def counts(self, name: str) -> bool:
        return self.place == self.holders[name][0]

    def share(self, weight: Weight, value: Tensor | None) -> Tensor | None:
        """The whole value, from its first holder to every place that holds none."""
        root, line = self.holders[weight.name][0], self.channel
        if self.place == root:
            told = torch.tensor([value is not None, _code(value)], dtype=torch.int32)
            for place in range(line.pp):
                if place not in self.holders[weight.name]:
                    line.send(told.to(self.device), place, _TAG)
                    if value is not None:
                        line.send(value, place, _TAG + 1)
            line.flush()
        elif not self.holds(weight.name):
            there = Spec((2,), torch.int32, False)
            is_there, code = line.receive(there, root, _TAG, self.device).tolist()
            if not is_there:
                return None
            spec = Spec(weight.shape, _DTYPES[code], False)
            return line.receive(spec, root, _TAG + 1, self.device)
        return value

    def total(self, x: Tensor, op: str) -> Tensor:
        """The sum or maximum over all places, in their order: the same bits on each."""
        spec, line = Spec(tuple(x.shape), x.dtype, False), self.channel
        if self.place > 0:
            line.send(x, 0, _TAG)
            line.flush()
            return line.receive(spec, 0, _TAG + 1, x.device)
        for place in range(1, line.pp):
            other = line.receive(spec, place, _TAG, x.device)
            x = x + other if op == "sum" else torch.maximum(x, other)
        for place in range(1, line.pp):
            line.send(x, place, _TAG + 1)
        line.flush()
        return x


def _code(value: Tensor | None) -> int:
    return 0 if value is None else _DTYPES.index(value.dtype)


_TAG = Channel.tag(channel.WHOLE, 0)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
