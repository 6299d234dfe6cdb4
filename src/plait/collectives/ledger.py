"""The ledger: bytes sent and received per rank and per link, counted from the schedule.

    ledger(build("ring[4]"), 1 << 20).sent      (1572864, 1572864, 1572864, 1572864)
    print(compare(build("ring[4]"), 1 << 20))   counted, closed form, lower bound

The size `S` is, as in nccl-tests, the whole vector; for all_to_all what one rank sends, its own
block included. Derivations of the closed forms and bounds: docs/collectives.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2
from types import MappingProxyType

from plait.collectives.algorithms import schedule_of
from plait.collectives.schedule import Collective, Schedule, check_asked, whole
from plait.errors import ScheduleError

Link = tuple[int, int]


@dataclass(frozen=True)
class Ledger:
    """Bytes on every link (source, target) that carries any."""

    schedule: Schedule
    size: int
    links: MappingProxyType[Link, int]

    @cached_property
    def sent(self) -> tuple[int, ...]:
        return tuple(sum(b for (a, _), b in self.links.items() if a == r) for r in self._ranks)

    @cached_property
    def received(self) -> tuple[int, ...]:
        return tuple(sum(b for (_, a), b in self.links.items() if a == r) for r in self._ranks)

    @property
    def total(self) -> int:
        return sum(self.links.values())

    @property
    def busiest(self) -> int:
        """The most that any rank sends or receives: what its port must carry one way."""
        return max((*self.sent, *self.received), default=0)

    @property
    def _ranks(self) -> range:
        return range(self.schedule.n)


def ledger(
    schedule: Schedule | str, size: int, itemsize: int = 1, sizes: Sequence[int] | None = None
) -> Ledger:
    """The bytes of a schedule for `size` bytes, cut between elements of `itemsize` bytes.

    `sizes`: elements of each part, where they are uneven (see `Schedule.chunk_sizes`).
    """
    schedule = schedule_of(schedule)
    if not whole(size, least=0) or not whole(itemsize, least=1):
        text = f"{size!r} bytes in elements of {itemsize!r}; both are whole numbers, 0 and 1 the least"
        raise ScheduleError(f"{schedule}: cannot count {text}")
    elements = schedule.chunk_sizes(size // itemsize, sizes)
    links: Counter[Link] = Counter()
    for _, transfer in schedule.transfers():
        links[transfer.source, transfer.target] += elements[transfer.chunk] * itemsize
    carried = {link: count for link, count in sorted(links.items()) if count}
    return Ledger(schedule, size, MappingProxyType(carried))


# --- closed forms ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """Multiples of S: the busiest rank's bytes one way, and all bytes together."""

    busiest: float
    total: float


def closed_form(algorithm: str, collective: Collective, n: int) -> Form | None:
    """The formula of an algorithm, where one is known, for sizes that divide evenly."""
    check_asked(collective, n)
    forms = _FORMS.get((collective, algorithm))
    return forms(n) if forms and n > 1 else None


def least(collective: Collective, n: int) -> Form:
    """What no algorithm without addition in the network can do with less.

    busiest: a rank must take in what it lacks and give away what others lack of it; for all_reduce
    2(n-1)/n (Patarasuk and Yuan 2009), by the average over ranks of `total`.
    total: every element of an all_reduce takes n - 1 transfers to one place and n - 1 back.
    """
    check_asked(collective, n)
    if n == 1:
        return Form(0, 0)
    share = (n - 1) / n
    return {
        "all_reduce": Form(2 * share, 2 * (n - 1)),
        "reduce_scatter": Form(share, n - 1),
        "all_gather": Form(share, n - 1),
        "all_to_all": Form(share, n - 1),
        "broadcast": Form(1, n - 1),
        "reduce": Form(1, n - 1),
    }[collective]


def compare(schedule: Schedule | str, size: int) -> str:
    """Counted bytes beside the closed form and the bound, as a small table."""
    schedule = schedule_of(schedule)
    book, bound = ledger(schedule, size), least(schedule.collective, schedule.n)
    name = schedule.spec.algorithm if schedule.spec else ""
    form = closed_form(name, schedule.collective, schedule.n)
    rows = [f"{schedule}, {size} bytes", f"{'':24}{'busiest rank':>16}{'all ranks':>16}"]
    rows.append(f"{'counted':24}{book.busiest:16}{book.total:16}")
    if form:
        rows.append(f"{'closed form':24}{form.busiest * size:16.0f}{form.total * size:16.0f}")
    rows.append(f"{'lower bound':24}{bound.busiest * size:16.0f}{bound.total * size:16.0f}")
    if schedule.n > 1 and size:
        ratios = book.busiest / (bound.busiest * size), book.total / (bound.total * size)
        rows.append(f"{'counted / bound':24}{ratios[0]:16.3f}{ratios[1]:16.3f}")
    return "\n".join(rows)


def _even(n: int) -> Form:
    """Every rank the same, at the bound: ring, two_shot, halving_doubling of a power of two."""
    return Form(2 * (n - 1) / n, 2 * (n - 1))


def _once(n: int) -> Form:
    return Form((n - 1) / n, n - 1)


def _master(n: int) -> Form:
    """The master's port carries everybody's vector, each way."""
    return Form(n - 1, 2 * (n - 1))


def _doubling(n: int) -> Form:
    """Recursive doubling: n 2^m has m exchanges of S; otherwise r pairs fold before and after."""
    core = 1 << n.bit_length() - 1
    steps, folded = core.bit_length() - 1, n - core
    return Form(steps + (folded > 0), core * steps + 2 * folded)


def _halving(n: int) -> Form:
    """Rabenseifner: 2(p-1)/p on p = 2^floor(log2 n) ranks, S more through a pair's odd rank."""
    core = 1 << n.bit_length() - 1
    return Form(2 * (core - 1) / core + (n > core), 2 * (n - 1))


def _binary(n: int) -> Form:
    """An interior rank takes S from each child and S from its parent; the root lacks the parent."""
    return Form(3.0 if n > 4 else min(n - 1.0, 2.0), 2 * (n - 1))


def _twin(n: int) -> Form:
    """Interior in one tree (3 halves) and a leaf in the other (1 half): 2S at most."""
    return Form(2.0 if n > 4 else {2: 1.0, 3: 1.5, 4: 2.0}[n], 2 * (n - 1))


def _binomial(n: int) -> Form:
    """The root has ceil(log2 n) children."""
    return Form(ceil(log2(n)), 2 * (n - 1))


def _all(n: int) -> Form:
    return Form(n - 1, n * (n - 1))


_FORMS: dict[tuple[Collective, str], Callable[[int], Form]] = {
    ("all_reduce", "parameter_server"): _master,
    ("all_reduce", "sharded_server"): _even,
    ("all_reduce", "ring"): _even,
    ("all_reduce", "two_shot"): _even,
    ("all_reduce", "halving_doubling"): _halving,
    ("all_reduce", "recursive_doubling"): _doubling,
    ("all_reduce", "tree"): _binary,
    ("all_reduce", "binomial"): _binomial,
    ("all_reduce", "double_tree"): _twin,
    ("all_reduce", "one_shot"): _all,
    **{
        (collective, name): _once
        for collective in ("reduce_scatter", "all_gather", "all_to_all")
        for name in ("ring", "one_shot", "two_shot", "sharded_server")
    },
    ("all_gather", "recursive_doubling"): _once,
    ("reduce_scatter", "recursive_doubling"): _once,
    **{
        (collective, name): lambda n: Form(n - 1, n - 1)
        for collective in ("broadcast", "reduce")
        for name in ("parameter_server", "one_shot")
    },
    **{(collective, "ring"): lambda n: Form(1, n - 1) for collective in ("broadcast", "reduce")},
}
