"""Direct moves in the plan: which moves of a program go through the peers' memory, and what is left of them.

A gather hides beside the matmuls on own rows, a scatter beside the matmul on own rows (N ranks):

    gather    copy   |-- wake --|== run 1 ==|== run 2 ==|
              matmul |== own rows ==|       |== 1 ==|   |== 2 ==|             exposed: where a matmul waits
    scatter   matmul |== 1 ==|== 2 ==|== own rows ==|
              copy           |-- wake --|== 1 ==|== 2 ==|                     exposed: what copy sticks out

Smaller matmuls lose whole waves of tiles, and weights are read once a piece; both are in the clock of
the device (cluster/device.py). Where that costs more, or a matmul is shorter than its copy, part of the rows
is moved by the kernel that sums and norms, or all of them, which leaves the matmul in one piece. Every route
is timed by these pictures, and the fastest is taken.

In training no kernel moves rows, and the way back is timed with the way there (runtime/direct_training.py): there
a transfer is hidden beside gradients of weights, of its own matmuls or of those behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from plait.cluster import Cluster
from plait.cluster.device import Device
from plait.passes.partition import BACK
from plait.passes.rings import RUNS, Event, Few, Found, Route, Shape, columns
from plait.plan.plan import Overlapped, Second

RING, HOP = "ring", "one hop"
# Measured on 2 x H200 (bench/results/rowshard-notes.md): from a kernel's end to the first byte of a push 2-5 us,
# from its last byte to the start of the kernel that waits 3 us; copies reach 364 of 396 GB/s; one hop of T rows of
# 16 KiB takes 4.6 us and 45 ns a row, less the norm's own 2.1 us.
WAKE = 7e-6
COPIES = 0.92
GAP = 7e-6  # between two copies that follow each other, with the flag of the first (timeline of 2 x H200, 2026-11-30)
HOP_BASE, HOP_SHARE = 2.6e-6, 0.92
PARTS = (0.0, 0.25, 0.5, 1.0)  # of the rows, that kernels move
PIECE = 512  # rows; shorter pieces of matmuls were not measured, and are not made
# Of runs, how much faster they have to be: matmuls of 512 rows take what the clock says, whole ones up to 20 % less.
SURE = {1: 1.0, 2: 1.05, 4: 1.1}
SIGNAL = 3.6e-6  # a put and its wait between two kernels
GAIN = 1.03  # less is within the error of a prediction: the collectives stay
Matmul = Callable[[float, float, float, str], float]  # seconds of [m, k] x [k, n] in a graph, of a dtype
PUSHED = 1.6  # a kernel's loads and stores beside its own work, against a copy's rate


@dataclass(frozen=True)
class Peers:
    """N devices that read and write each other's memory."""

    device: Device
    n: int
    rate: float  # bytes/s of a copy from one device to another
    matmul: Matmul

    @classmethod
    def of(cls, cluster: Cluster, n: int, matmul: Matmul) -> Peers | None:
        """None where they cannot, or where it is not known to pay: several hosts, a shared bus."""
        level = cluster.levels[0]
        reach = any(t.name == "symmetric" for t in cluster.transports)
        if n == 1 or cluster.device.kind != "cuda" or not reach or level.through:
            return None
        apart = len(cluster.levels) > 1 and len(cluster.units(1, range(n))) > 1
        if n > cluster.size or apart:
            return None
        return cls(cluster.device, n, level.bandwidth * level.share * COPIES, cache(matmul))


def weigh(found: Found, blocking: Mapping[str, float], peers: Peers) -> tuple[Overlapped, ...]:
    """What gains on `blocking`, the seconds of every site's collective."""
    out: list[Overlapped] = []
    for shape, events in found.rings.items():
        clocks = [_Clock.of(e, shape, found, peers) for e in events]
        late = [0, *(_late(a, b) for a, b in pairwise(clocks))]
        timed = (_ring(*both, blocking) for both in zip(clocks, _debts(clocks, late), strict=True))
        ring = [o for o in timed if o is not None]
        if GAIN * sum(o.seconds for o in ring) < sum(o.whole for o in ring):
            out += ring
    for few in found.few:
        hop = _hop(few, blocking[few.site.name], peers)
        if hop.seconds < hop.whole:
            out.append(hop)
    return tuple(out)


def routes(overlaps: tuple[Overlapped, ...]) -> dict[str, Route]:
    """site -> how its rows travel, of every site that is direct."""
    out: dict[str, Route] = {}
    for o in overlaps:
        if direct(o.form):
            route = Route(direct=1.0) if o.form == HOP else Route.parse(o.form.removeprefix(f"{RING} "))
            out |= dict.fromkeys(o.sites, route)
    return out


def direct(form: str) -> bool:
    return form == HOP or form.startswith(f"{RING} ")


@dataclass(frozen=True)
class _Debts:
    """Of an event: the last `late` of its weights' gradients are computed by the event before; `taken`: the seconds
    that it computes of the next one's."""

    late: int = 0
    taken: float = 0.0


def _late(scatter: _Clock, gather: _Clock) -> int:
    """How many of a gather's weights' gradients, from the last, hide what is open of the move back of the scatter
    before it. The gather keeps enough of them to hide its own."""
    if (scatter.event.kind, gather.event.kind) != ("scatter", "gather") or not gather.event.site.grad:
        return 0
    open_ = scatter.travel() - scatter.of_data(scatter.own)
    if open_ < SIGNAL:
        return 0
    for late in range(1, len(gather.sizes)):
        if gather.of_weights(late) < gather.travel():
            return 0
        if gather.owed(late) >= open_:
            return late
    return 0


def _debts(clocks: Sequence[_Clock], late: Sequence[int]) -> Iterator[_Debts]:
    taken = [clock.owed(count) for clock, count in zip(clocks, late, strict=True)]
    return map(_Debts, late, [*taken[1:], 0.0])


def _ring(clock: _Clock, debts: _Debts, blocking: Mapping[str, float]) -> Overlapped | None:
    """None where there are too few rows for any route."""
    event, name = clock.event, clock.event.site.name
    timed = [(clock.seconds(route), route) for route in _routes(clock)]
    if not timed:
        return None
    # the first of equals: fewest runs, fewest direct rows
    timed.sort(key=lambda one: one[0] * SURE[one[1].runs])
    whole, moved = clock.compute(clock.rows), blocking[name]
    timed = timed[:2]
    if event.site.grad:
        timed = [(seconds + clock.back(route, debts) + clock.sum(), route) for seconds, route in timed]
        whole += clock.of_data(clock.rows) + clock.of_weights()
        moved += blocking[f"{name}{BACK}"]
    seen = [Second(f"{RING} {replace(r, late=debts.late)}", s, max(0.0, s - whole)) for s, r in timed]
    first, second, *_ = *seen, None
    assert first is not None
    return Overlapped(
        region=", ".join(m.name for m in event.matmuls) or name,
        form=first.form,
        sites=(name,),
        nodes=len(event.matmuls),
        seconds=first.seconds,
        whole=whole + moved,
        exposed=first.exposed,
        second=second if second is not None and second.seconds < whole + moved else None,
    )


def _routes(clock: _Clock) -> Iterator[Route]:
    """In training norms are autograd's, and no kernel of theirs moves rows."""
    for part in (0.0,) if clock.event.site.grad else PARTS:
        for runs in RUNS if part < 1 else (1,):
            if clock.own * (1 - part) / runs >= PIECE or part == 1:
                yield Route(part, runs)


@dataclass(frozen=True)
class _Clock:
    """One move beside the matmuls around it, on the rank with the most rows."""

    event: Event
    own: int  # rows
    rows: int
    nbytes: int  # of the own rows
    sizes: tuple[tuple[int, int], ...]  # of the matmuls: columns, summed
    learn: tuple[bool, ...]  # whether weights of theirs do
    dtype: str
    peers: Peers

    @classmethod
    def of(cls, event: Event, shape: Shape, found: Found, peers: Peers) -> _Clock:
        shapes = [[found.specs[str(w)].shape for w in columns(m)] for m in event.matmuls]
        sizes = tuple((sum(o for o, _ in packed), packed[0][1]) for packed in shapes)
        own = max(b - a for a, b in pairwise(shape.bounds))
        nbytes = own * shape.width * shape.dtype.itemsize
        learn = tuple(any(str(w) not in found.frozen for w in columns(m)) for m in event.matmuls)
        return cls(event, own, shape.rows, nbytes, sizes, learn, str(shape.dtype), peers)

    def compute(self, rows: float) -> float:
        return sum(self.peers.matmul(rows, o, i, self.dtype) for o, i in self.sizes)

    def travel(self) -> float:
        """From the last byte of the own rows to that of the others' rows."""
        return WAKE + (self.peers.n - 1) * self.nbytes / self.peers.rate

    def back(self, route: Route, debts: _Debts) -> float:
        """The way back: gathered rows travel beside gradients of data, terms beside those of weights; what one
        move computes of another's is counted where it stands in the program."""
        if self.event.kind == "gather":
            own, late = self.of_weights(debts.late), self.owed(debts.late)
            return max(self.of_data(self.rows), self.travel()) + max(own, self.travel()) + late
        own = self.of_data(self.own)
        if debts.taken:
            open_ = max(0.0, self.travel() - debts.taken)
            return open_ + own + self.of_data(self.rows - self.own) + self.of_weights()
        steps = (self.peers.n - 1) * route.runs
        piece = self.of_data(self.own / route.runs)
        copy = self.nbytes / self.peers.rate / route.runs + GAP
        return _gathered(own, piece, copy, steps) + self.of_weights()

    def of_data(self, rows: float) -> float:
        return sum(self.peers.matmul(rows, i, o, self.dtype) for o, i in self.sizes)

    def owed(self, late: int) -> float:
        """Of the weights of the last `late` matmuls."""
        return self.of_weights() - self.of_weights(late)

    def of_weights(self, late: int = 0) -> float:
        """Of those that learn, but for the last `late` matmuls'."""
        pairs = list(zip(self.sizes, self.learn, strict=True))[: len(self.sizes) - late]
        return sum(self.peers.matmul(o, i, self.rows, self.dtype) for (o, i), learns in pairs if learns)

    def sum(self) -> float:
        """Of the terms of the own rows, which no norm takes in."""
        return (self.peers.n + 1) * self.nbytes / self.peers.device.bandwidth

    def seconds(self, route: Route) -> float:
        """Until the last matmul, or the last row, whichever comes later; with what kernels move in the open."""
        others = self.peers.n - 1
        moved = route.direct * self.nbytes * others
        open_ = 2 * SIGNAL + moved / (self.peers.rate * PUSHED) if moved else 0.0
        if route.direct == 1:
            return self.compute(self.rows) + open_
        piece = (1 - route.direct) * self.own / route.runs
        first = self.rows - others * route.runs * piece  # the own rows, and the direct ones beside them
        copy = piece / self.own * self.nbytes / self.peers.rate + (GAP if route.runs > 1 else 0.0)
        steps = others * route.runs
        one, beside = self.compute(piece), self.compute(first)
        if self.event.kind == "gather":
            return open_ + _gathered(beside, one, copy, steps)
        return open_ + _scattered(beside, one, copy, steps)


def _gathered(own: float, piece: float, copy: float, steps: int) -> float:
    """Own rows first; then every piece when its rows are here."""
    now = own
    for i in range(steps):
        now = max(now, WAKE + (i + 1) * copy) + piece
    return now


def _scattered(own: float, piece: float, copy: float, steps: int) -> float:
    """Every piece, copied as soon as it is done and the copies before it are; own rows last."""
    copied = 0.0
    for i in range(steps):
        copied = max(copied, (i + 1) * piece + WAKE) + copy
    return max(steps * piece + own, copied)


def _hop(few: Few, blocking: float, peers: Peers) -> Overlapped:
    nbytes = few.rows * few.width * few.site.dtype.itemsize * (peers.n - 1)
    seconds = HOP_BASE + nbytes / (peers.rate / COPIES * HOP_SHARE)
    return Overlapped(few.site.name, HOP, (few.site.name,), 0, seconds, blocking, seconds)
