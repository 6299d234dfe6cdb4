"""How software moves bytes over a path: a few numbers that turn a schedule into seconds.

A collective of steps over ports takes

    launch + base  +  per step: hops * (latency of the level) + step, and message for each on a port
                   +  x, the bytes of the busiest port at `share` of its reachable rate
                   +  the pipeline's fill: min(2 sqrt(fill x), most)

The last term is that of chunks: a pipeline whose chunks cost `a` each and which is d deep moves x
seconds of bytes in c chunks in (d + c)(a + x/c), at best (sqrt(d a) + sqrt(x))**2 = d a + x + 2
sqrt(d a x), and no more than a constant once chunks have their largest size. `window` is the
opposite at the small end: the first so many seconds of bytes travel while the base latency runs.
A transport has several protocols (few bytes soon, or many bytes fast), and each size takes the
fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from plait.errors import ClusterError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Protocol:
    name: str
    base: float = 0.0  # seconds, once a collective
    hops: float = 1.0  # times the latency of each level that a step crosses
    far_hops: float | None = None  # the same between hosts, for a library's own forms; None: hops
    plateau: float = 1.0  # times all of that, for a library's own form over several hosts
    step: float = 0.0  # seconds, each step
    message: float = 0.0  # seconds that a message keeps a port busy beside its bytes
    share: float = 1.0  # of the reachable rate of a level's port
    far_share: float | None = None  # the same for a library's own form over several hosts
    adding: float = 1.0  # of that, through a switch that adds
    fill: float = 0.0  # seconds: pipeline depth times cost of a chunk
    hop_fill: float = 0.0  # the same for each step of the schedule
    most: float = 0.0  # seconds: the fill term of long vectors
    window: float = 0.0  # seconds of bytes that hide under base
    flags: bool = False  # carries flags in the data: needs levels that deliver in order


@dataclass(frozen=True)
class Transport:
    """What a library can run on a machine, and what it costs there.

    `algorithms` are the schedules it runs step by step; `internal` are the forms and protocols
    that its own collective (the algorithm `native`) chooses among: `ring`, `tree`, `nvls`.
    `measured` are the protocols of what was measured by itself on a number of ranks, by its
    spelling: `ring[4]/4`, `all_gather native[4]`; where a collective was measured, only what was
    measured is chosen from.
    """

    name: str  # "nccl", "symmetric", "gloo"
    protocols: tuple[Protocol, ...]
    algorithms: tuple[str, ...] = ()
    internal: tuple[tuple[str, Protocol], ...] = ()
    launch: float = 0.0  # seconds to start a collective: depends on who starts it (see LAUNCH)
    reach: int | None = None  # the outermost level it can cross; None: any
    fused: bool = (
        True  # additions run while bytes arrive, on the device, and cost nothing beside them
    )
    add: float = 0.0  # not fused: seconds for each byte added
    measured: tuple[tuple[str, tuple[Protocol, ...]], ...] = ()

    def __post_init__(self) -> None:
        for protocol in (*self.protocols, *(p for _, p in self.internal)):
            if protocol.window > protocol.base:
                raise ClusterError(f"{protocol}: bytes cannot hide under no latency")

    def with_launch(self, seconds: float) -> Transport:
        return replace(self, launch=seconds)


def moved(x: float | Floats, protocol: Protocol, steps: int = 0) -> float | Floats:
    """Seconds for x seconds of bytes: what the base does not hide, and the pipeline's fill."""
    fill = protocol.fill + protocol.hop_fill * steps
    return np.maximum(0.0, x - protocol.window) + np.minimum(2.0 * (fill * x) ** 0.5, protocol.most)
