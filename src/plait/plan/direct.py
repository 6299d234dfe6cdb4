"""Direct moves in the plan: which moves of a program go through the peers' memory, and what is left of them.

A gather hides beside the matmuls on own rows, a scatter beside the matmul on own rows (N ranks):

    gather    copy   |-- wake --|== rows of N-1 ranks ==|
              matmul |== own rows ==|                   |== others ==|        exposed: what copy sticks out
    scatter   matmul |== others ==|== own rows ==|
              copy                |-- wake --|== terms of own rows ==|        exposed: the same

Smaller matmuls lose whole waves of tiles, and weights are read once a piece; both are in the clock of
the device (cluster/device.py). Where that costs more, or a matmul is shorter than its copy, part of the rows
is moved by the kernel that sums and norms: the share was measured by size, not modelled. All of them leave
the matmul in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.cluster import Cluster
from plait.cluster.device import Device
from plait.passes.rings import Event, Few, Found, Shape, columns
from plait.plan.plan import Overlapped

RING, HOP = "ring", "one hop"
# Measured on 2 x H200 (bench/results/rowshard-notes.md): from a kernel's end to the first byte of a copy
# 10-20 us; copies reach 364 of 396 GB/s; one hop of T rows of 16 KiB takes 4.6 us and 45 ns a row, less
# the norm's own 2.1 us.
WAKE = 15e-6
COPIES = 0.92
HOP_BASE, HOP_SHARE = 2.6e-6, 0.92
# Rows that kernels move, by bytes that a rank pulls: (up to, of a gather, of a scatter).
DIRECT = ((8 << 20, 1.0, 1.0), (16 << 20, 1.0, 0.25))
PIECE = 512  # rows; shorter pieces of matmuls were not measured, and are not made
SIGNAL = 3.6e-6  # a put and its wait between two kernels
GAIN = 1.03  # less is within the error of a prediction: the collectives stay
PUSHED = 1.6  # a kernel's loads and stores beside its own work, against a copy's rate


@dataclass(frozen=True)
class Peers:
    """N devices that read and write each other's memory."""

    device: Device
    n: int
    rate: float  # bytes/s of a copy from one device to another

    @classmethod
    def of(cls, cluster: Cluster, n: int) -> Peers | None:
        """None where they cannot, or where it is not known to pay: several hosts, a shared bus."""
        level = cluster.levels[0]
        reach = any(t.name == "symmetric" for t in cluster.transports)
        if n == 1 or cluster.device.kind != "cuda" or not reach or level.through:
            return None
        apart = len(cluster.levels) > 1 and len(cluster.units(1, range(n))) > 1
        if n > cluster.size or apart:
            return None
        return cls(cluster.device, n, level.bandwidth * level.share * COPIES)


def weigh(found: Found, blocking: Mapping[str, float], peers: Peers) -> tuple[Overlapped, ...]:
    """What gains on `blocking`, the seconds of every site's collective."""
    out: list[Overlapped] = []
    for shape, events in found.rings.items():
        ring = [_ring(e, shape, found, blocking[e.site.name], peers) for e in events]
        if GAIN * sum(o.seconds for o in ring) < sum(o.whole for o in ring):
            out += ring
    for few in found.few:
        hop = _hop(few, blocking[few.site.name], peers)
        if hop.seconds < hop.whole:
            out.append(hop)
    return tuple(out)


def shares(overlaps: tuple[Overlapped, ...]) -> dict[str, float]:
    """site -> the part of its rows that kernels move, of every site that is direct."""
    out: dict[str, float] = {}
    for o in overlaps:
        kind, _, share = o.form.rpartition(" ")
        if direct(o.form):
            out |= dict.fromkeys(o.sites, float(share) if kind == RING else 1.0)
    return out


def direct(form: str) -> bool:
    return form == HOP or form.startswith(f"{RING} ")


def _ring(event: Event, shape: Shape, found: Found, blocking: float, peers: Peers) -> Overlapped:
    shapes = [[found.specs[str(w)].shape for w in columns(m)] for m in event.matmuls]
    sizes = [(sum(o for o, _ in packed), packed[0][1]) for packed in shapes]
    dtype = str(shape.dtype)

    def compute(rows: int) -> float:
        launch, clock = peers.device.launch, peers.device.matmul_seconds
        return sum(launch + clock(rows, o, i, dtype) for o, i in sizes) if rows else 0.0

    own, rows = shape.bounds[1] - shape.bounds[0], shape.rows
    others = rows - own
    nbytes = shape.nbytes(0) * (peers.n - 1)
    whole, pieces = compute(rows), compute(own) + (peers.n - 1) * compute(others // (peers.n - 1))

    def seconds(share: float) -> tuple[float, float]:
        """(all of it, exposed) where kernels move `share` of the rows; all of them need no pieces."""
        if share == 1:
            exposed = 2 * SIGNAL + nbytes / (peers.rate * PUSHED)
            return whole + exposed, exposed
        left = own + share * others
        exposed = max(0.0, WAKE + (1 - share) * nbytes / peers.rate - compute(round(left)))
        if share:
            exposed += 2 * SIGNAL + share * nbytes / (peers.rate * PUSHED)
        return max(whole, pieces) + exposed, exposed

    measured = _measured(event.kind, nbytes)
    share = min((0.0, measured), key=seconds) if own >= PIECE or not measured else 1.0
    total, exposed = seconds(share)
    return Overlapped(
        region=event.site.name,
        form=f"{RING} {share:g}",
        sites=(event.site.name,),
        nodes=len(event.matmuls),
        seconds=total,
        whole=whole + blocking,
        exposed=exposed,
    )


def _measured(kind: str, nbytes: float) -> float:
    for most, gather, scatter in DIRECT:
        if nbytes <= most:
            return gather if kind == "gather" else scatter
    return 0.0


def _hop(few: Few, blocking: float, peers: Peers) -> Overlapped:
    nbytes = few.rows * few.width * few.site.dtype.itemsize * (peers.n - 1)
    seconds = HOP_BASE + nbytes / (peers.rate / COPIES * HOP_SHARE)
    return Overlapped(few.site.name, HOP, (few.site.name,), 0, seconds, blocking, seconds)
