"""A schedule in words, and its steps drawn in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from plait.collectives.algorithms import schedule_of
from plait.collectives.check import prove
from plait.collectives.ledger import compare
from plait.collectives.schedule import Message, Schedule

_ADDED = {
    "fp32": "every sum is added up in fp32 on one rank, and rounded once to the dtype on the wire",
    "wire": "every addition is made in fp32 and rounded to the dtype on the wire",
}


def explain(schedule: Schedule | str, size: int = 1 << 20) -> str:
    """What a schedule does: steps, bytes beside the bound, how sums are rounded."""
    schedule = schedule_of(schedule)
    proof = prove(schedule)
    messages = sum(map(len, schedule.messages))
    lines = [
        compare(schedule, size),
        f"{len(schedule.steps)} steps, {messages} messages, {schedule.chunks} chunks",
    ]
    if proof.roundings:
        free = "do not depend" if proof.size_free else "depend"
        lines.append(f"{_ADDED[proof.accumulation]} ({proof.roundings} roundings at most)")
        lines.append(f"the bits of a sum {free} on the size; they are the same on every rank")
    return "\n".join(lines)


def draw(schedule: Schedule | str) -> str:
    """One row a step, one column a rank: what each receives.

    step     rank 0      rank 1      rank 2
    0        2: +1       0: +2       1: +0        rank 0 adds chunk 1 from rank 2
    2        2: 2        0: 0        1: 1         rank 0 takes chunk 2 from rank 2
    """
    schedule = schedule_of(schedule)
    table = [["step", *(f"rank {rank}" for rank in range(schedule.n))]]
    for index, step in enumerate(schedule.messages):
        arrivals = [" ".join(_arrivals(step, rank)) for rank in range(schedule.n)]
        table.append([str(index), *arrivals])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([f"{schedule}    (source: chunk taken, +chunk added)", *rows])


def _arrivals(step: tuple[Message, ...], rank: int) -> Iterator[str]:
    for message in step:
        if message.target == rank:
            sign = "+" if message.op == "add" else ""
            yield f"{message.source}: " + ",".join(f"{sign}{c}" for c in message.chunks)
