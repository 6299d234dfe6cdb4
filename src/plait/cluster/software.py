"""What software costs on any machine: one set of constants, and the transports made of it.

The constants are fitted to all published tables and crossings together (cost/fitting.py), so that a
machine is described by its hardware alone; each table is also predicted by constants that have not
seen it (bench/price.py prints both). `plait calibrate` replaces them by a machine's own.

    nccl        its own collectives: rings and trees by two protocols, and addition in the switch;
                its sends and receives for schedules step by step
    symmetric   kernels that read their peers' memory, a barrier around them
    push        kernels that write to their peers with the flag in the data: no barrier
    multicast   kernels that write through the switch to all at once: not priced, only fitted
    gloo        TCP between processes: everything step by step, additions on the CPU
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from plait.cluster.transport import Protocol, Transport

STEPWISE = (
    "parameter_server",
    "sharded_server",
    "ring",
    "tree",
    "binomial",
    "double_tree",
    "halving_doubling",
    "recursive_doubling",
    "one_shot",
    "two_shot",
    "hierarchical",
)


@dataclass(frozen=True)
class Shared:
    """Seconds, and shares of what a copy reaches (Level.share)."""

    stream: float = 14.6e-6  # to start a collective from a C++ loop on a stream; in a CUDA graph: 0
    torch: float = 27e-6  # from Python
    few_base: float = 11.3e-6  # NCCL's LL: flags in the data, soon and at a part of the rate
    few_share: float = 0.458
    mid_share: float = 0.675  # NCCL's LL128: a flag in each 128 bytes
    many_base: float = 9.92e-6  # NCCL's Simple: chunks and counters, late and at the full rate
    many_share: float = 0.985
    switch_base: float = 12.7e-6  # Simple where the switch adds, and what that reaches of its rate
    registered_base: float = 6.13e-6  # the same by a kernel on registered buffers
    switch_share: float = 0.916
    fill: float = 2.94e-6  # Simple's pipeline: chunks, and for each hop
    hop_fill: float = 0.841e-6
    most: float = 160e-6
    pull_base: float = 5.76e-6
    pull_peer: float = 0.533e-6  # each peer in each step: its flag
    pull_share: float = 0.825
    push_step: float = 2.42e-6
    four_share: float = 0.218  # of a port, by kernels of only four thread blocks


# Hops in those of a ring by LL, which take 0.6 us by NVLink and 2.7 us by network: (near, far).
# Trees reach 0.92 of the rate of rings, by LL 0.92 / 3.8 where rings reach a half, and LL is slow
# between hosts (40 of 370 GB/s). A ring by Simple over several hosts takes 1.4 times its hops, as
# all of them wait for the slowest. (All of it: NCCL src/graph/tuning.cc 2.30.)
RING_HOPS = {"LL": (1.0, 1.0), "LL128": (1.9 / 0.6, 4 / 2.7), "Simple": (3.4 / 0.6, 14 / 2.7)}
TREE_HOPS = {"LL": (1.0, 5 / 2.7), "LL128": (1.25 / 0.6, 8.5 / 2.7), "Simple": (4 / 0.6, 14 / 2.7)}
SWITCH_HOPS = (3.4 / 0.6, 20.9 / 2.7)
TREE_SHARE = 0.92
TREE_FEW_SHARE = 0.92 / 3.8 / 0.5
FAR_FEW_SHARE = 40 / 370
PLATEAU = 1.4


def launch(method: str, shared: Shared) -> float:
    """Seconds that starting a collective costs: in a CUDA graph, on a stream, or from torch."""
    return {"graph": 0.0, "stream": shared.stream, "torch": shared.torch}[method]


def nccl(shared: Shared) -> Transport:
    few = Protocol(
        "LL", shared.few_base, share=shared.few_share, far_share=FAR_FEW_SHARE, flags=True
    )
    mid = Protocol("LL128", shared.few_base, share=shared.mid_share, flags=True)
    many = _many(shared, shared.many_base)
    ring = [_hopping(p, RING_HOPS[p.name]) for p in (few, mid, many)]
    few_tree = replace(few, share=few.share * TREE_FEW_SHARE)
    mid_tree, many_tree = (replace(p, share=p.share * TREE_SHARE) for p in (mid, many))
    tree = [_hopping(p, TREE_HOPS[p.name]) for p in (few_tree, mid_tree, many_tree)]
    ring[2] = replace(ring[2], plateau=PLATEAU)
    return Transport(
        "nccl",
        # A grouped send and receive is a kernel, estimated at 10 us a step; the share is that of
        # sendrecv_perf on 8 A100 (195 of 300 GB/s, github.com/li-plus/playground cuda/nccl.md).
        protocols=(Protocol("p2p", base=2e-6, step=10e-6, message=0.5e-6, share=0.74),),
        algorithms=STEPWISE,
        internal=(
            *(("ring", p) for p in ring),
            *(("tree", p) for p in tree),
            ("nvls", _hopping(_many(shared, shared.switch_base), SWITCH_HOPS)),
        ),
        launch=shared.stream,
        fused=False,
        add=1e-12,  # three passes over 3 TB/s
    )


def nccl_symmetric(shared: Shared) -> Transport:
    """NCCL where the buffers are registered: every rank reads all the others' at once."""
    by = nccl(shared)
    switch = _hopping(_many(shared, shared.registered_base), SWITCH_HOPS)
    return replace(by, internal=(("direct", by.internal[0][1]), ("nvls", switch)))


def _many(shared: Shared, base: float) -> Protocol:
    return Protocol(
        "Simple",
        base=base,
        share=shared.many_share,
        adding=shared.switch_share,
        fill=shared.fill,
        hop_fill=shared.hop_fill,
        most=shared.most,
    )


def _hopping(protocol: Protocol, hops: tuple[float, float]) -> Protocol:
    near, far = hops
    return replace(protocol, hops=near, far_hops=far)


def symmetric(shared: Shared) -> Transport:
    """Torch's symmetric memory and its like: a flag from every peer, then reads from it."""
    pull = Protocol(
        "pull", base=shared.pull_base, message=shared.pull_peer, share=shared.pull_share
    )
    return Transport("symmetric", (pull,), DIRECT, launch=shared.stream, reach=0)


def push(shared: Shared, share: float | None = None) -> Transport:
    """Kernels that write to their peers, each word with its flag."""
    share = shared.pull_share if share is None else share
    by = Protocol("push", step=shared.push_step, share=share)
    return Transport("push", (by,), DIRECT, launch=shared.stream, reach=0)


@lru_cache(maxsize=16)
def transports(shared: Shared) -> Mapping[str, Transport]:
    """By name; a 4 at the end: kernels of four thread blocks, which reach a part of a port."""
    return MappingProxyType(
        {
            "nccl": nccl(shared),
            "nccl-symmetric": nccl_symmetric(shared),
            "symmetric": symmetric(shared),
            "push": push(shared),
            "push4": push(shared, shared.four_share),
        }
    )


# --- tables --------------------------------------------------------------------------------------

DIRECT = ("one_shot", "two_shot")
SHARED = Shared()
LAUNCH = {method: launch(method, SHARED) for method in ("graph", "stream", "torch")}

_TCP = Protocol("tcp", base=270e-6, message=234e-6)  # presets.py says where they were measured
GLOO = Transport(
    "gloo",
    protocols=(_TCP,),
    algorithms=STEPWISE,
    internal=(("ring", _TCP),),
    fused=False,
    add=1.07e-10,
)
