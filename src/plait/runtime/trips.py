"""Trips: the program of a stage in CUDA graphs, as many as micro-batches are open at once.

A stage is small, and its micro-batches smaller: launched one by one from the host, their kernels take longer to
launch than to run. What a way there keeps lies in its graph until the way back, so each micro-batch that is open
has one of its own; the next takes one that is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from plait.runtime.graphs import WARM_UP, Replay
from plait.runtime.round_trip import RoundTrip
from plait.runtime.transport import Transport

Trip = RoundTrip | Replay


def trip(module: fx.GraphModule, inputs: int, training: bool, transport: Transport, calls: int = 0) -> Trip:
    """`inputs`: how many of what it is fed, the last, differ from call to call; `calls` have been."""
    if training:
        return RoundTrip(module, inputs, transport.backward, transport.group, calls)
    return Replay(module, inputs, transport.group, calls)


@dataclass
class Trips:
    make: Callable[[int], Trip]  # of how many calls have been
    made: list[Trip] = field(default_factory=list)

    @classmethod
    def of(cls, module: fx.GraphModule, fixed: int, training: bool, transport: Transport) -> Trips:
        """`fixed`: how many of its inputs, the first ones, are weights."""
        inputs = len(module.graph.find_nodes(op="placeholder")) - fixed
        return cls(partial(trip, module, inputs, training, transport))

    def __call__(self, feed: Sequence[Any]) -> tuple[Any, ...]:
        free = next((one for one in self.made if not one.open), None)
        if free is None:  # beside one that is captured nothing needs to warm up
            free = self.make(WARM_UP if self.made else 0)
            self.made.append(free)
        return free(feed)
